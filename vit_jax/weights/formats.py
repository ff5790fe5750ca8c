"""Whose file is it: the formats that are read, told apart by names that only one has."""

import json
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import adapt, bit, mixer, transforms, vit
from vit_jax.weights import rename as names

# Around the parameters in files that hold more, or that wrap them. What is beside a
# prefix that is found (the optimizer's state) is left out, and reported.
_PREFIXES = ('opt/target/', 'params/', 'target/')
# Beside the parameters in state dicts: not parameters of the classifier.
_NOT_PARAMETERS = r'(.*\.)?(num_batches_tracked|position_ids)|.*embeddings\.mask_token'

_ACTS = {
  'gelu': 'gelu_erf',
  'gelu_erf': 'gelu_erf',
  'gelu_tanh': 'gelu_tanh',
  'gelu_new': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
}


class Dialect(NamedTuple):
  """A published format of one family."""

  name: str  # google, big_vision, timm, hf, bit
  family: str  # a key of models.MODELS
  marker: str  # regex of a name that every such file has, and no other
  rules: Callable[[dict[str, np.ndarray], dict], tuple[names.Rule, ...]]
  infer: Callable[[dict[str, np.ndarray]], dict]
  image_size: Callable[[dict[str, np.ndarray], dict], tuple[int, int] | None]


def _timm_vit(arrays, config):
  positions = transforms.same
  if 'cls_token' in arrays and 'pos_embed' in arrays:
    rows = arrays['pos_embed'].shape[1]
    # One row more than a square of patches is the cls token's.
    only_patches = math.isqrt(rows) ** 2 == rows
    if config.get('model_args', {}).get('no_embed_class', only_patches):
      positions = transforms.patch_positions
  has_stages = any(name.startswith('patch_embed.backbone.stages') for name in arrays)
  return vit.timm(positions, has_stages)


def _hf(arrays, config):
  return vit.hf('vit.' if any(name.startswith('vit.') for name in arrays) else '')


_VIT, _MIXER = (vit.infer, vit.image_size), (mixer.infer, mixer.image_size)
_BIT = (bit.infer, bit.image_size)
DIALECTS = (
  Dialect(
    'big_vision',
    'vit',
    r'pos_embedding',
    lambda a, c: vit.big_vision('cls' in a),
    *_VIT,
  ),
  Dialect('google', 'vit', r'Transformer/.+', lambda a, c: vit.GOOGLE, *_VIT),
  Dialect('google', 'mixer', r'MixerBlock_0/.+', lambda a, c: mixer.GOOGLE, *_MIXER),
  Dialect(
    'big_vision',
    'resnet_gn',
    r'conv_root/kernel',
    lambda a, c: bit.POST_ACTIVATION,
    *_BIT,
  ),
  Dialect('bit', 'bit', r'resnet/root_block/.+', lambda a, c: bit.TF, *_BIT),
  Dialect('timm', 'vit', r'blocks\.0\.attn\.qkv\.weight', _timm_vit, *_VIT),
  Dialect(
    'timm', 'mixer', r'blocks\.0\.mlp_tokens\..+', lambda a, c: mixer.TIMM, *_MIXER
  ),
  Dialect('timm', 'bit', r'stem\.conv\.weight', lambda a, c: bit.TIMM, *_BIT),
  Dialect(
    'hf', 'vit', r'(vit\.)?(encoder\.layer|layers)\.0\.layernorm_before\..+', _hf, *_VIT
  ),
)


def detect(
  arrays: dict[str, np.ndarray], where: str
) -> tuple[Dialect, dict[str, np.ndarray], list[str]]:
  """Returns (dialect, the parameters under their plain names, names left out).

  Blocks stacked by `nn.scan` come back one by one.

  Raises:
    UserError: if the names are of no known format.
  """
  skipped = []
  for prefix in _PREFIXES:
    inside = {
      n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)
    }
    if inside:
      skipped += [n for n in arrays if not n.startswith(prefix)]
      arrays = inside
  for name in [n for n in arrays if re.fullmatch(_NOT_PARAMETERS, n)]:
    arrays = {n: x for n, x in arrays.items() if n != name}
    skipped.append(name)
  arrays = adapt.unstack(arrays)
  for dialect in DIALECTS:
    if any(re.fullmatch(dialect.marker, name) for name in arrays):
      return dialect, arrays, skipped
  known = sorted({f'{d.name} ({d.family})' for d in DIALECTS})
  raise UserError(
    f'{where} holds no weights of a known format: its names begin with '
    f'{list(arrays)[:4]}. Known formats: {", ".join(known)}.'
  )


class Hints(NamedTuple):
  """What is written beside the arrays."""

  fields: dict  # of the model
  architecture: str | None  # timm's name of the model
  image_size: tuple[int, int] | None
  class_names: list[str] | None
  pp: str | None  # the evaluation pipeline, in our operations


def hints(dialect: Dialect, config: dict, where: str) -> Hints:
  """Reads a `config.json` of timm or transformers, or what `tools.convert` wrote.

  Raises:
    UserError: if it tells of an architecture that the family does not have.
  """
  if dialect.name == 'hf':
    return _hf_hints(config, where)
  if dialect.name == 'timm':
    return _timm_hints(dialect, config, where)
  ours = config.get('vit_jax', {})
  fields = {'act': 'gelu_tanh'} if dialect.family in ('vit', 'mixer') else {}
  fields |= ours.get('fields', {})
  size = ours.get('image_size')
  return Hints(
    fields, None, tuple(size) if size else None, ours.get('class_names'), ours.get('pp')
  )


