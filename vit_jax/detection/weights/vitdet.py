"""ViTDet's backbone in transformers' format, and rules that detectron2's format shares."""

import dataclasses
import math
import re

import numpy as np

from vit_jax import models
from vit_jax.weights import adapt, configs, rename
from vit_jax.weights.adapt import drop_parameters
from vit_jax.weights.families.vit import ATTENTION, BLOCK, MLP, POSITIONS, columns
from vit_jax.weights.formats import Format, Writer
from vit_jax.weights.rename import Rule, Table, table
from vit_jax.weights.source import Source

_TABLES = 'relative_positions'


def rules(
  embedding: str, positions: str, layer: str, attention: str, heads: int
) -> Table:
  """Makes the rename table of an implementation, given its names.

  Args:
    embedding, positions: names of the patch embedding and the absolute positions.
    layer: name of a block, with {i} for its index.
    attention: name of attention within a block.
  """
  attention = f'{layer}.{attention}'
  return table(
    Rule(positions, POSITIONS),
    rename.conv(embedding, 'embedding'),
    rename.norm(f'{layer}.norm1', f'{BLOCK}/LayerNorm_0'),
    rename.norm(f'{layer}.norm2', f'{BLOCK}/LayerNorm_1'),
    rename.fuse_heads(f'{attention}.qkv', ATTENTION, heads),
    rename.merge_heads(f'{attention}.proj', f'{ATTENTION}/out', heads),
    Rule(f'{attention}.rel_pos_h', f'{BLOCK}/{_TABLES}/rows'),
    Rule(f'{attention}.rel_pos_w', f'{BLOCK}/{_TABLES}/columns'),
    rename.dense(f'{layer}.mlp.fc1', f'{MLP}/Dense_0'),
    rename.dense(f'{layer}.mlp.fc2', f'{MLP}/Dense_1'),
  )


def _hf(heads: int) -> Table:
  names = 'embeddings.projection', 'embeddings.position_embeddings'
  return rules(*names, 'encoder.layer.{i}', 'attention', heads)


# -- the model's fields ---------------------------------------------------------------


def _depth(flat: dict[str, np.ndarray]) -> int:
  blocks = (re.match(r'Transformer/encoderblock_(\d+)/', name) for name in flat)
  return len({match[1] for match in blocks if match})


def _maps(flat: dict[str, np.ndarray]) -> list[tuple[int, int]]:
  """Returns the map (h, w) of each block's relative positions; [] without positions."""
  if not any(f'/{_TABLES}/' in name for name in flat):
    return []
  side = lambda i, name: (len(flat[f'{BLOCK.format(i=i)}/{_TABLES}/{name}']) + 1) // 2
  return [(side(i, 'rows'), side(i, 'columns')) for i in range(_depth(flat))]


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Infers the model's fields from its parameters.

  `global_blocks` and `window` follow from the sizes of the relative position tables. Both are
  None unless there are two sizes, of which the smaller is square.
  """
  *patch, _, width = flat['embedding/kernel'].shape
  maps = _maps(flat)
  fields = dict(
    patch_size=tuple(patch),
    width=width,
    depth=_depth(flat),
    mlp_dim=flat[f'{MLP.format(i=0)}/Dense_0/kernel'].shape[1],
    num_heads=flat[f'{ATTENTION.format(i=0)}/query/kernel'].shape[1],
    relative=bool(maps),
    absolute=POSITIONS in flat,
    window=None,
    global_blocks=None,
    num_classes=columns(flat, 'head/kernel'),
  )
  if len(set(maps)) == 2 and (least := min(maps))[0] == least[1]:
    fields['window'] = least[0]
    fields['global_blocks'] = tuple(i for i, n in enumerate(maps) if n != least)
  if POSITIONS in flat:
    rows = flat[POSITIONS].shape[1]
    side = math.isqrt(rows)
    fields['class_row'] = side * side != rows
    fields['pretrained_size'] = tuple(side * p for p in patch)
    if side * side + fields['class_row'] != rows:
      raise ValueError(
        f'the position table has {rows} rows, which is not a square grid'
      )
  return fields


def grid(flat: dict[str, np.ndarray], fields: dict) -> tuple[int, int] | None:
  """Returns (h, w) of the map, read from a block that attends to all of it, or None."""
  maps, blocks = _maps(flat), fields['global_blocks']
  return maps[blocks[0]] if maps and blocks else None


def window_blocks(fields: dict) -> list[int]:
  """Lists the blocks that attend within windows."""
  return [i for i in range(fields['depth']) if i not in fields['global_blocks']]


# -- the weights of a ViT -------------------------------------------------------------

# Parameters of a ViT that a ViTDet lacks: tokens before the patches, and everything after
# the blocks.
_NOT_HERE = r'cls|registers|Transformer/(encoder|cls)_norm/.*'
_NOT_HERE += r'|(pooled_norm|MAPHead_0|head|head_dist|pre_logits)/.*'
# Fields of a ViT's blocks -> the values that suit a ViTDet.
_BLOCKS = {
  'posemb': ('learn', 'sincos2d'),
  'posemb_where': ('stem',),
  'rope': ('none',),
  'relpos': ('none',),
  'attention': ('full',),
  'block': ('pre',),
  'mlp': ('mlp',),
  'qkv_bias': ('qkv',),
  'dense_bias': (True,),
  'patch_bias': (True,),
  'kv_heads': (None,),
  'norm': ('layer',),
  'extra_norms': ((),),
  'stem_blocks': (None,),
}


def start(source: Source, model, resize: str) -> tuple[Source, list[str], list[str]]:
  """Returns the weights of a ViT as those of a ViTDet, see `adapt.STARTS`.

  Raises:
    ValueError: no ViTDet can start from this ViT.
  """
  fields = models.build('vit', **source.fields).fields()
  configs.need(fields, 'a vitdet', **_BLOCKS)
  if source.image_size is None:
    raise ValueError('its image size is unknown, and so is the grid of its positions')
  family, size = models.family('vit'), source.image_size
  flat, _ = adapt.tabulate_positions(source.flat, fields, family, size)
  source = drop_parameters(dataclasses.replace(source, flat=flat), _NOT_HERE)
  old = tuple(n // s for n, s in zip(size, family.stride(fields), strict=True))
  notes, table = [], source.flat.pop(family.position)
  if model.absolute:
    new = tuple(
      n // p for n, p in zip(model.pretrained_size, model.patch_size, strict=True)
    )
    table = _positions(table, old, new, model.class_row, resize)
    source.flat[family.position] = table
    if old != new:
      notes.append(f'position embeddings resized from {old} to {new}, {resize}')
  for field in ('act', 'norm_eps'):
    if (theirs := fields[field]) != (ours := getattr(model, field)):
      notes.append(
        f'the weights have {field}={theirs!r}, the model has {ours!r}: set it to theirs'
      )
  return (
    dataclasses.replace(source, family='vitdet'),
    [r'.*/relative_positions/.*'],
    notes,
  )


def _positions(table, old, new, class_row: bool, resize: str) -> np.ndarray:
  """Resizes positions to the grid `new`: [1, h w, D], or [1, 1 + h w, D] if `class_row`."""
  table = adapt.resize_positions(table, old, new, resize)
  patches = table[:, table.shape[1] - new[0] * new[1] :]
  if not class_row:
    return patches
  if patches.shape == table.shape:  # the source has no class token
    return np.pad(table, ((0, 0), (1, 0), (0, 0)))
  return np.concatenate([table[:, :1], patches], axis=1)


# -- configs --------------------------------------------------------------------------


def read_config(config: dict) -> dict:
  """Reads fields from a config with transformers' keys."""
  # Convolutional blocks are not supported.
  configs.require(config, {'residual_block_indices': []}, 'a ViTDet')
  fields = {}
  if 'num_attention_heads' in config:
    fields['num_heads'] = config['num_attention_heads']
  depth = config.get('num_hidden_layers')
  if depth and ('window_size' in config or 'window_block_indices' in config):
    side = config.get('window_size', 0)
    within = config.get('window_block_indices', []) if side else []
    if odd := {*within} - {*range(depth)}:
      raise ValueError(
        f'window_block_indices has {min(odd)}, but there are {depth} blocks'
      )
    fields['global_blocks'] = tuple(i for i in range(depth) if i not in within)
    fields['window'] = side or 14
  return fields


