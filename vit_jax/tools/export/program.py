"""The exported program, a pure function of parameters and images, and its description."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import kernels, trees
from vit_jax.data.ops import registry
from vit_jax.errors import choose
from vit_jax.version import __version__
from vit_jax.weights import Loaded, adapt, pipelines

# The name of the batch axis if its length is variable.
BATCH = 'batch'
# Ops that change the values of pixels by interpolation only.
_GEOMETRY = ('decode', 'resize', 'resize_small', 'central_crop')


class Program:
  """A function (variables, images float32 [B, H, W, C]) that returns {name: float32 array}.

  Blocks are unrolled and not rematerialised, because other compilers do not optimise a loop
  over them. Attention is plain, because a fused kernel is a call into a library of one
  platform, which no portable format can hold.

  Args:
    layers: names of features to return besides the logits.
    batch: the number of images that the program takes; None: any number.

  Attributes:
    variables: the variables of the model, as numpy arrays.
    outputs: {name: shape without the batch axis}.
    dtype: the dtype of the computation, 'float32' or 'bfloat16'.
  """

  def __init__(self, loaded: Loaded, layers: Iterable[str], batch: int | None):
    model = loaded.model
    self._model = model.change(remat='none')
    self._image = (*loaded.image_size, loaded.channels)
    self._layers, self._features = tuple(layers), False
    classes = getattr(model, 'num_classes', None)
    self._first = 'pre_logits' if classes is None else 'logits'
    self.batch, self.variables = batch, loaded.variables
    if getattr(model.untuned, 'scan', False):
      family, flat = model.family, trees.flatten(loaded.params)
      params = trees.unflatten(adapt.unstack(flat, family))
      self._model = self._model.change(scan=False)
      self.variables = loaded.variables | {'params': params}
    self.dtype = jnp.dtype(model.untuned.dtype).name
    self.params = sum(x.size for x in jax.tree.leaves(loaded.variables))
    images = jax.ShapeDtypeStruct(self.shape(1), jnp.float32)
    _, out = jax.eval_shape(self._model.apply, self.variables, images)
    for layer in self._layers:
      choose('layer', layer, out)
    # The model computes less if it need not return features other than `pre_logits`.
    self._features = bool({*self._layers} - {'pre_logits'})
    shapes = jax.eval_shape(self, self.variables, images)
    self.outputs = {name: x.shape[1:] for name, x in shapes.items()}

  def __call__(self, variables: dict, images: jax.Array) -> dict[str, jax.Array]:
    with kernels.using():
      y, out = self._model.apply(variables, images, features=self._features)
    # Detectors and pyramids give several outputs, by name.
    outputs = dict(y) if isinstance(y, dict) else {self._first: y}
    outputs |= {layer: out[layer] for layer in self._layers}
    return {name: x.astype(jnp.float32) for name, x in outputs.items()}

  def shape(self, batch) -> tuple:
    """Returns the shape of `batch` images, or of `self.batch` images if that is fixed."""
    return (self.batch or batch, *self._image)

  def run_with_constants(self, images: jax.Array) -> dict[str, jax.Array]:
    """Returns the outputs for images, with the parameters as constants of the program."""
    return self(self.variables, images)

  def run_on_cpu(self, images: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the outputs for images, computed on the CPU."""
    with jax.default_device(jax.local_devices(backend='cpu')[0]):
      return jax.tree.map(np.asarray, jax.jit(self)(self.variables, images))


def describe(
  loaded: Loaded, program: Program, to: str, platforms: list[str] | None
) -> dict:
  """Describes the program for its users: its input, outputs and class names.

  `input.mean` and `input.std` are per channel, for pixels in [0, 1], as timm and torchvision
  write them: the program takes (pixel / 255 - mean) / std. They are null if the pipeline
  does something else to pixels.
  """
  H, W, C = program.shape(BATCH)[1:]
  ops = registry.parse(_filling(loaded.pp, (H, W)))
  plain = {op.name for op in ops} <= {*_GEOMETRY, 'value_range'}
  levels = pipelines.read_levels(loaded.pp) if plain else None
  mean, std = (x[:C] for x in levels) if levels else (None, None)
  return {
    'made_by': f'vit_jax {__version__}',
    'source': loaded.source,
    'step': loaded.step,
    'format': to,
    'platforms': platforms,
    'params': program.params,
    'compute_dtype': program.dtype,
    'input': {
      'name': 'images',
      'dtype': 'float32',
      'shape': list(program.shape(BATCH)),
      'layout': 'NHWC',
      'channels': 'RGB' if C == 3 else 'gray',
      'mean': mean,
      'std': std,
    },
    'preprocessing': {
      'text': '|'.join(op.text for op in ops),
      'ops': [{'op': op.name, **op.arguments} for op in ops],
    },
    'outputs': {
      name: {'dtype': 'float32', 'shape': [program.batch or BATCH, *shape]}
      for name, shape in program.outputs.items()
    },
    'class_names': list(loaded.class_names) if loaded.class_names else None,
  }


def _filling(pp: str, size: tuple[int, int]) -> str:
  """Returns a pipeline without padding, because a program takes no mask of the padding.

  If `pp` pads images to a size, the result resizes them to that size.
  """
  ops = registry.parse(pp)
  if not any('image_mask' in op.maps for op in ops):
    return pp
  texts = [op.text for op in ops if op.name not in ('detr_resize', 'canvas')]
  return '|'.join([*texts[:1], f'resize({size}, antialias=True)', *texts[1:]])
