"""MViTv2 in the published formats."""

import re
from collections.abc import Iterator

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import export, hints, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

_PARTS = ('query', 'key', 'value')
_TABLE = '.rel_pos_h'


def block(theirs: str, ours: str, heads: int, shortcut: str) -> tuple[Rule, ...]:
  """Rules of a block; `shortcut` is what its projection is named."""
  rules = [
    *layers.norm(f'{theirs}.norm1', f'{ours}/norm1'),
    *layers.norm(f'{theirs}.norm2', f'{ours}/norm2'),
    *layers.fused(f'{theirs}.attn.qkv', f'{ours}/attention', _PARTS),
    *layers.pair(f'{theirs}.attn.proj', f'{ours}/attention/out', t.out_kernel),
    *layers.pair(f'{theirs}.mlp.fc1', f'{ours}/mlp/Dense_0'),
    *layers.pair(f'{theirs}.mlp.fc2', f'{ours}/mlp/Dense_1'),
    *layers.pair(f'{theirs}.{shortcut}', f'{ours}/shortcut'),
  ]
  for part in _PARTS:
    pool = f'{ours}/attention/pool_{part}/kernel'
    rules.append(Rule(f'{theirs}.attn.pool_{part[0]}.weight', pool, t.conv))
    rules += layers.norm(
      f'{theirs}.attn.norm_{part[0]}', f'{ours}/attention/norm_{part}'
    )
  for side, name in (('h', 'rows'), ('w', 'columns')):
    table = f'{ours}/attention/relative_positions/{name}'
    rules.append(Rule(f'{theirs}.attn.rel_pos_{side}', table))
  return tuple(r._replace(transform=t.with_heads(r.transform, heads)) for r in rules)


def around(head: str) -> tuple[Rule, ...]:
  """Rules of what is not in a block."""
  return (
    Rule('cls_token', 'cls'),
    *layers.pair('patch_embed.proj', 'stem/conv', t.conv),
    *layers.norm('norm', 'norm'),
    *layers.pair(head, 'head'),
  )


def timm(heads: list[int], expand: str) -> tuple[Rule, ...]:
  """timm's MultiScaleVit.

  Args:
    heads: of each stage.
    expand: the model's field.
  """
  shortcut = {'attention': 'shortcut_proj_attn', 'mlp': 'shortcut_proj_mlp'}[expand]
  blocks = (
    block(f'stages.{s}.blocks.{{i}}', f'stage{s + 1}_block_{{i}}', n, shortcut)
    for s, n in enumerate(heads)
  )
  return (*around('head.fc'), *(rule for rules in blocks for rule in rules))


def authors(heads: list[int], depths: list[int]) -> tuple[Rule, ...]:
  """The authors' MViT (facebookresearch/mvit), whose blocks are numbered through.

  Args:
    heads, depths: of each stage.
  """
  rules = list(around('head.projection'))
  places = [(s, i) for s, depth in enumerate(depths) for i in range(depth)]
  for n, (s, i) in enumerate(places):
    rules += block(f'blocks.{n}', f'stage{s + 1}_block_{i}', heads[s], 'proj')
  return tuple(rules)


# -- what a file's shapes tell ----------------------------------------------------------


def _timm_rules(arrays, config) -> tuple[Rule, ...]:
  heads = []
  while (key := f'stages.{len(heads)}.blocks.0.attn') + _TABLE in arrays:
    heads.append(_heads(arrays, key))
  expands_mlp = any('.shortcut_proj_mlp.' in name for name in arrays)
  return timm(heads, 'mlp' if expands_mlp else 'attention')


def _authors_rules(arrays, config) -> tuple[Rule, ...]:
  heads, depths = [], []
  for key in _blocks(arrays):
    if not heads or heads[-1] != _heads(arrays, key):
      heads.append(_heads(arrays, key))
      depths.append(0)
    depths[-1] += 1
  return authors(heads, depths)


def _blocks(arrays) -> Iterator[str]:
  """Yields the names of the attention of each block of the authors' files."""
  n = 0
  while (key := f'blocks.{n}.attn') + _TABLE in arrays:
    yield key
    n += 1