def _facts(config: dict, source: str) -> configs.Facts:
  facts = configs.hf('vitdet')(config, source)
  eps = config.get('layer_norm_eps', 1e-6)
  fields = {'act': facts.fields['act'], 'norm_eps': eps, **read_config(config)}
  return facts._replace(fields=fields)


def check_plain(fields: dict, format: str) -> None:
  """Raises ValueError for fields that transformers and detectron2 cannot express."""
  configs.need(fields, format, num_classes=(None,), layer_scale=(None,))
  for field in ('patch_size', 'pretrained_size'):
    if len({*fields[field]}) > 1:
      raise ValueError(f'{format} cannot express {field}={fields[field]}: not a square')


def _config(fields, image_size, class_names) -> dict:
  check_plain(fields, 'transformers')
  if fields['absolute']:
    configs.need(fields, 'transformers', class_row=(True,))
  if fields['mlp_dim'] % fields['width']:
    raise ValueError(
      f'transformers cannot express mlp_dim={fields["mlp_dim"]}: it takes multiples of '
      f'the width {fields["width"]}'
    )
  return {
    'architectures': ['VitDetBackbone'],
    'model_type': 'vitdet',
    'hidden_size': fields['width'],
    'num_hidden_layers': fields['depth'],
    'num_attention_heads': fields['num_heads'],
    'mlp_ratio': fields['mlp_dim'] // fields['width'],
    'hidden_act': configs.HF_ACTS[fields['act']],
    'layer_norm_eps': fields['norm_eps'],
    'image_size': configs.int_or_pair(image_size),
    'pretrain_image_size': fields['pretrained_size'][0],
    'patch_size': fields['patch_size'][0],
    'num_channels': 3,
    'qkv_bias': True,
    'drop_path_rate': fields['stochastic_depth'],
    'window_block_indices': window_blocks(fields),
    'residual_block_indices': [],
    'use_absolute_position_embeddings': fields['absolute'],
    'use_relative_position_embeddings': fields['relative'],
    'window_size': fields['window'],
    'out_features': [f'stage{fields["depth"]}'],
  }


FORMATS = (
  Format(
    name='hf',
    family='vitdet',
    marker=r'encoder\.layer\.0\.attention\.qkv\.weight',
    facts=_facts,
    rules=lambda arrays, facts: _hf(facts.fields['num_heads']),
    infer=infer,
    grid=grid,
    needs=('num_heads',),
    writer=Writer(config=_config, alike=('pretrained_size', 'class_row')),
  ),
)
