"""Swin V1 and V2, in the formats of timm and transformers."""

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.weights import configs, rename
from vit_jax.weights.families.vit import columns
from vit_jax.weights.formats import Format, Writer
from vit_jax.weights.rename import Rule, Table, nest_rules, respell, table

_TABLE = '/relative_positions/table'
_FACTOR = '/relative_positions/logit_scale'


class Stage(NamedTuple):
  """Facts about a stage that the rename rules need."""

  heads: int
  # (h, w) of the window that the table of positions is for. None in V2, which has no tables.
  window: tuple[int, int] | None


# -- rename tables --------------------------------------------------------------------


class Names(NamedTuple):
  """One library's names of modules. {s} stands for a stage, {i} for a block."""

  embedding: str
  norm: str
  downsample: str
  last_norm: str
  block: str
  # The names below belong to modules inside a block.
  norms: tuple[str, str]
  out: str
  mlp: tuple[str, str]
  table: str  # the table of relative positions, V1 only
  position_mlp: str  # the MLP that computes relative positions, V2 only


_TIMM = Names(
  embedding='patch_embed.proj',
  norm='patch_embed.norm',
  downsample='layers.{s}.downsample',
  last_norm='norm',
  block='layers.{s}.blocks.{i}',
  norms=('norm1', 'norm2'),
  out='attn.proj',
  mlp=('mlp.fc1', 'mlp.fc2'),
  table='attn.relative_position_bias_table',
  position_mlp='attn.cpb_mlp',
)
_HF = Names(
  embedding='embeddings.patch_embeddings.projection',
  norm='embeddings.norm',
  downsample='encoder.layers.{s}.downsample',
  last_norm='layernorm',
  block='encoder.layers.{s}.blocks.{i}',
  norms=('layernorm_before', 'layernorm_after'),
  out='attention.output.dense',
  mlp=('intermediate.dense', 'output.dense'),
  table='attention.self.relative_position_bias_table',
  position_mlp='attention.self.continuous_position_bias_mlp',
)
# Names that transformers 5 changed in Swin, besides `rename.TRANSFORMERS_5`.
_NEWER = (
  (r'self\.(relative_position_bias)_table', r'\1.\1_table'),
  (r'attention\.self\.', 'attention.'),
)


def _rules(
  names: Names, stages: list[Stage], into: str, projections: Callable
) -> Table:
  """Makes the rules of everything but the head.

  Args:
    names: the library's names.
    stages: the stages of the model.
    into: our number of the stage that a downsample leads to: '{s+1}' or '{s+2}', where s is
      the number in the file.
    projections: a function of (their name of a block, our name, stage) that returns the rules
      of queries, keys and values.
  """
  down = f'stage{into}_downsample'
  rules = [
    rename.conv(names.embedding, 'stem/embedding'),
    rename.norm(names.norm, 'stem/norm'),
    rename.norm(f'{names.downsample}.norm', f'{down}/norm'),
    rename.dense(f'{names.downsample}.reduction', f'{down}/reduction'),
    rename.norm(names.last_norm, 'norm'),
  ]
  for s, stage in enumerate(stages):
    theirs, ours = names.block.replace('{s}', str(s)), f'stage{s + 1}_block_{{i}}'
    rules += [
      projections(theirs, ours, stage),
      rename.merge_heads(f'{theirs}.{names.out}', f'{ours}/attention/out', stage.heads),
    ]
    for k in range(2):
      rules.append(rename.norm(f'{theirs}.{names.norms[k]}', f'{ours}/norm{k + 1}'))
      rules.append(rename.dense(f'{theirs}.{names.mlp[k]}', f'{ours}/mlp/Dense_{k}'))
    if stage.window is None:
      positions, mlp = f'{ours}/relative_positions', f'{theirs}.{names.position_mlp}'
      rules += [
        rename.dense(f'{mlp}.0', f'{positions}/Dense_0'),
        [Rule(f'{mlp}.2.weight', f'{positions}/Dense_1/kernel', rename.dense_kernel)],
        [
          Rule(
            f'{mlp.rpartition(".")[0]}.logit_scale', f'{ours}{_FACTOR}', rename.factors
          )
        ],
      ]
    else:
      name = f'{theirs}.{names.table}'
      rules.append([Rule(name, f'{ours}{_TABLE}', rename.offsets(stage.window))])
  return table(rules)


