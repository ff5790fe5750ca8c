"""Evaluation pipelines: converts between timm's and transformers' keys and our ops.

Weights carry the pipeline that prepares their images, as a text of our ops. `read_timm` and
`read_hf` make that text; `describe` turns it into keys of both libraries. `build` adapts it
to another image size, and `fill` copies its ops into a run that starts from the weights.
"""

import math
import re
from typing import NamedTuple

import numpy as np

from vit_jax import models
from vit_jax.data.ops import registry
from vit_jax.data.ops.arguments import size_pair
from vit_jax.weights.source import Header

# Pillow's filters by number. Pillow antialiases and rounds to integers.
_RESAMPLE = {0: 'nearest', 2: 'bilinear', 3: 'bicubic', 4: 'area'}
_NUMBERS = {method: number for number, method in _RESAMPLE.items()}
# The same filters by the names of timm and open_clip.
_METHODS = {method: method for method in _NUMBERS} | {'box': 'area'}
# Arguments for resizing that `inception_crop` and `resize` share.
_HOW = {'method', 'antialias', 'rounding'}
# Steps that a processor of transformers can switch on.
_STEPS = ('convert_rgb', 'resize', 'rescale', 'normalize')
# Both libraries decode all pixels of a JPEG, before they resize it.
_DECODE = 'decode(whole=True)'
# Mean and standard deviation of pixels: ImageNet's, which are timm's defaults, and CLIP's.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Defaults of transformers' processors. A processor that is not listed has those of ViT.
_CLIP = {
  'size': 224,
  'do_center_crop': True,
  'crop_size': 224,
  'resample': 3,
  'image_mean': CLIP[0],
  'image_std': CLIP[1],
}
_PROCESSORS = {
  'Bit': _CLIP,
  'CLIP': _CLIP,
  'DINOv3ViT': {'image_mean': MEAN, 'image_std': STD},
  'DeiT': {'size': 256, 'do_center_crop': True, 'crop_size': 224, 'resample': 3},
  'Beit': {'resample': 3},
  'Siglip': {'resample': 3},
}


def read_timm(cfg: dict, size: tuple[int, int] | None) -> str | None:
  """Returns the evaluation pipeline that a `pretrained_cfg` of timm describes."""
  if not cfg or not size:
    return None
  if (mode := cfg.get('crop_mode', 'center')) not in ('center', 'squash'):
    raise ValueError(f"crop_mode={mode!r} is unknown, expected 'center' or 'squash'")
  method = cfg.get('interpolation', 'bicubic')
  if method not in [*_METHODS]:
    raise ValueError(f'interpolation={method!r}, expected one of {[*_METHODS]}')
  method = _METHODS[method]
  whole = tuple(int(n / cfg.get('crop_pct', 0.875)) for n in size)
  crop = f"|central_crop({size[0] if size[0] == size[1] else size}, half='even')"
  resize = f"resize_small({max(whole)}, method={method!r}, rounding='nearest')"
  if mode == 'squash':  # The aspect ratio is ignored.
    resize = f"resize({whole}, method={method!r}, antialias=True, rounding='nearest')"
    crop = '' if whole == size else crop
  levels = value_range(cfg.get('mean', MEAN), cfg.get('std', STD))
  return f'{_DECODE}|{resize}{crop}|{levels}'


def read_hf(processor: dict, size: tuple[int, int] | None) -> str | None:
  """Returns the evaluation pipeline that a preprocessor_config.json describes."""
  if not processor:
    return None
  older = processor.get('feature_extractor_type')
  name = processor.get('image_processor_type') or older
  name = re.sub('(ImageProcessor|FeatureExtractor).*', '', str(name))
  processor = _PROCESSORS.get(name, {}) | processor
  if name in ('Bit', 'CLIP') and type(processor['size']) is int:
    # Before 2023, a number stood for the shortest edge.
    processor['size'] = {'shortest_edge': processor['size']}
  rescales = processor.get('do_rescale', True)
  factor = processor.get('rescale_factor', 1 / 255)
  if not rescales or abs(factor * 255 - 1) > 1e-6:
    raise ValueError(
      f'do_rescale={rescales}, rescale_factor={factor}: expected True and 1 / 255'
    )
  if (resample := processor.get('resample', 2)) not in _RESAMPLE:
    raise ValueError(f'resample={resample} is unknown, expected one of {_RESAMPLE}')
  method = _RESAMPLE[resample]
  # DINOv3's processor resizes floats, so nothing is rounded.
  rounding = 'none' if name == 'DINOv3ViT' else 'nearest'
  how = f'method={method!r}, antialias={method != "nearest"}, rounding={rounding!r}'
  size, steps = processor.get('size', size), [_DECODE]
  shortest = size.get('shortest_edge') if isinstance(size, dict) else None
  crop = processor.get('crop_size', size) if processor.get('do_center_crop') else None
  # Only the processor of ConvNeXt and ResNet has this key. It crops only below 384 pixels.
  if ratio := processor.get('crop_pct'):
    side = shortest or _sides(size)[0]
    shortest, crop, size = None, None, (side, side)
    if _side(side) < 384:
      shortest, crop = int(side / ratio), side
  if processor.get('do_resize', True):
    small = f'resize_small({_side(shortest)}' if shortest else f'resize({_sides(size)}'
    steps.append(f'{small}, {how})')
  if crop:
    steps.append(f'central_crop({_sides(crop)})')
  mean = processor.get('image_mean', (0.5,) * 3)
  std = processor.get('image_std', (0.5,) * 3)
  if not processor.get('do_normalize', True):
    mean, std = (0.0,) * 3, (1.0,) * 3
  return '|'.join([*steps, value_range(mean, std)])


