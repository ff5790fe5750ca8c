"""Facts for users of an exported program: its pixels, outputs and class names."""

import numpy as np

from vit_jax.data.ops import registry
from vit_jax.data.single_image import SingleImage
from vit_jax.tools.export.program import BATCH, Program
from vit_jax.version import __version__
from vit_jax.weights import Loaded

# Ops that leave an image of one color as it is, but for rounding to whole levels.
_GEOMETRY = ('resize', 'resize_small', 'central_crop')


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
  mean, std = _normalisation(ops, (H, W, C))
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


def _normalisation(ops, shape) -> tuple[list[float] | None, list[float] | None]:
  """Returns (mean, std), from the pipeline's outputs for images of one color."""
  preprocess = SingleImage('|'.join(op.text for op in ops if op.name not in _GEOMETRY))
  found = []
  for level in (0, 102, 255):
    image = preprocess(np.full(shape, level, np.uint8)).reshape(-1, shape[-1])
    if np.ptp(image, 0).max() > 1e-4:
      return None, None
    found.append(image.mean(0, np.float64))
  black, between, white = found
  if not np.allclose(between, black + (white - black) * 102 / 255, atol=1e-4):
    return None, None
  std = 1 / (white - black)
  return [round(x, 6) for x in (-black * std).tolist()], [round(x, 6) for x in std]
