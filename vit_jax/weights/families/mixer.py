"""MLP-Mixer in the published formats."""

import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import export, hints
from vit_jax.weights import transforms as t
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

_BLOCK = 'MixerBlock_{i}'
_DENSE = {'fc1': 'Dense_0', 'fc2': 'Dense_1'}

GOOGLE = tuple(
  Rule(name, name)
  for name in (
    'stem/{rest}',
    f'{_BLOCK}/{{rest}}',
    'pre_head_layer_norm/{rest}',
    'head/{rest}',
  )
)

_NORMS = {
  'blocks.{i}.norm1': f'{_BLOCK}/LayerNorm_0',
  'blocks.{i}.norm2': f'{_BLOCK}/LayerNorm_1',
  'norm': 'pre_head_layer_norm',
}
_MLPS = {
  f'blocks.{{i}}.mlp_{theirs}.{fc}': f'{_BLOCK}/{ours}/{dense}'
  for theirs, ours in (('tokens', 'token_mixing'), ('channels', 'channel_mixing'))
  for fc, dense in _DENSE.items()
}
TIMM = (
  Rule('stem.proj.weight', 'stem/kernel', t.conv),
  Rule('stem.proj.bias', 'stem/bias'),
  *(Rule(f'{a}.weight', f'{b}/scale') for a, b in _NORMS.items()),
  *(Rule(f'{a}.weight', f'{b}/kernel', t.dense) for a, b in _MLPS.items()),
  *(Rule(f'{a}.bias', f'{b}/bias') for a, b in (_NORMS | _MLPS).items()),
  Rule('head.weight', 'head/kernel', t.dense),
  Rule('head.bias', 'head/bias'),
)


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters tell.

  Raises:
    UserError: if a Mixer's parts are missing.
  """

  def shape(name, ndim):
    if name not in flat or flat[name].ndim != ndim:
      raise UserError(
        f'The file lacks {name} of {ndim} dimensions, which every Mixer has.'
      )
    return flat[name].shape

  stem = shape('stem/kernel', 4)
  return dict(
    patch_size=stem[:2],
    width=stem[3],
    depth=len({n.split('/')[0] for n in flat if n.startswith('MixerBlock_')}),
    tokens_mlp_dim=shape('MixerBlock_0/token_mixing/Dense_0/kernel', 2)[1],
    channels_mlp_dim=shape('MixerBlock_0/channel_mixing/Dense_0/kernel', 2)[1],
    num_classes=shape('head/kernel', 2)[1] if 'head/kernel' in flat else None,
  )


def grid(flat: dict[str, np.ndarray], fields: dict) -> tuple[int, int] | None:
  """Returns (h, w) of the patches: a Mixer takes one number of them only."""
  tokens = flat['MixerBlock_0/token_mixing/Dense_0/kernel'].shape[0]
  side = math.isqrt(tokens)
  return (side, side) if side * side == tokens else None


_TIMM_SHAPES = {
  (512, 8, 0.5, 4.0): 's',
  (768, 12, 0.5, 4.0): 'b',
  (1024, 24, 0.5, 4.0): 'l',
}
_TIMM_NAMES = [f'mixer_{size}{patch}_224' for size in 'sbl' for patch in (16, 32)]


def _timm_config(fields, image_size, class_names) -> dict:
  why = 'its Mixer has the erf form, and another GELU changes the logits'
  export.need(fields, 'act', ('gelu_erf',), 'timm', why)
  args = export.timm_transformer(fields, image_size)
  args['num_blocks'] = fields['depth']
  args['mlp_ratio'] = [
    export.timm_ratio(fields[k], fields['width'])
    for k in ('tokens_mlp_dim', 'channels_mlp_dim')
  ]
  shape = (args['embed_dim'], fields['depth'], *args['mlp_ratio'])
  architecture = f'mixer_{_TIMM_SHAPES.get(shape)}{args["patch_size"]}_224'
  if architecture in _TIMM_NAMES:
    # These functions fix the shape, and fail where it is given again.
    args = {'img_size': args['img_size']}
  else:  # only timm.models.MlpMixer(**model_args) builds it
    architecture = 'mixer_s16_224'
  return export.timm_config(architecture, 'avg', args, fields, image_size, class_names)


def _timm_fields(config: dict, where: str) -> dict:
  act = config.get('model_args', {}).get('act_layer', 'gelu')
  return {'act': hints.activation(act, where)}


FORMATS = (
  Format(
    'google',
    'mixer',
    r'MixerBlock(_0)?/.+',
    lambda arrays, config: GOOGLE,
    infer,
    hints.google(act='gelu_tanh'),
    grid=grid,
    to='google',
    write_config=export.google_config(act='gelu_tanh'),
  ),
  Format(
    'timm',
    'mixer',
    r'blocks\.0\.mlp_tokens\..+',
    lambda arrays, config: TIMM,
    infer,
    hints.timm(_timm_fields),
    grid=grid,
    to='timm',
    write_config=_timm_config,
  ),
)