def _sides(size) -> tuple[int, int]:
  if isinstance(size, dict):
    size = [size['height'], size['width']]
  height, width = size if isinstance(size, list | tuple) else (size, size)
  return _side(height), _side(width)


def _side(value) -> int:
  if type(value) is not int or not 0 < value < 1 << 16:
    raise ValueError(f'{value!r} is not an image side in pixels')
  return value


def value_range(mean, std) -> str:
  """Returns the op that standardises pixels, given mean and std for pixels in [0, 1].

  Raises ValueError for other values than one or three numbers of a plausible size.
  """
  for key, x, least in (('mean', mean, -1000), ('std', std, 1e-6)):
    if (
      not isinstance(x, list | tuple)
      or len(x) not in (1, 3)
      or not all(type(n) in (int, float) and least <= n <= 1000 for n in x)
    ):
      raise ValueError(
        f'{key} is {x!r}, expected a number in [{least}, 1000] for each channel'
      )
  low = tuple(round((0 - m) / s, 7) for m, s in zip(mean, std, strict=True))
  high = tuple(round((1 - m) / s, 7) for m, s in zip(mean, std, strict=True))
  if len({*low}) == len({*high}) == 1:
    low, high = (int(x) if x == int(x) else x for x in (low[0], high[0]))
  return f'value_range({low}, {high})'


def find(source: Header) -> str | None:
  """Returns the pipeline of a source, or only its value range, or None.

  A source without a config may still have a known value range: every published ConvNeXt,
  ResNet, Swin and MViT standardises by ImageNet. ViTs and Mixers do so or use [-1, 1].
  """
  if source.pp:
    return source.pp
  of_imagenet = source.family in ('convnext', 'mvit', 'resnet', 'swin')
  of_imagenet &= source.format in ('timm', 'hf', 'authors')
  return value_range(MEAN, STD) if of_imagenet else None


def build(source: Header, size: tuple[int, int], plain: bool = False) -> str:
  """Returns the evaluation pipeline of a source for images of a given size.

  For another size than the source's own, interpolation, crop ratio and crop mode stay the
  same, provided that timm and transformers can express them. A source without a pipeline
  gets the resize of Google's code, which does not round. With `plain`, every source gets
  this resize. A detector of square images gets a canvas.
  """
  now = describe(source.pp) if source.pp else None
  own_size = now.size if now else source.image_size or size
  if source.pp and not plain and own_size == size:
    return source.pp
  ops = registry.parse(find(source) or '')
  crop = size[0] if size[0] == size[1] else size
  decode = next((op.text for op in ops if op.name == 'decode'), 'decode')
  if source.channels != 3:
    decode = f'decode({source.channels})'
  levels = [op.text for op in ops if op.name == 'value_range'] or ['value_range(-1, 1)']
  resize = '' if plain else _geometry(ops, size)
  resize = resize or f"resize({crop}, rounding='none')"
  family = models.family(source.family, **source.fields)
  if family.outputs in ('boxes', 'regions') and size[0] == size[1]:
    resize = f'detr_resize({crop}, {crop})|canvas({crop})'
  return f'{decode}|{resize}|{levels[0]}'


