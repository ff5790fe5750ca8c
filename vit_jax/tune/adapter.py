"""Adapters (Houlsby et al., arXiv 1902.00751), placed as by Pfeiffer et al. (2005.00247)."""

import dataclasses
import re
from typing import Annotated, ClassVar

import flax.linen as nn
import jax

from vit_jax.check import Range
from vit_jax.tune.method import Method
from vit_jax.tune.tuned import Addition


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter(Method):
  """Trains the head, and an adapter h + up(gelu(down(h))) in each block.

  h is the output of the block's last branch, before it is added to the residual: in a ViT
  the output of the MLP. GELU is the exact one. `up` starts at zero and `down` does not, so
  that the model starts unchanged and both can learn. The code released with VPT (arXiv
  2203.12119) starts both at zero. Then neither ever gets a gradient, and only the last bias
  changes.

  Attributes:
    reduction: D / reduction is the number of channels between down and up. The VPT paper uses
      8, 64 or 256.
  """

  by_block: ClassVar = True

  reduction: Annotated[int, Range(1, 2**16)] = 8

  def make_added(self, backbone):
    places = []
    for path, layer in backbone.layers.items():
      if re.fullmatch(backbone.family.branch_ends, path):
        if (D := layer.outputs[-1]) < self.reduction:
          raise ValueError(
            f'reduction={self.reduction} is more than the {D} channels of {path}: set it to '
            f'at most {D}'
          )
        places.append((path, D, D // self.reduction))
    return Adapters(tuple(places))


class Adapters(Addition):
  """Adapters with parameters `PATH/down/{kernel,bias}` and `PATH/up/{kernel,bias}`.

  Attributes:
    places: (path of the layer, D, number of channels between) of each adapter.
  """

  places: tuple[tuple[str, int, int], ...]

  @nn.compact
  def layers(self, images, train):
    random, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros_init()
    made = {}
    for path, D, hidden in self.places:
      made[f'{path}/down/kernel'] = random, (D, hidden)
      made[f'{path}/down/bias'] = zeros, (hidden,)
      made[f'{path}/up/kernel'] = zeros, (hidden, D)
      made[f'{path}/up/bias'] = zeros, (D,)
    params = self.make_params(made)

    def make_replacement(path):
      def adapt(call, x, **kwargs):
        h = call(x, **kwargs)
        dense = lambda x, name: (
          x @ params[f'{path}/{name}/kernel'].astype(h.dtype)
          + params[f'{path}/{name}/bias'].astype(h.dtype)
        )
        return h + dense(jax.nn.gelu(dense(h, 'down'), approximate=False), 'up')

      return adapt

    adapters = {path: make_replacement(path) for path, *_ in self.places}
    return lambda module, path: adapters.get(path)
