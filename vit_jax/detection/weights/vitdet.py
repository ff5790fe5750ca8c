"""ViTDet's backbone in transformers' format, and what detectron2's format shares."""

import math
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import export, hints, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.families.vit import ATTENTION, BLOCK, MLP, POSITIONS
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

_TABLES = 'relative_positions'


def rules(embedding: str, table: str, layer: str, attention: str) -> tuple[Rule, ...]:
  """Returns the rename table of the names of an implementation.

  Args:
    embedding: of the patch embedding.
    table: of the absolute positions.
    layer: of a block, with {i}.
    attention: of attention in a block.
  """
  attention = f'{layer}.{attention}'
  return (
    Rule(table, POSITIONS),
    *layers.pair(embedding, 'embedding', t.conv),
    *layers.norm(f'{layer}.norm1', f'{BLOCK}/LayerNorm_0'),
    *layers.norm(f'{layer}.norm2', f'{BLOCK}/LayerNorm_1'),
    *layers.fused(f'{attention}.qkv', ATTENTION, ('query', 'key', 'value')),
    *layers.pair(f'{attention}.proj', f'{ATTENTION}/out', t.out_kernel),
    Rule(f'{attention}.rel_pos_h', f'{BLOCK}/{_TABLES}/rows'),
    Rule(f'{attention}.rel_pos_w', f'{BLOCK}/{_TABLES}/columns'),
    *layers.pair(f'{layer}.mlp.fc1', f'{MLP}/Dense_0'),
    *layers.pair(f'{layer}.mlp.fc2', f'{MLP}/Dense_1'),
  )


_HF = rules(
  'embeddings.projection',
  'embeddings.position_embeddings',
  'encoder.layer.{i}',
  'attention',
)


# -- the model's fields -----------------------------------------------------------------


def tables(flat: dict[str, np.ndarray]) -> list[tuple[int, int]]:
  """Returns the map (h, w) that each block's relative positions are for; [] if none."""
  of = lambda i, name: (
    (flat[f'Transformer/encoderblock_{i}/{_TABLES}/{name}'].shape[0] + 1) // 2
  )
  depth = _depth(flat) if any(f'/{_TABLES}/' in name for name in flat) else 0
  return [(of(i, 'rows'), of(i, 'columns')) for i in range(depth)]


def _depth(flat) -> int:
  found = (re.match(r'Transformer/encoderblock_(\d+)/', name) for name in flat)
  return len({match[1] for match in found if match})


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that follow from its parameters.

  Which blocks attend to the whole map, and the side of windows, are None where tables of
  relative positions do not tell them apart.
  """
  kernel = flat['embedding/kernel']
  query = flat['Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel']
  hidden = flat['Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel'].shape[1]
  patch = kernel.shape[:2]
  fields = dict(
    patch_size=patch,
    width=kernel.shape[3],
    depth=_depth(flat),
    mlp_dim=hidden,
    num_heads=query.shape[1],
    relative=bool(known := tables(flat)),
    absolute=POSITIONS in flat,
    window=None,
    global_blocks=None,
    num_classes=flat['head/kernel'].shape[1] if 'head/kernel' in flat else None,
  )
  if len(set(known)) == 2 and (least := min(known))[0] == least[1]:
    fields['window'] = least[0]
    fields['global_blocks'] = tuple(i for i, n in enumerate(known) if n != least)
  if POSITIONS in flat:
    rows = flat[POSITIONS].shape[1]
    side = math.isqrt(rows)
    fields['class_row'] = side * side != rows
    fields['pretrained_size'] = tuple(side * p for p in patch)
    if side * side + fields['class_row'] != rows:
      raise ValueError(f'the position table has {rows} rows, not those of a square')
  return fields


def grid(flat: dict[str, np.ndarray], fields: dict) -> tuple[int, int] | None:
  """Returns (h, w) of the map of blocks that attend to all of it; None: unknown."""
  known, whole = tables(flat), fields['global_blocks']
  return known[whole[0]] if known and whole else None


def depth_of_windows(fields: dict) -> list[int]:
  """Returns the blocks that attend within windows."""
  return [i for i in range(fields['depth']) if i not in fields['global_blocks']]


# -- configs ----------------------------------------------------------------------------


def read_config(config: dict, image_size, where: str) -> dict:
  """Returns the fields given by a config with transformers' keys."""
  fields = {}
  if config.get('residual_block_indices'):
    raise UserError(
      f'{where}: residual_block_indices is {config["residual_block_indices"]}: a ViTDet '
      'with convolutions between its blocks is not read, only [] is.'
    )
  if 'num_attention_heads' in config:
    fields['num_heads'] = config['num_attention_heads']
  depth = config.get('num_hidden_layers')
  if depth is not None and (
    'window_size' in config or 'window_block_indices' in config
  ):
    side = config.get('window_size', 0)
    within = config.get('window_block_indices', []) if side else []
    fields['global_blocks'] = tuple(i for i in range(depth) if i not in within)
    fields['window'] = side or 14
  return fields