class Preprocessor(NamedTuple):
  """The steps in which timm and transformers prepare an image: resize, crop, standardise."""

  size: tuple[int, int]  # (H, W) of the model's images in pixels
  method: str  # interpolation, one of _RESAMPLE
  mean: list[float]  # one per channel, for pixels in [0, 1]
  std: list[float]
  whole: tuple[int, int]  # (H, W) before the central crop
  # The length in pixels to which the shorter side is resized. The aspect ratio is kept.
  # None: the image is squashed to `whole`.
  shorter: int | None
  longest: int | None = None  # maximum length of the longer side, for detectors

  @property
  def crop_pct(self) -> float:
    """timm's crop ratio, the shortest decimal number with int(size / ratio) == whole."""
    side, whole = max(self.size), max(self.whole)
    ratios = (math.floor(side / whole * 10**n) / 10**n for n in range(1, 16))
    return next((r for r in ratios if r and int(side / r) == whole), side / whole)

  def timm(self) -> dict:
    """Returns these steps as keys of timm's `pretrained_cfg`."""
    return {
      'input_size': [3, *self.size],
      'interpolation': self.method.replace('area', 'box'),
      'crop_pct': self.crop_pct,
      'crop_mode': 'center' if self.shorter else 'squash',
      'mean': self.mean,
      'std': self.std,
    }

  def open_clip(self) -> dict:
    """Returns these steps as the `preprocess_cfg` of an open_clip_config.json."""
    return {
      'mean': self.mean,
      'std': self.std,
      'interpolation': self.method,
      'resize_mode': 'shortest' if self.shorter else 'squash',
    }

  def hf(self) -> dict:
    """Returns these steps as transformers' preprocessor_config.json."""
    sides = lambda pair: dict(zip(('height', 'width'), pair, strict=True))
    size, name, more = sides(self.whole), 'ViTImageProcessor', {}
    crop = {'do_center_crop': True, 'crop_size': sides(self.size)}
    if self.longest:
      size = {'shortest_edge': self.shorter, 'longest_edge': self.longest}
      name, more = 'DetrImageProcessor', {'do_pad': True}
    elif self.shorter:
      size, name, more = {'shortest_edge': self.shorter}, 'CLIPImageProcessor', crop
    elif self.whole != self.size:
      name, more = 'DeiTImageProcessor', crop
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


def describe(pp: str) -> Preprocessor | None:
  """Describes a pipeline as a Preprocessor; None if timm and transformers cannot express it.

  Three details are lost. Both libraries always round and antialias when they resize, and
  each has its own rule for the odd pixel of a central crop.
  """
  others = ('decode', 'pad_to', 'tokenize')
  ops = [op for op in registry.parse(pp) if op.name not in others]
  if [op.name for op in ops] not in (
    ['resize', 'value_range'],
    ['resize', 'central_crop', 'value_range'],
    ['resize_small', 'central_crop', 'value_range'],
    ['detr_resize', 'canvas', 'value_range'],
  ):
    return None
  resize, levels = ops[0].arguments, read_levels(pp)
  # detr_resize has no argument `method`: it is always bilinear.
  method = resize.get('method', 'bilinear')
  # If `sizes` is a tuple, the op draws one of them at random.
  is_random = isinstance(resize.get('sizes'), tuple)
  if is_random or method not in _NUMBERS or levels is None:
    return None
  mean, std = levels
  size = size_pair(ops[-2].arguments['size'])
  shorter = resize.get('smaller_size', resize.get('sizes'))
  whole = (shorter,) * 2 if shorter else size_pair(resize['size'])
  return Preprocessor(
    size=size,
    method=method,
    mean=mean,
    std=std,
    whole=whole,
    shorter=shorter,
    longest=resize.get('longest'),
  )


def read_levels(pp: str) -> tuple[list[float], list[float]] | None:
  """Returns (mean, std) by which a pipeline standardises pixels in [0, 1].

  Each has 3 numbers. Returns None if the pipeline does something else.
  """
  ops = [op for op in registry.parse(pp) if op.name == 'value_range']
  levels = ops[0].arguments if len(ops) == 1 else {'clip': None}
  if [levels.get(k) for k in ('in_lo', 'in_hi', 'clip')] != [0, 255, False]:
    return None
  low, high = (np.broadcast_to(np.float64(levels[k]), 3) for k in ('lo', 'hi'))
  mean, std = (x.round(7).tolist() for x in (-low / (high - low), 1 / (high - low)))
  return mean, std


