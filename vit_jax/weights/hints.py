"""What is written beside the arrays: a config.json of timm, transformers or our own.

`google`, `timm` and `hf` make the reader of a format's config, `(config, where) -> Hints`;
`where` names the file in errors.
"""

from collections.abc import Callable
from typing import NamedTuple

from vit_jax import imagenet
from vit_jax.errors import UserError

# Names of activations -> ours.
_ACTS = {
  'gelu': 'gelu_erf',
  'gelu_erf': 'gelu_erf',
  'gelu_tanh': 'gelu_tanh',
  'gelu_new': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
}
# Pillow's numbers of its filters; Pillow antialiases, and rounds to the nearest level.
RESAMPLE = {0: 'nearest', 2: 'bilinear', 3: 'bicubic'}


class Hints(NamedTuple):
  """What a config tells of the arrays beside it."""

  fields: dict  # of the model
  architecture: str | None = None  # timm's name of the model
  image_size: tuple[int, int] | None = None  # (H, W), pixels
  class_names: list[str] | None = None
  pp: str | None = None  # the evaluation pipeline, in our ops


Reader = Callable[[dict, str], Hints]


def google(**defaults) -> Reader:
  """Reads our own config: Google's files have none, those of `tools.convert` may.

  Args:
    **defaults: fields that the published files have in common.
  """

  def read(config, where):
    ours = _ours(config)
    size, names = ours.get('image_size'), ours.get('class_names')
    return Hints(
      defaults | ours.get('fields', {}),
      None,
      tuple(size) if size else None,
      imagenet.class_names(names) if isinstance(names, str) else names,
      ours.get('pp'),
    )

  return read


def timm(fields: Callable[[dict, str], dict] = lambda config, where: {}) -> Reader:
  """Reads timm's config.

  Args:
    fields: `(config, where) -> fields` of the model; each family has its own.
  """

  def read(config, where):
    args, pretrained = config.get('model_args', {}), config.get('pretrained_cfg', {})
    size = pretrained.get('input_size', config.get('input_size'))
    size = tuple(size[1:]) if size else pair(args.get('img_size'))
    names = config.get('label_names') or pretrained.get('label_names')
    pp = _ours(config).get('pp') or _timm_pp(pretrained, size)
    architecture = config.get('architecture')
    return Hints(fields(config, where), architecture, size, names, pp)

  return read


def hf(model_type: str) -> Reader:
  """Reads transformers' config; UserError for another model than `model_type`."""

  def read(config, where):
    if not config:
      return Hints({'act': 'gelu_erf'})
    if config.get('model_type', model_type) != model_type:
      raise UserError(
        f'{where}: its config.json has model_type {config["model_type"]!r}, which is '
        f'not read; expected {model_type!r}.'
      )
    fields = {'act': activation(config.get('hidden_act', 'gelu'), where)}
    fields['norm_eps'] = config.get('layer_norm_eps', 1e-12)
    if 'num_attention_heads' in config:
      fields['num_heads'] = config['num_attention_heads']
    labels = config.get('id2label') or {}
    names = [labels[key] for key in sorted(labels, key=int)]
    if all(name == f'LABEL_{i}' for i, name in enumerate(names)):
      names = None  # transformers' placeholders
    size = pair(config.get('image_size'))
    pp = _ours(config).get('pp') or _hf_pp(config.get('preprocessor'), size, where)
    return Hints(fields, None, size, names, pp)

  return read


def activation(name: str, where: str) -> str:
  """Returns our name of an activation; UserError for one that is not read."""
  if name not in _ACTS:
    raise UserError(
      f'{where}: activation {name!r} is not supported: one of {sorted(_ACTS)}.'
    )
  return _ACTS[name]


def pair(size) -> tuple[int, int] | None:
  """Returns (height, width) of one number, of two, or of None."""
  if size is None:
    return None
  return (size, size) if isinstance(size, int) else tuple(size)


def _ours(config: dict) -> dict:
  """The part that `tools.convert` adds."""
  return config.get('vit_jax', {})


def _timm_pp(given: dict, size) -> str | None:
  """The evaluation transform that a timm config describes."""
  if not given or not size:
    return None
  method = given.get('interpolation', 'bicubic')
  scale = int(max(size) / given.get('crop_pct', 0.875))
  levels = _value_range(given.get('mean', (0.5,) * 3), given.get('std', (0.5,) * 3))
  crop = size[0] if size[0] == size[1] else size
  how = f"method={method!r}, antialias=True, rounding='nearest'"
  if given.get('crop_mode') == 'squash':  # whatever the aspect ratio
    whole = tuple(int(n / given.get('crop_pct', 0.875)) for n in size)
    cut = '' if whole == tuple(size) else f'|central_crop({crop})'
    return f'decode|resize({whole}, {how}){cut}|{levels}'
  return (
    f"decode|resize_small({scale}, method={method!r}, rounding='nearest')"
    f'|central_crop({crop})|{levels}'
  )


def _hf_pp(given: dict, size, where: str) -> str | None:
  """The evaluation transform that a preprocessor_config.json describes."""
  if not given:
    return None
  if given.get('resample', 2) not in RESAMPLE:
    raise UserError(
      f'{where}: preprocessor_config.json has resample={given["resample"]}: one of '
      f'{RESAMPLE}.'
    )
  sides = lambda x: (x['height'], x['width']) if isinstance(x, dict) else pair(x)
  method = RESAMPLE[given.get('resample', 2)]
  how = f"method={method!r}, antialias={method != 'nearest'}, rounding='nearest'"
  want, steps = given.get('size', size), ['decode']
  if given.get('do_resize', True):
    if isinstance(want, dict) and 'shortest_edge' in want:
      steps.append(f'resize_small({want["shortest_edge"]}, {how})')
    else:
      steps.append(f'resize({sides(want)}, {how})')
  if given.get('do_center_crop'):
    steps.append(f'central_crop({sides(given.get("crop_size", want))})')
  mean, std = given.get('image_mean', (0.5,) * 3), given.get('image_std', (0.5,) * 3)
  if not given.get('do_normalize', True):
    mean, std = (0.0,) * 3, (1.0,) * 3
  return '|'.join([*steps, _value_range(mean, std)])


def _value_range(mean, std) -> str:
  """The op that standardises pixels in [0, 1] by mean and standard deviation."""
  low = tuple(round((0 - m) / s, 7) for m, s in zip(mean, std, strict=True))
  high = tuple(round((1 - m) / s, 7) for m, s in zip(mean, std, strict=True))
  if len({*low}) == len({*high}) == 1:
    low, high = (int(x) if x == int(x) else x for x in (low[0], high[0]))
  return f'value_range({low}, {high})'