def _hints(config: dict, where: str) -> hints.Hints:
  found = hints.hf('vitdet')(config, where)
  fields = {
    'act': found.fields['act'],
    'norm_eps': config.get('layer_norm_eps', 1e-6),
    **read_config(config, found.image_size, where),
  }
  return found._replace(fields=fields)


def check_plain(fields: dict, format: str) -> None:
  """Raises UserError for what neither transformers nor detectron2 has."""
  export.need(fields, 'num_classes', (None,), format, 'its ViTDet has no classifier')
  if len(set(fields['patch_size'])) > 1 or len(set(fields['pretrained_size'])) > 1:
    raise UserError(
      f'{format} has square patches and position tables only, not '
      f'patch_size={fields["patch_size"]}, pretrained_size={fields["pretrained_size"]}.'
    )


def _config(fields, image_size, class_names) -> dict:
  check_plain(fields, 'transformers')
  if fields['absolute']:
    why = 'the first row of its positions is that of a class token'
    export.need(fields, 'class_row', (True,), 'transformers', why)
  if fields['mlp_dim'] % fields['width']:
    raise UserError(
      f'transformers cannot express mlp_dim={fields["mlp_dim"]} of a vitdet of width '
      f'{fields["width"]}: it takes whole multiples only.'
    )
  one = lambda pair: pair[0] if pair[0] == pair[1] else list(pair)
  return {
    'architectures': ['VitDetBackbone'],
    'model_type': 'vitdet',
    'hidden_size': fields['width'],
    'num_hidden_layers': fields['depth'],
    'num_attention_heads': fields['num_heads'],
    'mlp_ratio': fields['mlp_dim'] // fields['width'],
    'hidden_act': {'gelu_erf': 'gelu', 'gelu_tanh': 'gelu_pytorch_tanh'}[fields['act']],
    'layer_norm_eps': fields['norm_eps'],
    'image_size': one(tuple(image_size)),
    'pretrain_image_size': fields['pretrained_size'][0],
    'patch_size': fields['patch_size'][0],
    'num_channels': 3,
    'qkv_bias': True,
    'drop_path_rate': fields['stochastic_depth'],
    'window_block_indices': depth_of_windows(fields),
    'residual_block_indices': [],
    'use_absolute_position_embeddings': fields['absolute'],
    'use_relative_position_embeddings': fields['relative'],
    'window_size': fields['window'],
    'out_features': [f'stage{fields["depth"]}'],
  }


FORMATS = (
  Format(
    'hf',
    'vitdet',
    r'encoder\.layer\.0\.attention\.qkv\.weight',
    lambda arrays, config: _HF,
    infer,
    _hints,
    grid=grid,
    flat_heads=True,
    to='hf',
    write_config=_config,
  ),
)
