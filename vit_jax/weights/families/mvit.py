"""MViTv2 in the published formats."""

import functools
import re

from vit_jax.weights import configs, rename
from vit_jax.weights.families.vit import columns
from vit_jax.weights.formats import Format, Writer
from vit_jax.weights.rename import Rule, Table, table


def block(theirs: str, ours: str, heads: int, shortcut: str) -> Table:
  """Makes the rules of a block; `shortcut` names the projection of its shortcut."""
  attn, attention = f'{theirs}.attn', f'{ours}/attention'
  return table(
    rename.norm(f'{theirs}.norm1', f'{ours}/norm1'),
    rename.norm(f'{theirs}.norm2', f'{ours}/norm2'),
    rename.fuse_heads(f'{attn}.qkv', attention, heads),
    rename.merge_heads(f'{attn}.proj', f'{attention}/out', heads),
    rename.dense(f'{theirs}.mlp.fc1', f'{ours}/mlp/Dense_0'),
    rename.dense(f'{theirs}.mlp.fc2', f'{ours}/mlp/Dense_1'),
    rename.dense(f'{theirs}.{shortcut}', f'{ours}/shortcut'),
    [rename.conv(f'{attn}.pool_{x[0]}', f'{attention}/pool_{x}') for x in rename.QKV],
    [rename.norm(f'{attn}.norm_{x[0]}', f'{attention}/norm_{x}') for x in rename.QKV],
    Rule(f'{attn}.rel_pos_h', f'{attention}/relative_positions/rows'),
    Rule(f'{attn}.rel_pos_w', f'{attention}/relative_positions/columns'),
  )


def _outer_rules(head: str) -> Table:
  """Makes the rules of everything but the blocks. `head` is the head's name in the file."""
  return table(
    Rule('cls_token', 'cls'),
    rename.conv('patch_embed.proj', 'stem/conv'),
    rename.norm('norm', 'norm'),
    rename.dense(head, 'head'),
  )


def timm(heads: list[int], shortcut: str) -> Table:
  """Makes the rules of timm's MultiScaleVit, given the heads of each stage."""
  stages = [
    block(f'stages.{s}.blocks.{{i}}', f'stage{s + 1}_block_{{i}}', n, shortcut)
    for s, n in enumerate(heads)
  ]
  return table(_outer_rules('head.fc'), stages)


def authors(heads: list[int]) -> Table:
  """Makes the rules of the authors' code (facebookresearch/mvit), given heads per block.

  The authors number the blocks of all stages in one sequence. A stage begins at the block
  that has more heads than the block before.
  """
  stages, blocks = list(dict.fromkeys(heads)), []
  for n, number in enumerate(heads):
    ours = f'stage{stages.index(number) + 1}_block_{n - heads.index(number)}'
    blocks.append(block(f'blocks.{n}', ours, number, 'proj'))
  return table(_outer_rules('head.projection'), *blocks)


