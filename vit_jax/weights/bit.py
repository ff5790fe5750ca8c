"""BiT ResNets: rename tables of the published formats, and what a file tells."""

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import transforms as t
from vit_jax.weights.rename import Rule
from vit_jax.weights.vit import GOOGLE as _VIT
from vit_jax.weights.vit import resnet_blocks

# Post-activation, as big_vision's `bit`: the tree of a hybrid's ResNet, and a head.
POST_ACTIVATION = tuple(
  rule
  for rule in _VIT
  if rule.theirs.startswith(('conv_root', 'gn_root', 'block{', 'head/'))
)

_UNIT, _STAGE = 'block{s+1}/unit{u+01}', 'stages.{s}.blocks.{u}'
_CONV = 'standardized_conv2d'

# Pre-activation, the published BiT. TensorFlow's file numbers some convolutions.
TF = (
  Rule(f'resnet/{{rest}}/{_CONV}/kernel', f'{{rest}}/{_CONV}/kernel'),
  Rule(
    f'resnet/{{rest}}/{_CONV}_{{n}}/kernel', f'{{rest}}/{_CONV}/kernel', t.same, True
  ),
  Rule('resnet/{rest}/group_norm/gamma', '{rest}/group_norm/scale', t.group_norm),
  Rule('resnet/{rest}/group_norm/beta', '{rest}/group_norm/bias', t.group_norm),
  Rule('resnet/group_norm/gamma', 'group_norm/scale', t.group_norm),
  Rule('resnet/group_norm/beta', 'group_norm/bias', t.group_norm),
  Rule('resnet/head/conv2d/{rest}', 'head/conv2d/{rest}'),
)

TIMM = (
  Rule('stem.conv.weight', f'root_block/{_CONV}/kernel', t.conv),
  Rule(f'{_STAGE}.downsample.conv.weight', f'{_UNIT}/a/proj/{_CONV}/kernel', t.conv),
  *(
    rule
    for k, part in ((1, 'a'), (2, 'b'), (3, 'c'))
    for rule in (
      Rule(f'{_STAGE}.conv{k}.weight', f'{_UNIT}/{part}/{_CONV}/kernel', t.conv),
      Rule(f'{_STAGE}.norm{k}.weight', f'{_UNIT}/{part}/group_norm/scale'),
      Rule(f'{_STAGE}.norm{k}.bias', f'{_UNIT}/{part}/group_norm/bias'),
    )
  ),
  Rule('norm.weight', 'group_norm/scale'),
  Rule('norm.bias', 'group_norm/bias'),
  Rule('head.fc.weight', 'head/conv2d/kernel', t.conv),
  Rule('head.fc.bias', 'head/conv2d/bias'),
)


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the fields of a BiT, pre- or post-activation, that its parameters tell.

  Raises:
    UserError: if its root is missing.
  """
  for root in ('conv_root/kernel', f'root_block/{_CONV}/kernel'):
    if root in flat and flat[root].ndim == 4:
      break
  else:
    raise UserError('The file lacks the root convolution of a ResNet: it is no BiT.')
  head = flat.get('head/kernel', flat.get('head/conv2d/kernel'))
  return dict(
    blocks=resnet_blocks(flat),
    width=flat[root].shape[-1],
    num_classes=None if head is None else head.shape[-1],
  )


def image_size(flat: dict[str, np.ndarray], fields: dict) -> None:
  """Returns None: a convolutional network takes any size."""
