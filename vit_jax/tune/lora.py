"""LoRA: "Low-Rank Adaptation of Large Language Models", arXiv 2106.09685."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar

import flax.linen as nn
import numpy as np

from vit_jax import trees
from vit_jax.check import Range, nonempty
from vit_jax.errors import did_you_mean
from vit_jax.tune.method import Method
from vit_jax.tune.tuned import SCOPE, Addition

# The default of `layers` for a model that has such kernels (section 4.2).
_USUAL = r'.*/(query|value)/kernel'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora(Method):
  """Trains the head, and low-rank products alpha / rank * A B that are added to kernels.

  B starts at zero, so that the model starts unchanged. After training, `vit_jax convert`
  adds the product to the kernel.

  Attributes:
    rank: the rank of A [inputs, rank] and B [rank, outputs].
    alpha: the product A B is multiplied by alpha / rank.
    layers: regexes that match the names of kernels in full. By default, these are the kernels
      of query and value, or every kernel of the blocks in a model that has none of these. The
      kernel of a convolution [h, w, C, K] counts as a matrix [h w C, K]. A layer that
      standardises its kernel standardises the sum of kernel and product.
  """

  by_block: ClassVar = True

  rank: Annotated[int, Range(1, 2**16)] = 8
  alpha: Annotated[float, Range(0, 1e6, '(]')] = 8.0
  layers: Annotated[Sequence[str], nonempty] | None = None

  def make_added(self, backbone):
    in_blocks = [
      name
      for name in backbone.shapes
      if name.endswith('/kernel') and re.fullmatch(backbone.family.blocks, name)
    ]
    kernels = [name for name in in_blocks if re.fullmatch(_USUAL, name)] or in_blocks
    if self.layers is not None:
      every = [name for name in backbone.shapes if name.endswith('/kernel')]
      every = [name for name in every if not name.startswith('head/')]
      for regex in self.layers:
        if not any(trees.matches(regex, name) for name in every):
          raise ValueError(
            f'layers: {regex!r} matches none of the {len(every)} kernels in full; the '
            f'last are {every[-3:]}.{did_you_mean(regex, every)}'
          )
      kernels = [n for n in every if any(trees.matches(r, n) for r in self.layers)]
    places = [(n.removesuffix('/kernel'), *_sizes(backbone, n)) for n in kernels]
    return LowRank(tuple(places), self.rank, self.alpha / self.rank)

  def merge_added(self, params):
    merged = dict(params)
    for name in params:
      if match := re.fullmatch(rf'{SCOPE}/(.+)/lora_a', name):
        a, b = merged.pop(name), merged.pop(f'{SCOPE}/{match[1]}/lora_b')
        kernel = merged[f'{match[1]}/kernel']
        change = self.alpha / self.rank * (a.astype(np.float64) @ b)
        total = kernel + change.reshape(kernel.shape)
        merged[f'{match[1]}/kernel'] = total.astype(kernel.dtype)
    return merged


def _sizes(backbone, name: str) -> tuple[int, int]:
  """Returns the (inputs, outputs) of a kernel as a matrix."""
  shape = backbone.shapes[name]
  _, outputs = backbone.family.matrix_axes(name) or ((), (-1,))
  size = math.prod(shape[axis] for axis in outputs)
  return math.prod(shape) // size, size


class LowRank(Addition):
  """Low-rank products with parameters `PATH/lora_a` and `PATH/lora_b`.

  Attributes:
    places: (path of the layer, inputs, outputs) of each kernel.
    scale: the factor by which the product A B is multiplied.
  """

  places: tuple[tuple[str, int, int], ...]
  rank: int
  scale: float

  @nn.compact
  def layers(self, images, train):
    # Matrix A starts as in the paper's code: uniform with variance 1 / (3 inputs).
    random = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
    made = {}
    for path, inputs, outputs in self.places:
      made[f'{path}/lora_a'] = random, (inputs, self.rank)
      made[f'{path}/lora_b'] = nn.initializers.zeros_init(), (self.rank, outputs)
    params = self.make_params(made)

    def make_replacement(module, path):
      a, b = params[f'{path}/lora_a'], params[f'{path}/lora_b']

      def dense(call, x):
        y = call(x)
        low = x.astype(y.dtype) @ a.astype(y.dtype)
        return y + self.scale * (low @ b.astype(y.dtype))

      def other(call, x):
        if not module.has_variable('params', 'kernel'):
          # The module is being initialised. B is then zero, so there is nothing to add.
          return call(x)
        own = module.variables['params']
        change = self.scale * (a @ b).reshape(own['kernel'].shape)
        changed = {**own, 'kernel': own['kernel'] + change}
        return module.clone(parent=None).apply({'params': changed}, x)

      # A dense layer is linear in its kernel, so the product can be applied to the input. This
      # saves a sum of kernels and its gradient. Convolutions may standardise their kernel, so
      # they need the sum.
      return dense if isinstance(module, nn.Dense) else other

    paths = {path for path, *_ in self.places}
    return lambda module, path: (
      make_replacement(module, path) if path in paths else None
    )