def _geometry(ops, size: tuple[int, int]) -> str:
  """Returns the resize and the crop of a pipeline, adapted to another image size.

  Interpolation, crop ratio and crop mode do not change. Returns '' if `describe` cannot
  express a step.
  """
  now = describe('|'.join(op.text for op in ops)) if ops else None
  if now is None or now.longest:
    return ''
  one = lambda pair: pair[0] if pair[0] == pair[1] else pair
  changes = {
    'resize': {'size': one(tuple(int(n / now.crop_pct) for n in size))},
    'resize_small': {'smaller_size': int(max(size) / now.crop_pct)},
    'central_crop': {'size': one(size)},
  }
  return '|'.join(op.rewrite(**changes[op.name]) for op in ops if op.name in changes)


# -- the pipelines of a run that starts from weights -------------------------------------


def fill(
  config: dict, weights: str | None, compare_crops: bool = True
) -> tuple[dict, list[str]]:
  """Completes a run's pipelines from the pipeline of the weights that it starts from.

  It fills in `resize_as_weights`, a `value_range` without numbers, the interpolation of
  `inception_crop`, and the vocabulary of `tokenize`.

  Args:
    config: the run's config.
    weights: the evaluation pipeline of the weights. None: each op uses its defaults.
    compare_crops: whether to compare sizes and crops too. False for tasks with boxes or
      masks, whose pipelines have to differ there.

  Returns:
    (config, lines). The lines say which settings were taken from the weights, and which
    pipelines of the config differ from the weights' pipeline.
  """
  theirs, lines = registry.parse(weights or ''), []

  def fill_section(value, where: str):
    if isinstance(value, dict):
      return {key: fill_section(x, f'{where}.{key}') for key, x in value.items()}
    if not where.endswith(('.pp', '.tokens')):
      return value
    pp = _fill(value, theirs)
    ours = _summarise(pp)
    at_size = of_weights = _summarise(weights)
    if (facts := describe(pp)) and (geometry := _geometry(theirs, facts.size)):
      levels = next(op.text for op in theirs if op.name == 'value_range')
      # The crop ratio differs a little per size, because pixels are whole numbers.
      at_size = _summarise(f'{geometry}|{levels}')
    keys = ours if compare_crops else ours.keys() & {'mean', 'std'}
    if differ := [key for key in keys if ours[key] != at_size.get(key, ours[key])]:
      has, want = (', '.join(x[key] for key in differ) for x in (ours, of_weights))
      lines.append(f'{where} has {has}; the weights want {want}')
    return pp

  new = {key: fill_section(config[key], f'config.{key}') for key in ('data', 'evals')}
  if any(config[key] != new[key] for key in new):
    named = 'value_range' in [op.name for op in theirs]
    words = ', '.join(_summarise(weights if named else 'value_range').values())
    origin = 'taken from the weights' if named else 'the weights name none'
    lines.insert(0, f'pixels: {words}: {origin}')
  return config | new, lines


def _fill(pp: str, theirs: tuple) -> str:
  """Completes one pipeline. `theirs` are the ops of the weights' pipeline."""
  by_name, ops, texts = {op.name: op for op in theirs}, registry.parse(pp), []
  resize = by_name.get('resize') or by_name.get('resize_small')
  for op in ops:
    text = op.text
    if op.name == 'value_range' and not op.written:
      text = by_name[op.name].text if op.name in by_name else 'value_range(-1, 1)'
    elif op.name == 'resize_as_weights':
      geometry = _geometry(theirs, size_pair(op.arguments['size']))
      text = geometry or text.replace(op.name, 'resize')
    elif op.name == 'tokenize' and op.name in by_name and not op.arguments['vocab']:
      text = by_name[op.name].rewrite(**{k: op.arguments[k] for k in op.written})
    elif op.name == 'inception_crop' and resize:
      how = {k: v for k, v in resize.arguments.items() if k in _HOW - {*op.written}}
      if any(op.arguments[k] != v for k, v in how.items()):
        text = op.rewrite(**how)
    texts.append(text)
  return pp if texts == [op.text for op in ops] else '|'.join(texts)


def _summarise(pp: str | None) -> dict[str, str]:
  """Summarises for a log how a pipeline prepares images."""
  if not pp or not (levels := read_levels(pp)):
    return {}
  words = {}
  for name, x in zip(('mean', 'std'), levels, strict=True):
    x = x if len({*x}) > 1 else x[:1]
    words[name] = ' '.join([name, *(f'{number:.3g}' for number in x)])
  if (facts := describe(pp)) and not facts.longest:
    how = f'{"crop" if facts.shorter else "squash"} {facts.crop_pct:g}'
    words |= {'method': facts.method, 'crop': how}
  return words