def _hf_hints(config, where) -> Hints:
  if not config:
    return Hints({'act': 'gelu_erf'}, None, None, None, None)
  if config.get('model_type', 'vit') != 'vit':
    raise UserError(
      f'{where}: its config.json says model_type {config["model_type"]!r}; of '
      "transformers' models 'vit' is read."
    )
  fields = {'act': _act(config.get('hidden_act', 'gelu'), where)}
  fields['norm_eps'] = config.get('layer_norm_eps', 1e-12)
  if 'num_attention_heads' in config:
    fields['num_heads'] = config['num_attention_heads']
  labels = config.get('id2label') or {}
  names = [labels[key] for key in sorted(labels, key=int)]
  if all(name == f'LABEL_{i}' for i, name in enumerate(names)):
    names = None  # transformers' placeholders
  size = _pair(config.get('image_size'))
  pp = _ours(config).get('pp') or _hf_pp(config.get('preprocessor'), size, where)
  return Hints(fields, None, size, names, pp)


def _timm_hints(dialect, config, where) -> Hints:
  args, given = config.get('model_args', {}), config.get('pretrained_cfg', {})
  fields = {}
  if dialect.family in ('vit', 'mixer'):
    fields['act'] = _act(args.get('act_layer', 'gelu'), where)
  if dialect.family == 'vit' and 'num_heads' in args:
    fields['num_heads'] = args['num_heads']
  pool = args.get('global_pool', config.get('global_pool', 'token'))
  if dialect.family == 'vit' and pool == 'avg' and args.get('class_token', True):
    raise UserError(
      f'{where}: a timm model that averages its patch tokens and has a cls token beside '
      "them (global_pool 'avg' with class_token) is not among our classifiers."
    )
  size = given.get('input_size', config.get('input_size'))
  size = tuple(size[1:]) if size else _pair(args.get('img_size'))
  names = config.get('label_names') or given.get('label_names')
  pp = _ours(config).get('pp') or _timm_pp(given, size)
  return Hints(fields, config.get('architecture'), size, names, pp)


def _timm_pp(given: dict, size) -> str | None:
  """The evaluation transform that a timm config describes."""
  if not given or not size:
    return None
  method = given.get('interpolation', 'bicubic')
  scale = int(max(size) / given.get('crop_pct', 0.875))
  levels = _value_range(given.get('mean', (0.5,) * 3), given.get('std', (0.5,) * 3))
  crop = size[0] if size[0] == size[1] else size
  return (
    f"decode|resize_small({scale}, method={method!r}, rounding='nearest')"
    f'|central_crop({crop})|{levels}'
  )


def _value_range(mean, std) -> str:
  """The op that standardises pixels in [0, 1] by mean and standard deviation."""
  low = tuple(round((0 - m) / s, 7) for m, s in zip(mean, std, strict=True))
  high = tuple(round((1 - m) / s, 7) for m, s in zip(mean, std, strict=True))
  if len({*low}) == len({*high}) == 1:
    low, high = (int(x) if x == int(x) else x for x in (low[0], high[0]))
  return f'value_range({low}, {high})'


# Pillow's numbers of its filters; Pillow antialiases, and rounds to the nearest level.
_RESAMPLE = {0: 'nearest', 2: 'bilinear', 3: 'bicubic'}


def _hf_pp(given: dict, size, where: str) -> str | None:
  """The evaluation transform that a preprocessor_config.json describes."""
  if not given:
    return None
  if given.get('resample', 2) not in _RESAMPLE:
    raise UserError(
      f'{where}: preprocessor_config.json has resample {given["resample"]}; read are '
      f'{_RESAMPLE}.'
    )
  sides = lambda x: (x['height'], x['width']) if isinstance(x, dict) else _pair(x)
  method = _RESAMPLE[given.get('resample', 2)]
  how = f"method={method!r}, antialias={method != 'nearest'}, rounding='nearest'"
  want, steps = given.get('size', size), ['decode']
  if given.get('do_resize', True):
    if isinstance(want, dict) and 'shortest_edge' in want:
      steps.append(f'resize_small({want["shortest_edge"]}, {how})')
    else:
      steps.append(f'resize({sides(want)}, {how})')
  if given.get('do_center_crop'):
    steps.append(f'central_crop({sides(given["crop_size"])})')
  mean, std = given.get('image_mean', (0.5,) * 3), given.get('image_std', (0.5,) * 3)
  if not given.get('do_normalize', True):
    mean, std = (0.0,) * 3, (1.0,) * 3
  return '|'.join([*steps, _value_range(mean, std)])


def _act(name: str, where: str) -> str:
  if name not in _ACTS:
    raise UserError(
      f'{where}: activation {name!r} is not among ours: {sorted(set(_ACTS.values()))}.'
    )
  return _ACTS[name]


def _pair(size) -> tuple[int, int] | None:
  if size is None:
    return None
  return (size, size) if isinstance(size, int) else tuple(size)


def _ours(config: dict) -> dict:
  value = config.get('vit_jax', {})
  return json.loads(value) if isinstance(value, str) else value