def timm(stages: list[Stage], merge_at_end: bool = False) -> Table:
  """Makes the rules of timm's SwinTransformer and SwinTransformerV2.

  Args:
    stages: the stages of the model.
    merge_at_end: whether patch merging has the number of the stage before it (True), as in the
      authors' files, which timm also reads, or that of the stage after it (False).
  """

  def projections(theirs, ours, stage):
    attn, heads = f'{theirs}.attn', stage.heads
    kernels, biases = rename.fuse_heads(f'{attn}.qkv', f'{ours}/attention', heads)
    # Keys have no bias in V2.
    if stage.window is None:
      biases = [
        Rule(
          f'{attn}.{x[0]}_bias', f'{ours}/attention/{x}/bias', rename.heads_bias(heads)
        )
        for x in ('query', 'value')
      ]
    return table(kernels, biases)

  into = '{s+2}' if merge_at_end else '{s+1}'
  head = rename.dense('head.fc', 'head')
  older = respell(head, (r'^head\.fc\.', 'head.'))
  return table(_rules(_TIMM, stages, into, projections), head, older)


def hf(stages: list[Stage], prefix: str) -> Table:
  """Makes the rules of transformers' Swin(v2)ForImageClassification."""

  def projections(theirs, ours, stage):
    return table(
      rename.split_heads(
        f'{theirs}.attention.self.{x}', f'{ours}/attention/{x}', stage.heads
      )
      for x in rename.QKV
    )

  body = nest_rules(_rules(_HF, stages, '{s+2}', projections), prefix)
  newer = respell(
    [rule for rule in body if '.blocks.' in rule.theirs],
    *rename.TRANSFORMERS_5,
    *_NEWER,
  )
  return table(body, newer, rename.dense('classifier', 'head'))


# -- a file's stages ------------------------------------------------------------------


def find_stages(
  arrays: dict[str, np.ndarray], table: str, factor: str, window: Callable
) -> list[Stage]:
  """Finds the stages of a file from the first block of each stage.

  Args:
    arrays: the arrays of the file.
    table: regex for the names of the tables of relative positions (V1). Its group is the
      stage.
    factor: regex for the names of the factors of cosine attention (V2). Its group is the
      stage.
    window: a function of (stage, number of rows of the table) that returns the (h, w) of the
      window.
  """
  stages = {}
  for name, x in arrays.items():
    if x.ndim == 2 and (match := re.fullmatch(table, name)):
      s = int(match[1])
      stages[s] = Stage(x.shape[1], window(s, x.shape[0]))
    elif match := re.fullmatch(factor, name):
      stages[int(match[1])] = Stage(x.size, None)
  return [stages[s] for s in sorted(stages)]


def square_window(s: int, rows: int) -> tuple[int, int]:
  """Returns the square window whose table has the given number of rows."""
  side = (math.isqrt(rows) + 1) // 2
  if (2 * side - 1) ** 2 != rows:
    raise ValueError(
      f'the table of stage {s + 1} has {rows} rows, which fit no square window'
    )
  return side, side


