"""ViT and its hybrids as Google publishes them, and what every format shares.

The formats of timm and of transformers are in vit_timm and vit_hf.
"""

import math
import re

import numpy as np

from vit_jax.weights import config_writers, configs
from vit_jax.weights import transforms as t
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule, table

POSITIONS = 'Transformer/posembed_input/pos_embedding'
BLOCK = 'Transformer/encoderblock_{i}'
ATTENTION = f'{BLOCK}/MultiHeadDotProductAttention_0'
MLP = f'{BLOCK}/MlpBlock_0'
MAP = 'MAPHead_0'


def _alike(*names: str) -> tuple[Rule, ...]:
  return tuple(Rule(name, name) for name in names)


# Google's ResNet with GroupNorm: the stem of a hybrid, and a model of its own.
RESNET = table(
  Rule('conv_root/kernel', 'conv_root/kernel'),
  [
    Rule(name, name, t.group_norm)
    for name in (
      'gn_root/{rest}',
      'block{i}/unit{j}/gn{k}/{rest}',
      'block{i}/unit{j}/gn_proj/{rest}',
    )
  ],
  _alike('block{i}/unit{j}/{rest}', 'head/{rest}'),
)

# Before Linen, Flax numbered the modules of a block through; all files published with
# the paper, AugReg and SAM have those names. Newer ones have ours.
GOOGLE = table(
  Rule(f'{BLOCK}/MultiHeadDotProductAttention_1/{{rest}}', f'{ATTENTION}/{{rest}}'),
  Rule(f'{BLOCK}/LayerNorm_2/{{rest}}', f'{BLOCK}/LayerNorm_1/{{rest}}'),
  Rule(f'{BLOCK}/MlpBlock_3/{{rest}}', f'{MLP}/{{rest}}'),
  _alike(
    f'{BLOCK}/{{rest}}',
    'Transformer/encoder_norm/{rest}',
    'Transformer/posembed_input/{rest}',
    'cls',
    'embedding/{rest}',
    'pre_logits/{rest}',
    f'{MAP}/{{rest}}',
  ),
  Rule('Transformer/pos_embedding', POSITIONS, only_load=True),
  # big_vision before 2022: the MAP head's modules beside the others.
  Rule('probe', f'{MAP}/probe', only_load=True),
  [
    Rule(f'{module}/{{rest}}', f'{MAP}/{module}/{{rest}}', only_load=True)
    for module in ('LayerNorm_0', 'MlpBlock_0', 'MultiHeadDotProductAttention_0')
  ],
  RESNET,
)


def big_vision(arrays, facts) -> tuple[Rule, ...]:
  """Google's names, but positions at the top, of patches only."""
  transform = t.patch_positions if 'cls' in arrays else t.same
  return (Rule('pos_embedding', POSITIONS, transform, only_load=True), *GOOGLE)


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters, unstacked, determine."""
  axial = any(name.startswith(f'{BLOCK.format(i=0)}/rows/') for name in flat)
  first = '/rows/' if axial else '/'  # the attention and MLP of a block, or the first
  part = lambda template: template.format(i=0).replace('_0/', f'_0{first}', 1)
  *patch_size, _, width = flat['embedding/kernel'].shape
  _, heads, _ = flat[f'{part(ATTENTION)}/query/kernel'].shape
  fields = dict(
    patch_size=tuple(patch_size),
    width=width,
    depth=len({name.split('/')[1] for name in flat if '/encoderblock_' in name}),
    mlp_dim=flat[f'{part(MLP)}/Dense_0/kernel'].shape[1],
    num_heads=heads,
    classifier='token' if 'cls' in flat else 'map' if f'{MAP}/probe' in flat else 'gap',
    num_classes=columns(flat, 'head/kernel'),
    representation_size=columns(flat, 'pre_logits/kernel'),
    **_positions(flat),
  )
  if axial:
    fields['attention'] = 'axial'
  if 'conv_root/kernel' in flat:
    fields['stem_width'] = columns(flat, 'conv_root/kernel')
    fields['stem_blocks'] = resnet_blocks(flat)
  return fields


def columns(flat: dict[str, np.ndarray], kernel: str) -> int | None:
  """Returns the outputs of a kernel, None where it is not there."""
  return flat[kernel].shape[-1] if kernel in flat else None


def _positions(flat) -> dict:
  for name in flat:
    if re.fullmatch(r'.*/posembed_relative/pos_embedding', name):
      return dict(posemb='relative')
    if match := re.fullmatch(r'(.*)/posembed_input/pos_embedding(_x)?', name):
      kind = dict(posemb='learn2d' if match[2] else 'learn')
      return kind | (dict(posemb_where='every') if '/' in match[1] else {})
  return dict(posemb='none')


def resnet_blocks(flat) -> tuple[int, ...]:
  """Returns the number of units of each block of a ResNet."""
  units = {m[0] for name in flat if (m := re.match(r'block\d+/unit\d+/', name))}
  numbers = [int(unit.split('/')[0][len('block') :]) for unit in units]
  return tuple(numbers.count(i + 1) for i in range(max(numbers, default=0)))


def grid(flat: dict[str, np.ndarray], fields: dict) -> tuple[int, int] | None:
  """Returns (h, w) of the position embeddings; None unless they are square."""
  if POSITIONS not in flat:
    return None
  rows = flat[POSITIONS].shape[1] - (fields['classifier'] == 'token')
  side = math.isqrt(rows)
  return (side, side) if side * side == rows else None


def _infer_google(flat: dict[str, np.ndarray]) -> dict:
  fields = infer(flat)
  if fields['posemb'] == 'none':
    # The models published in these formats without a table have this one.
    fields['posemb'] = 'sincos2d'
  return fields


def _config(fields, image_size, class_names) -> dict:
  published = dict(act='gelu_tanh', norm_eps=1e-6, posemb='learn')
  published |= dict(posemb_where='stem', attention='full')
  if fields['classifier'] == 'none':  # the same arrays as 'gap'
    published['classifier'] = 'gap'
  return config_writers.google(**published)(fields, image_size, class_names)


FORMATS = (
  Format(
    'google',
    'vit',
    r'Transformer/.+',
    GOOGLE,
    _infer_google,
    configs.google(act='gelu_tanh'),
    lacks='pos_embedding',
    grid=grid,
    config=_config,
  ),
  Format(
    'big_vision',
    'vit',
    r'pos_embedding',
    big_vision,
    _infer_google,
    configs.google(act='gelu_tanh'),
    grid=grid,
  ),
)
