"""MLP-Mixer in the published formats."""

import functools
import math

from vit_jax.weights import configs, rename
from vit_jax.weights.families.vit import columns
from vit_jax.weights.formats import Format, Writer
from vit_jax.weights.rename import Rule, table

_BLOCK = 'MixerBlock_{i}'

GOOGLE = tuple(
  Rule(name, name)
  for name in (
    'stem/{rest}',
    f'{_BLOCK}/{{rest}}',
    'pre_head_layer_norm/{rest}',
    'head/{rest}',
  )
)

TIMM = table(
  rename.conv('stem.proj', 'stem'),
  rename.norm('blocks.{i}.norm1', f'{_BLOCK}/LayerNorm_0'),
  rename.norm('blocks.{i}.norm2', f'{_BLOCK}/LayerNorm_1'),
  [
    rename.dense(f'blocks.{{i}}.mlp_{theirs}.fc{k + 1}', f'{_BLOCK}/{ours}/Dense_{k}')
    for theirs, ours in (('tokens', 'token_mixing'), ('channels', 'channel_mixing'))
    for k in range(2)
  ],
  rename.norm('norm', 'pre_head_layer_norm'),
  rename.dense('head', 'head'),
)


def infer(flat: dict) -> dict:
  """Infers patch size, width, depth and the sizes of the MLPs from the parameters."""
  *patch_size, _, width = flat['stem/kernel'].shape
  return dict(
    patch_size=tuple(patch_size),
    width=width,
    depth=len({n.split('/')[0] for n in flat if n.startswith('MixerBlock_')}),
    tokens_mlp_dim=columns(flat, 'MixerBlock_0/token_mixing/Dense_0/kernel'),
    channels_mlp_dim=columns(flat, 'MixerBlock_0/channel_mixing/Dense_0/kernel'),
    num_classes=columns(flat, 'head/kernel'),
  )


def _grid(flat: dict, fields: dict) -> tuple[int, int] | None:
  """Returns the grid (h, w) of patches, whose number a Mixer fixes.

  Returns None if that number is not a square number.
  """
  tokens = flat['MixerBlock_0/token_mixing/Dense_0/kernel'].shape[0]
  side = math.isqrt(tokens)
  return (side, side) if side * side == tokens else None


_TIMM_SHAPES = {(512, 8): 's', (768, 12): 'b', (1024, 24): 'l'}
_TIMM_NAMES = [f'mixer_{size}{patch}_224' for size in 'sbl' for patch in (16, 32)]


def _timm_config(fields, image_size, class_names) -> dict:
  configs.need(fields, 'timm', act=('gelu_erf',))
  args = configs.timm_patches(fields, image_size)
  args['num_blocks'] = fields['depth']
  args['mlp_ratio'] = [
    configs.timm_ratio(fields[k], fields['width'])
    for k in ('tokens_mlp_dim', 'channels_mlp_dim')
  ]
  size = _TIMM_SHAPES.get((fields['width'], fields['depth']))
  architecture = f'mixer_{size}{args["patch_size"]}_224'
  if architecture in _TIMM_NAMES and args['mlp_ratio'] == [0.5, 4.0]:
    # timm's function fixes the shape, and fails if an argument repeats it.
    args = {'img_size': args['img_size']}
  else:
    # No function of timm builds this shape: use timm.models.MlpMixer(**model_args).
    architecture = 'mixer_s16_224'
  return configs.timm_config(architecture, 'avg', args, fields, image_size, class_names)


_format = functools.partial(Format, family='mixer', infer=infer, grid=_grid)
FORMATS = (
  _format(
    name='google',
    marker=r'MixerBlock(_0)?/.+',
    rules=GOOGLE,
    facts=configs.google(act='gelu_tanh'),
    writer=Writer(config=configs.google_config(act='gelu_tanh')),
  ),
  _format(
    name='timm',
    marker=r'blocks\.0\.mlp_tokens\..+',
    rules=TIMM,
    facts=configs.timm(configs.timm_act, global_pool='avg', stem_norm=False),
    writer=Writer(config=_timm_config),
  ),
)