def infer_stages(flat: dict) -> list[Stage]:
  """Infers the stages from parameters under our names."""
  stages = []
  while (key := f'stage{len(stages) + 1}_block_0') + '/norm1/scale' in flat:
    offsets = flat.get(key + _TABLE)
    window = None if offsets is None else tuple((n + 1) // 2 for n in offsets.shape[:2])
    stages.append(Stage(flat[f'{key}/attention/query/kernel'].shape[1], window))
  return stages


# -- the model's fields ---------------------------------------------------------------


def infer(flat: dict) -> dict:
  """Infers the model's fields from its parameters, which do not show V2's windows."""
  stages = infer_stages(flat)
  width = flat['stem/norm/scale'].size
  second = f'stage1_block_0{_FACTOR}' in flat
  return dict(
    version=2 if second else 1,
    width=width,
    depths=rename.count_blocks(flat, 'norm1/scale'),
    num_heads=tuple(stage.heads for stage in stages),
    windows=None if second else tuple(max(stage.window) for stage in stages),
    patch_size=flat['stem/embedding/kernel'].shape[:2],
    mlp_ratio=flat['stage1_block_0/mlp/Dense_0/kernel'].shape[1] / width,
    num_classes=columns(flat, 'head/kernel'),
  )


def _grid(flat: dict, fields: dict) -> tuple[int, int] | None:
  """Returns (h, w) of the last map, which is one window in published models of V1."""
  return infer_stages(flat)[-1].window


# -- configs ---------------------------------------------------------------------------


# Fields that neither timm nor transformers can express, with the value that both assume.
_PLAIN = dict(shift=(0.5,), map_norms=(False,))


def _check_single(fields: dict, format: str, one_window: bool) -> None:
  """Raises ValueError unless patches are square and, with `one_window`, windows are equal."""
  for key in ('patch_size', *(['windows'] if one_window else ())):
    if len(set(fields[key])) > 1:
      raise ValueError(f'{format} takes one number, not {key}={tuple(fields[key])}')


def _shared_arguments(fields: dict) -> dict:
  """Returns the arguments that have the same name in timm and transformers."""
  args = {
    'patch_size': fields['patch_size'][0],
    'embed_dim': fields['width'],
    'depths': list(fields['depths']),
    'num_heads': list(fields['num_heads']),
    'mlp_ratio': fields['mlp_ratio'],
  }
  pretrained = fields['pretrained_windows']
  if fields['version'] == 2 and pretrained:
    args['pretrained_window_sizes'] = list(pretrained)
  return args


def _check_borders(fields: dict, image_size, allowed: tuple[str, ...], format: str):
  """Raises ValueError if the format treats borders differently and outputs would change.

  They do not change if windows tile each map.
  """
  if fields['borders'] in allowed:
    return
  for s, side in enumerate(fields['windows']):
    H, W = maps = _map_size(fields, image_size, s)
    tiles = not H % side and not W % side and min(maps) > side
    if not tiles and not H == W <= side:
      raise ValueError(
        f'{format} cannot express model.borders={fields["borders"]!r}, only {allowed[0]!r}, '
        f'unless windows of {side} tile the map, which is {H}x{W} for '
        f'{image_size[0]}x{image_size[1]} px'
      )


def _map_size(fields: dict, image_size: tuple[int, int], s: int) -> tuple[int, int]:
  """Returns (H, W) of the map in stage s, counted from 0."""
  return tuple(
    -(-n // (p << s)) for n, p in zip(image_size, fields['patch_size'], strict=True)
  )


# timm's names. Some give two windows: that of pre-training and that of the file.
_NAME = r'swin(?:v2)?_.*_window(?:(\d+)to)?(\d+)_\d+'


def _timm_rules(arrays, facts) -> Table:
  sides = facts.fields.get('windows', ())

  def window(s, rows):
    # timm clips a window to the size of the map.
    if facts.image_size and s < len(sides):
      cut = tuple(min(sides[s], -(-n // (4 << s))) for n in facts.image_size)
      if (2 * cut[0] - 1) * (2 * cut[1] - 1) == rows:
        return cut
    return square_window(s, rows)

  name = r'layers\.(\d+)\.blocks\.0\.attn\.'
  stages = find_stages(
    arrays, f'{name}relative_position_bias_table', f'{name}logit_scale', window
  )
  return timm(stages, any(n.startswith('layers.0.downsample.') for n in arrays))


def _windows(args: dict, name: str) -> dict:
  """Reads the window sizes from timm's arguments or, if they are absent, from the name."""
  stages = len(args.get('depths', range(4)))
  old, side = None, args.pop('window_size', None)
  if match := re.match(_NAME, name):
    old, new = match.groups()
    side = side or int(new)
  pretrained = args.pop('pretrained_window_sizes', None)
  if pretrained is None and old:
    pretrained = [*[int(old)] * (stages - 1), int(old) // 2]
  if isinstance(side, list) and name.startswith('swinv2'):
    # For Swin V2, a list is the (h, w) of the windows of all stages.
    side = configs.side(side, 'window_size')
  if side is not None and not isinstance(side, list):
    side = configs.pair(side, 'window_size')[:1] * stages
  fields = {'windows': side}
  fields['pretrained_windows'] = pretrained if any(pretrained or ()) else None
  return {key: tuple(value[:stages]) for key, value in fields.items() if value}


# Arguments of timm's Swin for which only one value is supported.
_ONLY = {
  'global_pool': 'avg',
  'always_partition': False,
  'qkv_bias': True,
  'act_layer': 'gelu',
  'norm_layer': 'layernorm',
}


def _timm_fields(args: dict, name: str) -> dict:
  return {'borders': 'shift_pad', 'act': 'gelu_erf', **_windows(args, name)}


def _timm_config(fields, image_size, class_names) -> dict:
  second, sides = fields['version'] == 2, fields['windows']
  configs.need(fields, 'timm', act=('gelu_erf',), **_PLAIN)
  _check_single(fields, 'timm', one_window=second)
  _check_borders(fields, image_size, ('shift_pad',), 'timm')
  patch = fields['patch_size'][0]
  if any(n % patch for n in image_size):
    raise ValueError(
      f'timm does not pad images, but {image_size} is not a multiple of {patch}'
    )
  window = sides[0] if len(set(sides)) == 1 else list(sides)
  args = {
    'img_size': list(image_size),
    'window_size': window,
    **_shared_arguments(fields),
  }
  name = 'swinv2_tiny_window8_256' if second else 'swin_tiny_patch4_window7_224'
  return configs.timm_config(name, 'avg', args, fields, image_size, class_names)


def _hf_rules(arrays, facts) -> Table:
  name = r'(?:swin(?:v2)?\.)?encoder\.layers\.(\d+)\.blocks\.0\.attention\.'
  stages = find_stages(
    arrays,
    rf'{name}(?:self|relative_position_bias)\.relative_position_bias_table',
    rf'{name}(?:self\.)?logit_scale',
    square_window,
  )
  first = next((n for n in arrays if 'encoder.layers.' in n), '')
  return hf(stages, first.partition('encoder.')[0])


def _hf_facts(config: dict, source: str) -> configs.Facts:
  model_type = config.get('model_type', 'swin')
  if model_type not in ('swin', 'swinv2'):
    model_type = 'swin'  # configs.hf raises an error that names the type
  facts = configs.hf(model_type)(config, source)
  # Some norms in transformers use 1e-5 whatever the config says, so require that value.
  configs.require(config, {'layer_norm_eps': 1e-5}, 'a Swin')
  stages = len(config.get('depths', range(4)))
  fields = {'act': facts.fields['act'], 'borders': 'pad_shift'}
  if model_type == 'swinv2':
    fields['borders'] = 'pad_shift_twice'
  if 'window_size' in config:
    fields['windows'] = configs.pair(config['window_size'], 'window_size')[:1] * stages
  if any(pretrained := config.get('pretrained_window_sizes', ())):
    fields['pretrained_windows'] = tuple(pretrained[:stages])
  return facts._replace(fields=fields)


def _hf_config(fields, image_size, class_names) -> dict:
  configs.need(fields, 'transformers', **_PLAIN)
  _check_single(fields, 'transformers', one_window=True)
  second, side = fields['version'] == 2, fields['windows'][0]
  borders = ('pad_shift', 'pad_shift_twice')
  _check_borders(fields, image_size, borders, 'transformers')
  for s in range(len(fields['depths'])):
    H, W = _map_size(fields, image_size, s)
    if min(H, W) < side and not (second and H == W):
      raise ValueError(
        f'transformers does not clip windows of {side}, but the map of stage {s + 1} has only '
        f'{H}x{W} positions for {image_size[0]}x{image_size[1]} px'
      )
  args = {
    **_shared_arguments(fields),
    'window_size': side,
    'qkv_bias': True,
    'use_absolute_embeddings': False,
    'layer_norm_eps': 1e-5,
    'drop_path_rate': fields['stochastic_depth'],
  }
  name, model_type = 'Swinv2' if second else 'Swin', 'swinv2' if second else 'swin'
  return configs.hf_config(name, model_type, args, fields, image_size, class_names)


def _hf_write_rules(flat, fields) -> Table:
  stages = infer_stages(flat)
  return hf(stages, 'swinv2.' if stages[0].window is None else 'swin.')


def _index_tables(flat: dict, fields: dict) -> dict[str, np.ndarray]:
  """Makes `relative_position_index`, which V1 files on the hub contain.

  It gives the row of the table for a query and a key.
  """
  arrays, depths = {}, rename.count_blocks(flat, 'norm1/scale')
  for s, (stage, depth) in enumerate(zip(infer_stages(flat), depths, strict=True)):
    if stage.window is None:
      return {}
    h, w = stage.window
    y, x = (n.ravel() for n in np.indices((h, w)))
    index = (y[:, None] - y + h - 1) * (2 * w - 1) + x[:, None] - x + w - 1
    for i in range(depth):
      name = f'swin.encoder.layers.{s}.blocks.{i}.attention.self'
      arrays[f'{name}.relative_position_index'] = index
  return arrays


_format = functools.partial(Format, family='swin', infer=infer, grid=_grid)
_writer = functools.partial(Writer, alike=('borders', 'mlp_ratio'))
FORMATS = (
  _format(
    name='timm',
    marker=r'layers\.0\.blocks\.0\.attn\.(relative_position_bias_table|logit_scale)',
    rules=_timm_rules,
    facts=configs.timm(_timm_fields, **_ONLY),
    writer=_writer(
      config=_timm_config, rules=lambda flat, fields: timm(infer_stages(flat))
    ),
  ),
  _format(
    name='hf',
    marker=r'(swin(v2)?\.)?encoder\.layers\.0\.blocks\.0\.attention\..*'
    r'(relative_position_bias_table|logit_scale)',
    rules=_hf_rules,
    facts=_hf_facts,
    writer=_writer(config=_hf_config, rules=_hf_write_rules, buffers=_index_tables),
  ),
)
