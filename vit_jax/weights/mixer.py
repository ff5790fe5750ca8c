"""MLP-Mixer: rename tables of the published formats, and what a file tells."""

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import transforms as t
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
      raise UserError(f'The file lacks {name} of {ndim} dimensions: it is no Mixer.')
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


def image_size(flat: dict[str, np.ndarray], fields: dict) -> tuple[int, int] | None:
  """Returns (H, W) in pixels; a Mixer takes one number of patches only."""
  tokens = flat['MixerBlock_0/token_mixing/Dense_0/kernel'].shape[0]
  side = int(np.sqrt(tokens))
  if side * side != tokens:
    return None
  return side * fields['patch_size'][0], side * fields['patch_size'][1]