def count_heads(arrays, attention: str) -> list[int]:
  """Counts the heads of every attention layer.

  `attention` is a template of the layers' names, in which {} stands for a number. A table of
  relative positions has as many channels as one head.
  """
  heads = []
  while (key := attention.format(len(heads))) + '.rel_pos_h' in arrays:
    channels = arrays[f'{key}.rel_pos_h'].shape[1]
    heads.append(len(arrays[f'{key}.proj.weight']) // channels)
  return heads


def _timm_rules(arrays, facts) -> Table:
  names = (f'shortcut_proj_{part}' for part in ('mlp', 'attn'))
  shortcut = next((n for n in names if any(f'.{n}.' in x for x in arrays)), 'none')
  return timm(count_heads(arrays, 'stages.{}.blocks.0.attn'), shortcut)


def _timm_write_rules(flat, fields) -> Table:
  shortcut = {'attention': 'shortcut_proj_attn', 'mlp': 'shortcut_proj_mlp'}
  return timm(_heads_of_stages(fields), shortcut[fields['expand']])


def heads_of_blocks(fields: dict) -> list[int]:
  """Returns the number of heads of each block."""
  pairs = zip(_heads_of_stages(fields), fields['depths'], strict=True)
  return [n for n, depth in pairs for _ in range(depth)]


def _authors_write_rules(flat, fields) -> Table:
  return authors(heads_of_blocks(fields))


def _heads_of_stages(fields: dict) -> list[int]:
  """Returns the number of heads of each stage."""
  return [fields['num_heads'] << s for s in range(len(fields['depths']))]


def infer(flat: dict) -> dict:
  """Infers the model's fields from its parameters."""
  width = columns(flat, 'stem/conv/kernel')
  depths = rename.count_blocks(flat, 'norm1/scale')
  numbers = range(len(depths))
  kernels = [flat[f'stage{s + 1}_block_0/attention/query/kernel'] for s in numbers]
  heads = [x.shape[1] for x in kernels]
  widths = [x.shape[1] * x.shape[2] for x in kernels]
  if (heads, widths) != tuple([x << s for s in numbers] for x in (heads[0], width)):
    raise ValueError(
      f'heads {heads} and widths {widths} do not double from stage to stage'
    )
  from_stage_1 = any(re.fullmatch('stage1_.*/shortcut/kernel', n) for n in flat)
  return dict(
    width=width,
    num_heads=heads[0],
    depths=depths,
    expand='mlp' if from_stage_1 else 'attention',
    mlp_ratio=flat['stage1_block_0/mlp/Dense_0/kernel'].shape[1] / width,
    classifier='token' if 'cls' in flat else 'gap',
    num_classes=columns(flat, 'head/kernel'),
  )


def _grid(flat: dict, fields: dict) -> tuple[int, int] | None:
  """Derives the last map's (h, w) from the tables of the first block."""
  tables = 'stage1_block_0/attention/relative_positions/'
  sides = ((len(flat[tables + name]) + 1) // 2 for name in ('rows', 'columns'))
  return tuple(side >> len(fields['depths']) - 1 for side in sides)


# -- timm's config ----------------------------------------------------------------------

# Fields of timm's MultiScaleVitCfg for which only these values, those of all MViTv2, are
# supported.
_FIXED = {
  'pool_first': False,
  'qkv_bias': True,
  'use_abs_pos': False,
  'residual_pooling': True,
  'mode': 'conv',
  'kernel_qkv': [3, 3],
  'stride_kv': None,
  'pool_type': 'max',
  'patch_kernel': [7, 7],
  'patch_stride': [4, 4],
  'patch_padding': [3, 3],
  'rel_pos_type': 'spatial',
  'act_layer': 'gelu',
  'norm_eps': 1e-6,
  'norm_layer': 'layernorm',
}
# Values of these fields -> timm's name of the model.
_SHAPE = ('width', 'num_heads', 'depths', 'expand', 'classifier')
_NAMES = {
  (96, 1, (1, 2, 5, 2), 'attention', 'gap'): 'mvitv2_tiny',
  (96, 1, (1, 2, 11, 2), 'attention', 'gap'): 'mvitv2_small',
  (96, 1, (2, 3, 16, 3), 'attention', 'gap'): 'mvitv2_base',
  (144, 2, (2, 6, 36, 4), 'mlp', 'gap'): 'mvitv2_large',
  (96, 1, (1, 2, 11, 2), 'attention', 'token'): 'mvitv2_small_cls',
  (96, 1, (2, 3, 16, 3), 'attention', 'token'): 'mvitv2_base_cls',
  (144, 2, (2, 6, 36, 4), 'attention', 'token'): 'mvitv2_large_cls',
  (192, 3, (4, 8, 60, 8), 'attention', 'token'): 'mvitv2_huge_cls',
}


def _timm_fields(args: dict, name: str) -> dict:
  strides = [[1, 1], *[[2, 2]] * (len(args.get('depths', range(4))) - 1)]
  classifier = 'token' if args.get('use_cls_token', name.endswith('_cls')) else 'avg'
  only = {'stride_q': strides, 'global_pool': classifier}
  configs.require(args, only, 'an MViT of timm')
  for key in only:
    args.pop(key, None)
  fields = {'class_residual': True} if classifier == 'token' else {}
  if key_strides := args.pop('stride_kv_adaptive', None):
    fields['kv_stride'] = configs.side(key_strides, 'stride_kv_adaptive')
  return fields


def _check(fields: dict, image_size: tuple[int, int], format: str, residual: bool):
  """Raises ValueError for a model that the format's code would compute differently.

  `residual` says whether that code also adds the query of the class token.
  """
  configs.need(fields, format, map_norms=(False,), window=(None,))
  if fields['classifier'] == 'token':
    configs.need(fields, format, class_residual=(residual,))
  pixels = 4 << len(fields['depths']) - 1
  if image_size[0] != image_size[1] or image_size[0] % pixels:
    size = 'x'.join(map(str, image_size))
    raise ValueError(
      f'{format} takes square images whose side is a multiple of {pixels} px, not {size}'
    )


def _timm_config(fields, image_size, class_names) -> dict:
  _check(fields, image_size, 'timm', residual=True)
  has_class = fields['classifier'] == 'token'
  args = {'img_size': list(image_size)}
  name = _NAMES.get(tuple(fields[key] for key in _SHAPE))
  if name is None or fields['kv_stride'] != 4 or fields['mlp_ratio'] != 4:
    # timm's create_model does not take these fields: build a MultiScaleVitCfg with them.
    name = 'mvitv2_base_cls' if has_class else 'mvitv2_tiny'
    args |= {
      'depths': list(fields['depths']),
      'embed_dim': fields['width'],
      'num_heads': fields['num_heads'],
      'mlp_ratio': fields['mlp_ratio'],
      'expand_attn': fields['expand'] == 'attention',
      'use_cls_token': has_class,
      'stride_q': [[1, 1], *[[2, 2]] * (len(fields['depths']) - 1)],
    }
    if fields['kv_stride'] != 4:
      args['stride_kv_adaptive'] = [fields['kv_stride']] * 2
  pool = 'token' if has_class else 'avg'
  return configs.timm_config(name, pool, args, fields, image_size, class_names)


def _authors_config(fields, image_size, class_names) -> dict:
  _check(fields, image_size, 'authors', residual=False)
  return configs.google_config()(fields, image_size, class_names)


_format = functools.partial(Format, family='mvit', infer=infer, grid=_grid)
_writer = functools.partial(Writer, alike=('class_residual', 'mlp_ratio'))
FORMATS = (
  _format(
    name='timm',
    marker=r'stages\.0\.blocks\.0\.attn\.pool_q\.weight',
    rules=_timm_rules,
    facts=configs.timm(_timm_fields, **_FIXED),
    writer=_writer(config=_timm_config, rules=_timm_write_rules),
  ),
  _format(
    name='authors',
    marker=r'blocks\.0\.attn\.pool_q\.weight',
    rules=lambda arrays, facts: authors(count_heads(arrays, 'blocks.{}.attn')),
    facts=configs.google(),
    writer=_writer(config=_authors_config, rules=_authors_write_rules),
  ),
)
