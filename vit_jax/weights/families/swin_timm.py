"""Swin, both versions, in timm's format."""

import re

from vit_jax.weights import config_writers, configs, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.families import swin
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule, Table, respelled, table

_NAME = r'swin(?:v2)?_.*_window(?:(\d+)to)?(\d+)_\d+'
_BLOCK = swin.Names(
  norms=('norm1', 'norm2'),
  out='attn.proj',
  mlp=('mlp.fc1', 'mlp.fc2'),
  table='attn.relative_position_bias_table',
  position_mlp='attn.cpb_mlp',
)


def timm(stages: list[swin.Stage], merge_at_end: bool = False) -> Table:
  """timm's SwinTransformer and SwinTransformerV2.

  Args:
    merge_at_end: whether a merging has the number of the stage that it follows, as in
      the authors' files, which timm reads, and not of the one that it leads to.
  """
  rest = swin.around(
    'patch_embed.proj',
    'patch_embed.norm',
    'layers.{s}.downsample',
    '{s+2}' if merge_at_end else '{s+1}',
    'norm',
    'head.fc',
  )
  return table(
    rest,
    respelled(rest, (r'^head\.fc\.', 'head.')),
    [_stage(s, stage) for s, stage in enumerate(stages)],
  )


def _stage(s: int, stage: swin.Stage) -> Table:
  theirs, ours = f'layers.{s}.blocks.{{i}}', f'stage{s + 1}_block_{{i}}'
  kernels, biases = layers.fused(f'{theirs}.attn.qkv', f'{ours}/attention', stage.heads)
  if stage.window is None:  # keys have no bias
    bias = t.heads_bias(stage.heads)
    biases = [
      Rule(f'{theirs}.attn.{x[0]}_bias', f'{ours}/attention/{x}/bias', bias)
      for x in ('query', 'value')
    ]
  return table(swin.block(theirs, ours, stage, _BLOCK), kernels, biases)


def _rules(arrays, facts) -> Table:
  sides = facts.fields.get('windows', ())

  def window(s, rows):
    if facts.image_size and s < len(sides):  # as timm cuts windows to the map's size
      cut = tuple(min(sides[s], -(-n // (4 << s))) for n in facts.image_size)
      if (2 * cut[0] - 1) * (2 * cut[1] - 1) == rows:
        return cut
    return swin.square(s, rows)

  name = r'layers\.(\d+)\.blocks\.0\.attn\.'
  stages = swin.stages_of(
    arrays, f'{name}relative_position_bias_table', f'{name}logit_scale', window
  )
  return timm(stages, any(n.startswith('layers.0.downsample.') for n in arrays))


def _windows(config: dict, name: str) -> dict:
  """Returns the fields of windows that a config or a name tells."""
  args = config.get('model_args', {})
  stages = len(args.get('depths', range(4)))
  old, side = None, args.get('window_size')
  if match := re.match(_NAME, name):
    old, new = match.groups()
    side = side or int(new)
  pretrained = args.get('pretrained_window_sizes')
  if pretrained is None and old:
    pretrained = [*[int(old)] * (stages - 1), int(old) // 2]
  if isinstance(side, list) and name.startswith('swinv2'):  # (h, w) of all stages
    if len(set(side)) > 1:
      raise ValueError(f'window_size {side}: windows that are not square')
    side = side[0]
  if side is not None and not isinstance(side, list):
    side = (configs.pair(side, 'window_size')[0],) * stages
  fields = {'windows': side}
  fields['pretrained_windows'] = pretrained if any(pretrained or ()) else None
  return {key: tuple(value[:stages]) for key, value in fields.items() if value}


def _fields(config: dict, name: str) -> dict:
  args = {
    'global_pool': config.get('global_pool', 'avg'),
    **config.get('model_args', {}),
  }
  expected = {'always_partition': False, 'global_pool': 'avg'}
  configs.require(args, expected, 'a Swin of timm')
  return {'borders': 'shift_pad', 'act': 'gelu_erf', **_windows(config, name)}


def _config(fields, image_size, class_names) -> dict:
  swin.check_plain(fields, 'timm')
  config_writers.need(fields, 'act', ('gelu_erf',), 'timm', 'its Swin has no other')
  swin.check_borders(fields, image_size, ('shift_pad',), 'timm')
  second, sides = fields['version'] == 2, fields['windows']
  if second:
    swin.check_one_window(fields, 'timm')
  patch = fields['patch_size'][0]
  if any(n % patch for n in image_size):
    raise ValueError(
      f'timm does not pad images: {image_size} is not a multiple of {patch}'
    )
  args = {
    'img_size': list(image_size),
    'patch_size': patch,
    'window_size': sides[0] if len(set(sides)) == 1 else list(sides),
    'embed_dim': fields['width'],
    'depths': list(fields['depths']),
    'num_heads': list(fields['num_heads']),
    'mlp_ratio': fields['mlp_ratio'],
  }
  if second and fields['pretrained_windows']:
    args['pretrained_window_sizes'] = list(fields['pretrained_windows'])
  name = 'swinv2_tiny_window8_256' if second else 'swin_tiny_patch4_window7_224'
  return config_writers.timm(name, 'avg', args, fields, image_size, class_names)


FORMATS = (
  Format(
    'timm',
    'swin',
    r'layers\.0\.blocks\.0\.attn\.(relative_position_bias_table|logit_scale)',
    _rules,
    swin.infer,
    configs.timm(_fields),
    grid=swin.grid,
    config=_config,
    write_rules=lambda flat, fields: timm(swin.our_stages(flat)),
  ),
)
