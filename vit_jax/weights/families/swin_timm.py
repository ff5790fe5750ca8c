"""Swin, both versions, in timm's format."""

import re
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.weights import export, hints, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.families import swin
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

_NAME = r'swin(?:v2)?_.*_window(?:(\d+)to)?(\d+)_\d+'


def timm(stages: list[swin.Stage], merge_at_end: bool = False) -> tuple[Rule, ...]:
  """timm's SwinTransformer and SwinTransformerV2.

  Args:
    merge_at_end: whether a merging has the number of the stage that it follows, as in
      the authors' files, which timm reads, and not of the one that it leads to.
  """
  return (
    *layers.pair('patch_embed.proj', 'stem/embedding', t.conv),
    *layers.norm('patch_embed.norm', 'stem/norm'),
    *(rule for s, stage in enumerate(stages) for rule in _stage(s, stage)),
    *(
      rule
      for s in range(1, len(stages))
      for rule in swin.merging(
        f'layers.{s - merge_at_end}.downsample', f'stage{s + 1}_downsample'
      )
    ),
    *layers.norm('norm', 'norm'),
    *layers.pair('head.fc', 'head'),
    *(rule._replace(only_load=True) for rule in layers.pair('head', 'head')),
  )


def _stage(s: int, stage: swin.Stage) -> tuple[Rule, ...]:
  theirs, ours = f'layers.{s}.blocks.{{i}}', f'stage{s + 1}_block_{{i}}'
  attn, attention = f'{theirs}.attn', f'{ours}/attention'
  rules = [
    *layers.norm(f'{theirs}.norm1', f'{ours}/norm1'),
    *layers.norm(f'{theirs}.norm2', f'{ours}/norm2'),
    *layers.pair(f'{attn}.proj', f'{attention}/out', t.out_kernel),
    *layers.pair(f'{theirs}.mlp.fc1', f'{ours}/mlp/Dense_0'),
    *layers.pair(f'{theirs}.mlp.fc2', f'{ours}/mlp/Dense_1'),
    *swin.table(f'{attn}.relative_position_bias_table', ours, stage),
  ]
  kernels, biases = layers.fused(f'{attn}.qkv', attention, ('query', 'key', 'value'))
  if stage.window is None:
    rules += [
      kernels,
      Rule(f'{attn}.q_bias', f'{attention}/query/bias', t.heads_bias),
      Rule(f'{attn}.v_bias', f'{attention}/value/bias', t.heads_bias),
      *swin.position_mlp(f'{attn}.cpb_mlp', ours),
    ]
  else:
    rules += [kernels, biases]
  return swin.rules_of(stage, rules)


def _rules(arrays, config) -> tuple[Rule, ...]:
  size = hints.timm()(config, '').image_size

  def window(s, rows):
    sides = _told(config, '').get('windows', ())
    if size and s < len(sides):  # as timm cuts windows to the size of the map
      cut = tuple(min(sides[s], -(-n // (4 << s))) for n in size)
      if (2 * cut[0] - 1) * (2 * cut[1] - 1) == rows:
        return cut
    return swin.square(s, rows)

  name = r'layers\.(\d+)\.blocks\.0\.attn\.'
  stages = swin.stages_of(
    arrays, f'{name}relative_position_bias_table', f'{name}logit_scale', window
  )
  return timm(stages, any(n.startswith('layers.0.downsample.') for n in arrays))


def _told(config: dict, where: str) -> dict:
  """Returns {'windows', 'pretrained_windows'}, as far as a config or a name tells them."""
  args = config.get('model_args', {})
  name = config.get('architecture') or Path(where).name
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
      raise UserError(f'{where}: window_size {side}: windows that are not square.')
    side = side[0]
  told = {'windows': (side,) * stages if isinstance(side, int) else side}
  told['pretrained_windows'] = pretrained if any(pretrained or ()) else None
  return {key: tuple(value[:stages]) for key, value in told.items() if value}


def _fields(config: dict, where: str) -> dict:
  args = config.get('model_args', {})
  for key, allowed in (('always_partition', (False,)), ('global_pool', ('avg',))):
    value = args.get(key, config.get(key, allowed[0]))
    if value not in allowed:
      raise UserError(f'{where}: a Swin of timm with {key}={value!r} is not read.')
  return {'borders': 'shift_pad', 'act': 'gelu_erf', **_told(config, where)}


def _config(fields, image_size, class_names) -> dict:
  swin.check_plain(fields, 'timm')
  export.need(fields, 'act', ('gelu_erf',), 'timm', 'its Swin has no other')
  swin.check_borders(fields, image_size, ('shift_pad',), 'timm')
  second, sides = fields['version'] == 2, fields['windows']
  if second:
    swin.check_one_window(fields, 'timm')
  patch = fields['patch_size'][0]
  if any(n % patch for n in image_size):
    raise UserError(
      f'timm does not pad images: {image_size} is not a multiple of {patch}.'
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
  return export.timm_config(name, 'avg', args, fields, image_size, class_names)


FORMATS = (
  Format(
    'timm',
    'swin',
    r'layers\.0\.blocks\.0\.attn\.(relative_position_bias_table|logit_scale)',
    _rules,
    swin.infer,
    hints.timm(_fields),
    grid=swin.grid,
    to='timm',
    write_config=_config,
    write_rules=lambda flat: timm(swin.our_stages(flat)),
  ),
)
