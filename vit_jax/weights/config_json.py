"""The JSON beside weights: the type and range of every key that is read are checked.

A config comes from anywhere. Keys that this library does not read are left alone; those
that it reads are checked here, once, so that their readers can rely on them.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from vit_jax.errors import UserError, one_line

_MOST_BYTES = 64 << 20  # 21,843 names in three lists are 3 MB
_SIDE, _PIXELS = 1 << 14, 64_000_000  # of images, as data/ops makes them


def read(path: Path) -> dict:
  """Returns the JSON object in a file; UserError if it is not one, or too large."""
  try:
    if path.stat().st_size > _MOST_BYTES:
      raise UserError(f'{path} has more than {_MOST_BYTES >> 20} MB: not a config.')
    text = path.read_bytes()
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}.') from None
  return parse(text, str(path))


def parse(text: str | bytes, where: str) -> dict:
  """Returns the JSON object in a text; UserError, which begins with `where`, if none."""
  try:
    value = json.loads(text.decode() if isinstance(text, bytes) else text)
  except RecursionError:
    raise UserError(f'{where} is nested too deeply to be a config.') from None
  except ValueError as error:
    raise UserError(f'{where} is not JSON: {one_line(error)}.') from None
  if not isinstance(value, dict):
    raise UserError(f'{where} is not a JSON object.')
  return value


def check(config: dict, where: str) -> dict:
  """Returns `config` without nulls, after checking every key that is read.

  Raises:
    UserError: for a value of another type or out of range.
  """
  config = _without_nulls(config)
  for path, (fits, expected) in _READ.items():
    value = config
    for i, key in enumerate(keys := path.split('.')):
      value = value.get(key)
      if value is None:
        break
      if i + 1 < len(keys) and not isinstance(value, dict):
        path, fits, expected = '.'.join(keys[: i + 1]), None, 'an object'
        break
    if value is not None and not (fits and fits(value)):
      raise UserError(f'{where}: {path} is {_short(value)}; expected {expected}.')
  return config


def _without_nulls(value):
  if not isinstance(value, dict):
    return value
  return {k: _without_nulls(v) for k, v in value.items() if v is not None}


def _short(value) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:57]}...'


# -- what a value may be ----------------------------------------------------------------

Kind = tuple[Callable[[object], bool], str]


def _whole(low: int, high: int) -> Kind:
  fits = lambda x: type(x) is int and low <= x <= high
  return fits, f'a whole number from {low} to {high}'


def _number(low: float, high: float) -> Kind:
  fits = lambda x: type(x) in (int, float) and math.isfinite(x) and low <= x <= high
  return fits, f'a number from {low} to {high}'


def _several(kind: Kind, *lengths: int) -> Kind:
  fits = lambda x: isinstance(x, list) and len(x) in lengths and all(map(kind[0], x))
  return fits, f'a list of {" or ".join(map(str, lengths))}, each {kind[1]}'


def _either(*kinds: Kind) -> Kind:
  fits = lambda x: any(kind[0](x) for kind in kinds)
  return fits, ', or '.join(kind[1] for kind in kinds)


def _each(kind: Kind) -> Kind:
  fits = lambda x: isinstance(x, list) and 1 <= len(x) <= 100 and all(map(kind[0], x))
  return fits, f'a list, each {kind[1]}'


def _numbers(below: int) -> Kind:
  one = _whole(0, below - 1)
  fits = lambda x: isinstance(x, list) and len(x) <= below and all(map(one[0], x))
  return fits, f'a list, each {one[1]}'


_TEXT = (lambda x: isinstance(x, str) and len(x) <= 10_000, 'a text')
_BOOL = (lambda x: type(x) is bool, 'true or false')
_SIZE = _whole(1, _SIDE)
_PAIR = (
  lambda x: _several(_SIZE, 2)[0](x) and x[0] * x[1] <= _PIXELS,
  f'two sides of an image of up to {_PIXELS:,} pixels',
)
_SQUARE = (lambda x: _SIZE[0](x) and x * x <= _PIXELS, _SIZE[1])
_INPUT = (
  lambda x: isinstance(x, list) and len(x) == 3 and _PAIR[0](x[1:]),
  'a list [channels, height, width]',
)
_SIDES = (
  lambda x: (
    isinstance(x, dict)
    and x.keys() <= {'height', 'width', 'shortest_edge', 'longest_edge'}
    and all(map(_SIZE[0], x.values()))
    and ('shortest_edge' in x or {'height', 'width'} <= x.keys())
    and x.get('height', 1) * x.get('width', 1) <= _PIXELS
  ),
  "an object of 'height' and 'width', or of 'shortest_edge'",
)
_CROP = (lambda x: _SIDES[0](x) and 'height' in x, "an object of 'height' and 'width'")
# No whole numbers: sizes and numbers of layers follow from the arrays.
_FIELDS = (
  lambda x: (
    isinstance(x, dict)
    and all(isinstance(v, str | bool) or _number(-1e6, 1e6)[0](v) for v in x.values())
    and not any(type(v) is int for v in x.values())
  ),
  'an object of texts, numbers with a point, true and false',
)
_NAMES = (
  lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x),
  'a list of names',
)
_BY_NUMBER = (
  lambda x: (
    isinstance(x, dict)
    and all(k.isdecimal() and isinstance(v, str) for k, v in x.items())
    and sorted(map(int, x)) == list(range(len(x)))
  ),
  'names by the numbers 0, 1, ...',
)
_LEVELS = _several(_number(-1000, 1000), 1, 3)
_SPREADS = _several(_number(1e-6, 1000), 1, 3)
_HEADS = _whole(1, 4096)
_WINDOW = _whole(1, 4096)

# Key -> (whether a value is allowed, what is, in words), of every key that is read.
_READ: dict[str, Kind] = {
  # our own part
  'vit_jax.fields': _FIELDS,
  'vit_jax.image_size': _PAIR,
  'vit_jax.class_names': _either(_TEXT, _NAMES),
  'vit_jax.pp': _TEXT,
  # timm
  'architecture': _TEXT,
  'global_pool': _TEXT,
  'input_size': _INPUT,
  'label_names': _NAMES,
  'model_args.num_heads': _either(_HEADS, _each(_HEADS)),
  'model_args.depths': _each(_whole(1, 1000)),
  'model_args.window_size': _either(_WINDOW, _each(_WINDOW)),
  'model_args.pretrained_window_sizes': _each(_whole(0, 4096)),
  'model_args.always_partition': _BOOL,
  'model_args.output_stride': _whole(4, 64),
  'model_args.use_cls_token': _BOOL,
  'model_args.stride_kv_adaptive': _several(_whole(1, 64), 2),
  'model_args.act_layer': _TEXT,
  'model_args.global_pool': _TEXT,
  'model_args.class_token': _BOOL,
  'model_args.no_embed_class': _BOOL,
  'model_args.img_size': _either(_SQUARE, _PAIR),
  'pretrained_cfg.input_size': _INPUT,
  'pretrained_cfg.label_names': _NAMES,
  'pretrained_cfg.interpolation': _TEXT,
  'pretrained_cfg.crop_pct': _number(0.1, 10),
  'pretrained_cfg.crop_mode': _TEXT,
  'pretrained_cfg.mean': _LEVELS,
  'pretrained_cfg.std': _SPREADS,
  'pretrained_cfg.tag': _TEXT,
  'pretrained_cfg.license': _TEXT,
  # transformers
  'model_type': _TEXT,
  'hidden_act': _TEXT,
  'layer_type': _TEXT,
  'downsample_in_first_stage': _BOOL,
  'downsample_in_bottleneck': _BOOL,
  'layer_norm_eps': _number(0, 1),
  'num_attention_heads': _HEADS,
  'depths': _each(_whole(1, 1000)),
  'window_size': _whole(0, 4096),
  'window_block_indices': _numbers(1000),
  'residual_block_indices': _numbers(1000),
  'num_hidden_layers': _whole(1, 1000),
  'pretrained_window_sizes': _each(_whole(0, 4096)),
  'encoder_attention_heads': _HEADS,
  'decoder_attention_heads': _HEADS,
  'activation_function': _TEXT,
  'position_embedding_type': _TEXT,
  'dilation': _BOOL,
  'image_size': _either(_SQUARE, _PAIR),
  'id2label': _BY_NUMBER,
  'preprocessor.resample': _whole(0, 5),
  'preprocessor.size': _either(_SQUARE, _PAIR, _SIDES),
  'preprocessor.max_size': _SQUARE,
  'preprocessor.crop_size': _either(_SQUARE, _PAIR, _CROP),
  'preprocessor.do_resize': _BOOL,
  'preprocessor.do_center_crop': _BOOL,
  'preprocessor.do_normalize': _BOOL,
  'preprocessor.image_mean': _LEVELS,
  'preprocessor.image_std': _SPREADS,
}
