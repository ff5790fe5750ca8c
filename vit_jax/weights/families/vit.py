"""ViT and its hybrids as Google publishes them, and what every format shares.

The formats of timm and of transformers are beside this, in vit_timm and vit_hf.
"""

import math
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import export, hints
from vit_jax.weights import transforms as t
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

POSITIONS = 'Transformer/posembed_input/pos_embedding'
BLOCK = 'Transformer/encoderblock_{i}'
ATTENTION = f'{BLOCK}/MultiHeadDotProductAttention_0'
MLP = f'{BLOCK}/MlpBlock_0'
MAP = 'MAPHead_0'

# Before Linen, Flax numbered the modules of a block through; all files published with
# the paper, AugReg and SAM have those names. Newer ones have ours.
GOOGLE = (
  Rule(f'{BLOCK}/MultiHeadDotProductAttention_1/{{rest}}', f'{ATTENTION}/{{rest}}'),
  Rule(f'{BLOCK}/LayerNorm_2/{{rest}}', f'{BLOCK}/LayerNorm_1/{{rest}}'),
  Rule(f'{BLOCK}/MlpBlock_3/{{rest}}', f'{MLP}/{{rest}}'),
  Rule(f'{BLOCK}/{{rest}}', f'{BLOCK}/{{rest}}'),
  Rule('Transformer/encoder_norm/{rest}', 'Transformer/encoder_norm/{rest}'),
  Rule('Transformer/posembed_input/{rest}', 'Transformer/posembed_input/{rest}'),
  Rule('Transformer/pos_embedding', POSITIONS, only_load=True),
  Rule('cls', 'cls'),
  Rule('embedding/{rest}', 'embedding/{rest}'),
  Rule('pre_logits/{rest}', 'pre_logits/{rest}'),
  Rule('head/{rest}', 'head/{rest}'),
  Rule(f'{MAP}/{{rest}}', f'{MAP}/{{rest}}'),
  # big_vision before 2022: the MAP head's modules beside the others.
  Rule('probe', f'{MAP}/probe', only_load=True),
  Rule('LayerNorm_0/{rest}', f'{MAP}/LayerNorm_0/{{rest}}', only_load=True),
  Rule('MlpBlock_0/{rest}', f'{MAP}/MlpBlock_0/{{rest}}', only_load=True),
  Rule(
    'MultiHeadDotProductAttention_0/{rest}',
    f'{MAP}/MultiHeadDotProductAttention_0/{{rest}}',
    only_load=True,
  ),
  # The ResNet of a hybrid.
  Rule('conv_root/kernel', 'conv_root/kernel'),
  Rule('gn_root/{rest}', 'gn_root/{rest}', t.group_norm),
  Rule('block{i}/unit{j}/gn{k}/{rest}', 'block{i}/unit{j}/gn{k}/{rest}', t.group_norm),
  Rule(
    'block{i}/unit{j}/gn_proj/{rest}', 'block{i}/unit{j}/gn_proj/{rest}', t.group_norm
  ),
  Rule('block{i}/unit{j}/{rest}', 'block{i}/unit{j}/{rest}'),
)


def big_vision(has_cls: bool) -> tuple[Rule, ...]:
  """Google's names, but positions at the top, of patches only."""
  transform = t.patch_positions if has_cls else t.same
  return (Rule('pos_embedding', POSITIONS, transform, only_load=True), *GOOGLE)


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters, unstacked, tell.

  Raises:
    UserError: if a ViT's parts are missing.
  """
  kernel = _of(flat, 'embedding/kernel', 4)
  axial = any(name.startswith(f'{BLOCK.format(i=0)}/rows/') for name in flat)
  first = '/rows/' if axial else '/'  # the attention and MLP of a block, or the first
  part = lambda template: template.format(i=0).replace('_0/', f'_0{first}', 1)
  depth = len({name.split('/')[1] for name in flat if '/encoderblock_' in name})
  query = _of(flat, f'{part(ATTENTION)}/query/kernel', 3)
  fields = dict(
    patch_size=kernel.shape[:2],
    width=kernel.shape[3],
    depth=depth,
    mlp_dim=_of(flat, f'{part(MLP)}/Dense_0/kernel', 2).shape[1],
    num_heads=query.shape[1],
    classifier='token' if 'cls' in flat else 'map' if f'{MAP}/probe' in flat else 'gap',
    num_classes=None,
    representation_size=None,
    **_positions(flat),
  )
  if axial:
    fields['attention'] = 'axial'
  if 'head/kernel' in flat:
    fields['num_classes'] = _of(flat, 'head/kernel', 2).shape[1]
  if 'pre_logits/kernel' in flat:
    fields['representation_size'] = _of(flat, 'pre_logits/kernel', 2).shape[1]
  if 'conv_root/kernel' in flat:
    fields['stem_width'] = flat['conv_root/kernel'].shape[-1]
    fields['stem_blocks'] = resnet_blocks(flat)
  return fields


def _positions(flat) -> dict:
  """Returns the fields of positions that the arrays tell; a shared table is as the stem's."""
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


def _of(flat, name, ndim):
  if name not in flat:
    raise UserError(f'The file lacks {name}, which every ViT has.')
  if flat[name].ndim != ndim:
    raise UserError(
      f'{name} has shape {flat[name].shape}; a ViT has {ndim} dimensions.'
    )
  return flat[name]


def _infer_google(flat: dict[str, np.ndarray]) -> dict:
  fields = infer(flat)
  if fields['posemb'] == 'none':
    # The models published in these formats without a table have this one.
    fields['posemb'] = 'sincos2d'
  return fields


def _config(fields, image_size, class_names) -> dict:
  published = dict(act='gelu_tanh', norm_eps=1e-6, posemb='learn')
  published |= dict(posemb_where='stem', attention='full')
  if (
    fields['classifier'] == 'none'
  ):  # by its arrays it is the other one without a token
    published['classifier'] = 'gap'
  return export.google_config(**published)(fields, image_size, class_names)


FORMATS = (
  Format(
    'google',
    'vit',
    r'Transformer/.+',
    lambda arrays, config: GOOGLE,
    _infer_google,
    hints.google(act='gelu_tanh'),
    lacks='pos_embedding',
    grid=grid,
    to='google',
    write_config=_config,
  ),
  Format(
    'big_vision',
    'vit',
    r'pos_embedding',
    lambda arrays, config: big_vision('cls' in arrays),
    _infer_google,
    hints.google(act='gelu_tanh'),
    grid=grid,
  ),
)
