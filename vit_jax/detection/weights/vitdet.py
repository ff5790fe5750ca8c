"""ViTDet's backbone in transformers' format, and rules that detectron2's format shares.

SAM's image encoder in the formats of its authors, timm and transformers.
"""

import dataclasses
import math
import re

import numpy as np

from vit_jax import models
from vit_jax.detection.models.vitdet import VARIANTS
from vit_jax.weights import adapt, configs, pipelines, rename
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
    neck=0 if 'norm/scale' in flat else columns(flat, 'neck_1/conv/kernel'),
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
  source, notes = _fit(source, model, fields, old, resize)
  source = dataclasses.replace(source, family='vitdet')
  return source, [r'.*/relative_positions/.*'], notes


def start_again(
  source: Source, model, resize: str
) -> tuple[Source, list[str], list[str]]:
  """Returns the weights of another ViTDet, such as SAM's, for a ViTDet."""
  fields = models.complete('vitdet', **source.fields)
  if model.neck is None:
    source = drop_parameters(source, r'(neck_\d|norm)/.*')
  source, notes = _fit(source, model, fields, _table_grid(fields), resize)
  return source, [], notes


def _table_grid(fields: dict) -> tuple[int, int]:
  """Returns the grid (h, w) of the table of absolute positions."""
  pair = zip(fields['pretrained_size'], fields['patch_size'], strict=True)
  return tuple(n // p for n, p in pair)


def _fit(
  source: Source, model, fields: dict, old: tuple[int, int], resize: str
) -> tuple[Source, list[str]]:
  """Fits absolute positions to a ViTDet; returns (source, notes).

  Args:
    fields: those of the weights' model.
    old: the grid (h, w) of the weights' table.
  """
  if not model.absolute:
    source = drop_parameters(source, POSITIONS)
  flat, notes = dict(source.flat), []
  if POSITIONS in flat:
    new = _table_grid(model.fields())
    flat[POSITIONS] = _positions(flat[POSITIONS], old, new, model.class_row, resize)
    if old != new:
      notes.append(f'position embeddings resized from {old} to {new}, {resize}')
  for field in ('act', 'norm_eps'):
    if (theirs := fields[field]) != (ours := getattr(model, field)):
      notes.append(
        f'the weights have {field}={theirs!r}, the model has {ours!r}: set it to theirs'
      )
  return dataclasses.replace(source, flat=flat), notes


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
  configs.need(fields, format, num_classes=(None,), layer_scale=(None,), neck=(None,))
  for field in ('patch_size', 'pretrained_size'):
    if len({*fields[field]}) > 1:
      raise ValueError(f'{format} cannot express {field}={fields[field]}: not a square')


def _config(fields, image_size, class_names) -> dict:
  if fields['neck']:
    return _sam_config(fields, image_size)
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


def _write_rules(flat: dict, fields: dict) -> Table:
  return (_hf_sam if fields['neck'] else _hf)(fields['num_heads'])


# -- SAM --------------------------------------------------------------------------------


def _flatten(x):
  if x.shape[1] != x.shape[2]:
    raise ValueError('the grid of positions is not square')
  return (x.reshape(1, -1, x.shape[-1]),)


def _unflatten(xs):
  side = math.isqrt(xs[0].shape[1])
  return xs[0].reshape(1, side, side, -1)


_GRID = rename.Transform(_flatten, _unflatten)  # [1, h, w, D] -> [1, h w, D]


def _sam(heads: int) -> Table:
  """Makes the rules of timm's SAM."""
  blocks = rules('patch_embed.proj', 'pos_embed', 'blocks.{i}', 'attn', heads)
  return table(
    Rule('pos_embed', POSITIONS, _GRID),
    blocks,
    [
      (
        rename.conv(f'neck.{2 * i}', f'neck_{i + 1}/conv'),
        rename.norm(f'neck.{2 * i + 1}', f'neck_{i + 1}/norm'),
      )
      for i in (0, 1)
    ],
    rename.norm('neck', 'norm'),
    rename.dense('head.fc', 'head'),
  )


def _authors(heads: int) -> Table:
  return table(_sam(heads), rename.respell(_sam(heads), (r'mlp\.fc', 'mlp.lin')))


# Names of timm -> names of transformers.
_TO_HF = (
  (r'^blocks', 'layers'),
  (r'embed\.proj', 'embed.projection'),
  (r'\.norm', '.layer_norm'),
  (r'mlp\.fc', 'mlp.lin'),
  (r'neck\.0', 'neck.conv1'),
  (r'neck\.1', 'neck.layer_norm1'),
  (r'neck\.2', 'neck.conv2'),
  (r'neck\.3', 'neck.layer_norm2'),
  (r'^', 'vision_encoder.'),
)


def _hf_sam(heads: int) -> Table:
  renamed = rename.respell(_sam(heads), *_TO_HF)
  return tuple(rule._replace(only_load=False) for rule in renamed)


def _count_heads(arrays) -> int:
  """Counts heads: a table of relative positions has as many channels as one head."""
  part = lambda regex: next(x for n, x in arrays.items() if re.fullmatch(regex, n))
  channels = part(r'.*\.0\.attn\.rel_pos_h').shape[1]
  return len(part(r'.*\.0\.attn\.proj\.weight')) // channels


def _check_windows(flat: dict, fields: dict, facts: configs.Facts) -> dict:
  """Raises ValueError if a config contradicts the sizes of relative position tables."""
  inferred = infer(flat)
  for key in ('window', 'global_blocks'):
    if (own := inferred[key]) not in (None, fields[key]):
      raise ValueError(f'its config has {key}={fields[key]}, its arrays {own}')
  return {}


# timm's preparation of pixels. The authors pad an image at the right and below instead.
_PIXELS = {'mean': pipelines.MEAN, 'std': pipelines.STD, 'crop_pct': 1.0}


def _sam_facts(config: dict, source: str) -> configs.Facts:
  """Reads transformers' config of a SAM, or of its vision model alone."""
  inner = config
  if (kind := config.get('model_type', 'sam_vision_model')) == 'sam':
    inner = configs.section(config, 'vision_config')
  elif kind != 'sam_vision_model':
    raise ValueError(f"model_type is {kind!r}, expected 'sam' or 'sam_vision_model'")
  configs.require(inner, {'qkv_bias': True}, 'a SAM')
  if not config:
    return configs.Facts({}, images=_PIXELS)
  fields = {
    'act': configs.activation(inner.get('hidden_act', 'gelu')),
    'norm_eps': configs.epsilon(inner.get('layer_norm_eps', 1e-6)),
    'window': inner.get('window_size', 14),
    'global_blocks': tuple(inner.get('global_attn_indexes', (2, 5, 8, 11))),
  }
  size = configs.pair(inner.get('image_size', 1024))
  images, processor = dict(_PIXELS), configs.section(config, 'preprocessor')
  if 'pad_size' in processor:  # the processor of SAM
    config = {**config, 'preprocessor': {}}
    for key in ('mean', 'std'):
      images[key] = processor.get(f'image_{key}', images[key])
  return configs.hf_facts(config, fields, size)._replace(images=images)


def _sam_config(fields: dict, image_size: tuple[int, int]) -> dict:
  _check_sam(fields, image_size, 'transformers', num_classes=(None,))
  return {
    'architectures': ['SamVisionModel'],
    'model_type': 'sam_vision_model',
    'hidden_size': fields['width'],
    'output_channels': fields['neck'],
    'num_hidden_layers': fields['depth'],
    'num_attention_heads': fields['num_heads'],
    'mlp_dim': fields['mlp_dim'],
    'hidden_act': configs.HF_ACTS[fields['act']],
    'layer_norm_eps': fields['norm_eps'],
    'image_size': image_size[0],
    'patch_size': fields['patch_size'][0],
    'num_channels': 3,
    'use_abs_pos': fields['absolute'],
    'window_size': fields['window'],
    'global_attn_indexes': list(fields['global_blocks']),
  }


def _check_sam(fields: dict, image_size: tuple[int, int], format: str, **allowed):
  """Raises ValueError for fields that neither timm nor transformers can express."""
  configs.need(fields, format, layer_scale=(None,), relative=(True,), **allowed)
  if fields['absolute']:
    configs.need(fields, format, class_row=(False,), pretrained_size=(image_size,))
  for key, size in (('patch_size', fields['patch_size']), ('image_size', image_size)):
    if len({*size}) > 1:
      raise ValueError(f'{format} cannot express {key}={size}: not a square')


def _timm_fields(args: dict, name: str) -> dict:
  configs.require(args, {'norm_layer': ''}, 'a SAM of timm')
  # '' is timm's default, an epsilon of 1e-6. timm's names override it.
  fields = {'norm_eps': 1e-5 if args.pop('norm_layer', None) is None else 1e-6}
  if models.parse_name(name)[0] == 'vitdet':
    usual = models.complete(name)
    fields |= {key: usual[key] for key in ('window', 'global_blocks')}
  if 'window_size' in args:
    fields['window'] = args.pop('window_size')
  if 'global_attn_indexes' in args:
    fields['global_blocks'] = tuple(args.pop('global_attn_indexes'))
  # The arrays tell.
  for key in ('use_abs_pos', 'neck_chans'):
    args.pop(key, None)
  return fields | configs.timm_act(args, name)


def _timm_config(fields, image_size, class_names) -> dict:
  if fields['neck'] is None:
    raise ValueError('timm cannot express neck=None: 0 is a norm without a neck')
  _check_sam(fields, image_size, 'timm', norm_eps=(1e-5, 1e-6), act=('gelu_erf',))
  args = configs.timm_patches(fields, image_size) | {
    'depth': fields['depth'],
    'num_heads': fields['num_heads'],
    'mlp_ratio': configs.timm_ratio(fields['mlp_dim'], fields['width']),
    'window_size': fields['window'],
    'global_attn_indexes': list(fields['global_blocks']),
    'use_abs_pos': fields['absolute'],
    'neck_chans': fields['neck'],
  }
  if fields['norm_eps'] == 1e-6:
    args['norm_layer'] = ''
  sizes = dict(zip(VARIANTS.values(), ('base', 'large', 'huge'), strict=True))
  size = sizes.get((fields['width'], fields['depth'], fields['num_heads']), 'base')
  name = f'samvit_{size}_patch16'
  return configs.timm_config(name, 'avg', args, fields, image_size, class_names)


_read_timm = configs.timm(_timm_fields, global_pool='avg', use_rel_pos=True)
_SAM = Format(
  name='timm',
  family='vitdet',
  marker=(r'blocks\.0\.attn\.rel_pos_h', r'neck(\.0)?\.weight'),
  facts=lambda config, source: _read_timm(config, source)._replace(images=_PIXELS),
  rules=lambda arrays, facts: _sam(_count_heads(arrays)),
  infer=infer,
  grid=grid,
  conclude=_check_windows,
  resize=lambda fields: 'bicubic',
  writer=Writer(
    config=_timm_config,
    rules=lambda flat, fields: _sam(fields['num_heads']),
    alike=('pretrained_size', 'class_row'),
  ),
)
FORMATS = (
  Format(
    name='hf',
    family='vitdet',
    marker=r'encoder\.layer\.0\.attention\.qkv\.weight',
    facts=_facts,
    rules=lambda arrays, facts: _hf(facts.fields['num_heads']),
    infer=infer,
    grid=grid,
    resize=lambda fields: 'bicubic_plain',
    needs=('num_heads',),
    writer=Writer(
      config=_config, rules=_write_rules, alike=('pretrained_size', 'class_row')
    ),
  ),
  dataclasses.replace(
    _SAM,
    name='authors',
    marker=r'(image_encoder\.)?blocks\.0\.mlp\.lin1\.weight',
    within=r'image_encoder\.',
    facts=lambda config, source: configs.Facts({}, images=_PIXELS),
    rules=lambda arrays, facts: _authors(_count_heads(arrays)),
    writer=None,
  ),
  _SAM,
  dataclasses.replace(
    _SAM,
    name='hf',
    marker=r'vision_encoder\.layers\.0\.attn\.rel_pos_h',
    ignored=r'(mask_decoder|prompt_encoder|shared_image_embedding)\..*',
    facts=_sam_facts,
    rules=lambda arrays, facts: _hf_sam(_count_heads(arrays)),
    writer=None,
  ),
)
