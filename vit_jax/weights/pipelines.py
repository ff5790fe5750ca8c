"""Evaluation pipelines as timm and transformers describe theirs, and as our ops."""

from typing import NamedTuple

import numpy as np

from vit_jax import models
from vit_jax.data.ops import registry
from vit_jax.weights.source import Source

# Pillow's numbers of its filters; Pillow antialiases, and rounds to the nearest level.
_RESAMPLE = {0: 'nearest', 2: 'bilinear', 3: 'bicubic'}
_NUMBERS = {method: number for number, method in _RESAMPLE.items()}
# Steps of transformers' processors.
_STEPS = ('convert_rgb', 'resize', 'rescale', 'normalize')


def of_timm(cfg: dict, size: tuple[int, int] | None) -> str | None:
  """Returns the evaluation transform by a `pretrained_cfg` of timm."""
  if not cfg or not size:
    return None
  method, crop_pct = cfg.get('interpolation', 'bicubic'), cfg.get('crop_pct', 0.875)
  levels = _value_range(cfg.get('mean', (0.5,) * 3), cfg.get('std', (0.5,) * 3))
  crop = size[0] if size[0] == size[1] else size
  if cfg.get('crop_mode') == 'squash':  # whatever the aspect ratio
    how = f"method={method!r}, antialias=True, rounding='nearest'"
    whole = tuple(int(n / crop_pct) for n in size)
    cut = '' if whole == size else f'|central_crop({crop})'
    return f'decode|resize({whole}, {how}){cut}|{levels}'
  return (
    f'decode|resize_small({int(max(size) / crop_pct)}, method={method!r}, '
    f"rounding='nearest')|central_crop({crop})|{levels}"
  )


def of_hf(processor: dict, size: tuple[int, int] | None) -> str | None:
  """Returns the evaluation transform of a preprocessor_config.json of transformers."""
  if not processor:
    return None
  if (resample := processor.get('resample', 2)) not in _RESAMPLE:
    raise ValueError(f'resample={resample} is not read: one of {_RESAMPLE} is')
  method = _RESAMPLE[resample]
  how = f"method={method!r}, antialias={method != 'nearest'}, rounding='nearest'"
  size, steps = processor.get('size', size), ['decode']
  if processor.get('do_resize', True):
    if isinstance(size, dict) and 'shortest_edge' in size:
      steps.append(f'resize_small({_side(size["shortest_edge"])}, {how})')
    else:
      steps.append(f'resize({_sides(size)}, {how})')
  if processor.get('do_center_crop'):
    steps.append(f'central_crop({_sides(processor.get("crop_size", size))})')
  mean = processor.get('image_mean', (0.5,) * 3)
  std = processor.get('image_std', (0.5,) * 3)
  if not processor.get('do_normalize', True):
    mean, std = (0.0,) * 3, (1.0,) * 3
  return '|'.join([*steps, _value_range(mean, std)])


def _sides(size) -> tuple[int, int]:
  if isinstance(size, dict):
    size = [size['height'], size['width']]
  height, width = size if isinstance(size, list | tuple) else (size, size)
  return _side(height), _side(width)


def _side(value) -> int:
  if type(value) is not int or not 0 < value < 1 << 16:
    raise ValueError(f'{value!r} is not a side of images in pixels')
  return value


def _value_range(mean, std) -> str:
  """Returns the op that standardises pixels in [0, 1] by mean and standard deviation."""
  low = tuple(round((0 - m) / s, 7) for m, s in zip(mean, std, strict=True))
  high = tuple(round((1 - m) / s, 7) for m, s in zip(mean, std, strict=True))
  if len({*low}) == len({*high}) == 1:
    low, high = (int(x) if x == int(x) else x for x in (low[0], high[0]))
  return f'value_range({low}, {high})'


def plain(source: Source, size: tuple[int, int]) -> str:
  """Returns the evaluation pipeline of the Google code: a resize without rounding.

  It retains the source's `value_range`. A detector of square images has a canvas.
  """
  text = str(size[0]) if size[0] == size[1] else f'({size[0]}, {size[1]})'
  decode = 'decode' if source.channels == 3 else f'decode({source.channels})'
  ops = registry.parse(source.pp or '')
  levels = [op.text for op in ops if op.name == 'value_range'] or ['value_range(-1, 1)']
  resize = f"resize({text}, rounding='none')"
  family = models.family(source.family, **source.fields)
  if family.outputs == 'boxes' and size[0] == size[1]:
    resize = f'detr_resize({text}, {text})|canvas({text})'
  return f'{decode}|{resize}|{levels[0]}'


class Preprocessor(NamedTuple):
  """Resize, crop, standardise: the steps of both libraries before a model."""

  size: tuple[int, int]  # (H, W) of the model's images in pixels
  # Pixels of the shorter side before a central crop; None: squashed.
  shorter: int | None
  method: str  # interpolation, one of _RESAMPLE
  mean: list[float]  # one per channel, for pixels in [0, 1]
  std: list[float]
  longest: int | None = None  # the most pixels of the longer side, for detectors

  def timm(self) -> dict:
    """Returns the keys of timm's `pretrained_cfg` that describe it."""
    return {
      'input_size': [3, *self.size],
      'interpolation': self.method,
      'crop_pct': round(max(self.size) / self.shorter, 6) if self.shorter else 1.0,
      'crop_mode': 'center' if self.shorter else 'squash',
      'mean': self.mean,
      'std': self.std,
    }

  def hf(self) -> dict:
    """Returns the preprocessor_config.json of transformers that describes it."""
    size = whole = dict(zip(('height', 'width'), self.size, strict=True))
    name, more = 'ViTImageProcessor', {}
    if self.longest:
      size = {'shortest_edge': self.shorter, 'longest_edge': self.longest}
      name, more = 'DetrImageProcessor', {'do_pad': True}
    elif self.shorter:
      size = {'shortest_edge': self.shorter}
      name, more = 'CLIPImageProcessor', {'do_center_crop': True, 'crop_size': whole}
    return {
      'image_processor_type': name,
      **dict.fromkeys((f'do_{step}' for step in _STEPS), True),
      'size': size,
      'resample': _NUMBERS[self.method],
      **more,
      'rescale_factor': 1 / 255,
      'image_mean': self.mean,
      'image_std': self.std,
    }


def described(pp: str) -> Preprocessor | None:
  """Returns a pipeline as the libraries describe theirs; None if they cannot express it.

  Both always round after resizing and antialias, whether or not ours does.
  """
  ops = [op for op in registry.parse(pp) if op.name not in ('decode', 'pad_to')]
  if [op.name for op in ops] not in (
    ['resize', 'value_range'],
    ['resize_small', 'central_crop', 'value_range'],
    ['detr_resize', 'canvas', 'value_range'],
  ):
    return None
  resize, levels = ops[0].arguments, ops[-1].arguments
  method = resize.get('method', 'bilinear')  # detr_resize has no other
  usual = {'in_lo': 0, 'in_hi': 255, 'clip': False}
  drawn = isinstance(resize.get('sizes'), tuple)  # one size of several, at random
  if drawn or method not in _NUMBERS or any(levels[k] != v for k, v in usual.items()):
    return None
  size = ops[-2].arguments['size']
  low, high = (np.broadcast_to(np.float64(levels[k]), 3) for k in ('lo', 'hi'))
  mean, std = (x.round(7).tolist() for x in (-low / (high - low), 1 / (high - low)))
  shorter = resize.get('smaller_size', resize.get('sizes'))
  size = (size, size) if isinstance(size, int) else tuple(size)
  return Preprocessor(size, shorter, method, mean, std, resize.get('longest'))
