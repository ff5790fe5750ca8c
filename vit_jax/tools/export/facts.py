"""Facts for users of an exported program: its pixels, outputs and class names."""

from vit_jax.data.ops import registry
from vit_jax.tools.export.program import BATCH, Program
from vit_jax.version import __version__
from vit_jax.weights import Loaded, pipelines

# Ops that leave the values of pixels as they are, but for interpolation.
_GEOMETRY = ('decode', 'resize', 'resize_small', 'central_crop')


def collect(
  loaded: Loaded, program: Program, to: str, platforms: list[str] | None
) -> dict:
  """Returns the facts as JSON values.

  `input.mean` and `input.std` are per channel, of pixels in [0, 1], as timm and
  torchvision write them: the program takes (pixel / 255 - mean) / std. They are null
  where the pipeline does something else to pixels.
  """
  H, W, C = program.shape(BATCH)[1:]
  ops = registry.parse(_filling(loaded.pp, (H, W)))
  mean, std = _normalisation(ops, C)
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
  """Returns a pipeline whose images fill their size: a program takes no mask of padding.

  Where `pp` pads them, they are resized to that size.
  """
  ops = registry.parse(pp)
  if not any('image_mask' in op.maps for op in ops):
    return pp
  texts = [op.text for op in ops if op.name not in ('detr_resize', 'canvas')]
  return '|'.join([*texts[:1], f'resize({size}, antialias=True)', *texts[1:]])


def _normalisation(ops, channels: int) -> tuple[list[float] | None, list[float] | None]:
  """Returns (mean, std) of the one op that changes pixels; None if there are more."""
  levels = '|'.join(op.text for op in ops if op.name not in _GEOMETRY)
  if (preprocessor := pipelines.described(f'resize(1)|{levels}')) is None:
    return None, None
  return list(preprocessor.mean[:channels]), list(preprocessor.std[:channels])