def _heads(arrays, attention: str) -> int:
  """Returns the number of heads: channels of all, by those of one, which tables have."""
  return (
    arrays[f'{attention}.proj.weight'].shape[0] // arrays[attention + _TABLE].shape[1]
  )


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters determine.

  Raises:
    ValueError: for stages that do not double width and heads.
  """
  width = flat['stem/conv/kernel'].shape[-1]
  blocks = [re.match(r'stage(\d+)_block_\d+/norm1/scale', name) for name in flat]
  blocks = [int(match[1]) for match in blocks if match]
  stages = max(blocks, default=0)
  kernel = lambda s: flat[f'stage{s}_block_0/attention/query/kernel'].shape
  heads = [kernel(s)[1] for s in range(1, stages + 1)]
  widths = [kernel(s)[1] * kernel(s)[2] for s in range(1, stages + 1)]
  if heads != [heads[0] << s for s in range(stages)] or widths != [
    width << s for s in range(stages)
  ]:
    raise ValueError(
      f'its stages have {heads} heads and widths of {widths}; expected each to double'
    )
  shortcuts = [n for n in flat if n.endswith('/shortcut/kernel')]
  from_stage_1 = any(n.startswith('stage1_') for n in shortcuts)
  return dict(
    width=width,
    num_heads=heads[0],
    depths=tuple(blocks.count(s) for s in range(1, stages + 1)),
    expand='mlp' if from_stage_1 else 'attention',
    mlp_ratio=flat['stage1_block_0/mlp/Dense_0/kernel'].shape[1] / width,
    classifier='token' if 'cls' in flat else 'gap',
    num_classes=flat['head/kernel'].shape[1] if 'head/kernel' in flat else None,
  )


def grid(flat: dict[str, np.ndarray], fields: dict) -> tuple[int, int] | None:
  """Returns (h, w) of the last map, by the tables of the first."""
  tables = (
    flat[f'stage1_block_0/attention/relative_positions/{name}']
    for name in ('rows', 'columns')
  )
  return tuple((len(x) + 1) // 2 >> len(fields['depths']) - 1 for x in tables)


# -- timm's config ----------------------------------------------------------------------

# Fields of MultiScaleVitCfg that have one value in every MViTv2; others are not read.
_FIXED = dict(
  pool_first=False,
  qkv_bias=True,
  use_abs_pos=False,
  residual_pooling=True,
  mode='conv',
  kernel_qkv=[3, 3],
  stride_kv=None,
  patch_kernel=[7, 7],
  patch_stride=[4, 4],
  patch_padding=[3, 3],
  pool_type='max',
  rel_pos_type='spatial',
  act_layer='gelu',
  norm_layer='layernorm',
  norm_eps=1e-6,
)
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


def _timm_fields(config: dict, where: str) -> dict:
  args, name = config.get('model_args', {}), config.get('architecture') or ''
  strides = [[1, 1], *[[2, 2]] * (len(args.get('depths', range(4))) - 1)]
  for key, allowed in (_FIXED | {'stride_q': strides}).items():
    if args.get(key, allowed) != allowed:
      raise UserError(
        f'{where}: an MViT of timm with {key}={args[key]!r} is not read; expected '
        f'{allowed!r}.'
      )
  pool = args.get('global_pool') or config.get('global_pool')
  classifier = 'token' if args.get('use_cls_token', name.endswith('_cls')) else 'avg'
  if pool and pool != classifier:
    raise UserError(
      f'{where}: an MViT of timm with global_pool={pool!r} is not read; expected '
      f'{classifier!r}.'
    )
  fields = {'class_residual': True} if classifier == 'token' else {}
  if key_strides := args.get('stride_kv_adaptive'):
    if key_strides != key_strides[:1] * 2:
      raise UserError(
        f'{where}: stride_kv_adaptive={key_strides}: expected the same number twice.'
      )
    fields['kv_stride'] = key_strides[0]
  return fields


def _check(fields: dict, image_size: tuple[int, int], format: str, residual: bool):
  """Raises UserError for what timm, or the authors' code, would compute otherwise."""
  if fields['classifier'] == 'token':
    whose = 'its code adds' if residual else 'its code does not add'
    export.need(
      fields,
      'class_residual',
      (residual,),
      format,
      f"{whose} the class token's query to what it attends to",
    )
  pixels = 4 << len(fields['depths']) - 1
  if image_size[0] != image_size[1] or image_size[0] % pixels:
    raise UserError(
      f'{format} has MViTs for square images whose sides are multiples of {pixels} px, '
      f'not for {image_size[0]}x{image_size[1]}: fine-tune at such a size.'
    )


def _timm_config(fields, image_size, class_names) -> dict:
  _check(fields, image_size, 'timm', residual=True)
  has_class = fields['classifier'] == 'token'
  args = {'img_size': list(image_size)}
  name = _NAMES.get(tuple(fields[key] for key in _SHAPE))
  if name is None or fields['kv_stride'] != 4 or fields['mlp_ratio'] != 4:
    # create_model takes no such arguments; they are those of MultiScaleVitCfg.
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
  return export.timm_config(name, pool, args, fields, image_size, class_names)


def _authors_config(fields, image_size, class_names) -> dict:
  _check(fields, image_size, 'authors', residual=False)
  why = 'its files do not say by how much keys are pooled'
  export.need(fields, 'kv_stride', (4,), 'authors', why)
  return export.google_config()(fields, image_size, class_names)


def _depths(flat) -> list[int]:
  return list(infer(flat)['depths'])


def _doubling(flat) -> list[int]:
  fields = infer(flat)
  return [fields['num_heads'] << s for s in range(len(fields['depths']))]


FORMATS = (
  Format(
    'timm',
    'mvit',
    r'stages\.0\.blocks\.0\.attn\.pool_q\.weight',
    _timm_rules,
    infer,
    hints.timm(_timm_fields),
    grid=grid,
    to='timm',
    write_config=_timm_config,
    write_rules=lambda flat: timm(_doubling(flat), infer(flat)['expand']),
  ),
  Format(
    'authors',
    'mvit',
    r'blocks\.0\.attn\.pool_q\.weight',
    _authors_rules,
    infer,
    hints.google(),
    grid=grid,
    to='authors',
    write_config=_authors_config,
    write_rules=lambda flat: authors(_doubling(flat), _depths(flat)),
  ),
)
