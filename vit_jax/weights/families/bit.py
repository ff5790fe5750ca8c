"""The published BiT, pre-activation, in its formats."""

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import export, hints
from vit_jax.weights import transforms as t
from vit_jax.weights.families.vit import resnet_blocks
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

_UNIT, _STAGE = 'block{s+1}/unit{u+01}', 'stages.{s}.blocks.{u}'
_CONV = 'standardized_conv2d'

# TensorFlow's file numbers some convolutions.
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
  """Returns the model's fields that its parameters tell.

  Raises:
    UserError: if its root is missing.
  """
  root = f'root_block/{_CONV}/kernel'
  if root not in flat or flat[root].ndim != 4:
    raise UserError(f'The file lacks {root} of 4 dimensions, which every BiT has.')
  head = flat.get('head/conv2d/kernel')
  return dict(
    blocks=resnet_blocks(flat),
    width=flat[root].shape[-1],
    num_classes=None if head is None else head.shape[-1],
  )


# timm's BiTs are functions, one per shape.
_TIMM_NAMES = {
  ((3, 4, 6, 3), 64): 'resnetv2_50x1_bit',
  ((3, 4, 6, 3), 192): 'resnetv2_50x3_bit',
  ((3, 4, 23, 3), 64): 'resnetv2_101x1_bit',
  ((3, 4, 23, 3), 192): 'resnetv2_101x3_bit',
  ((3, 8, 36, 3), 128): 'resnetv2_152x2_bit',
  ((3, 8, 36, 3), 256): 'resnetv2_152x4_bit',
}


def _timm_config(fields, image_size, class_names) -> dict:
  why = 'its BiT pads what the first pool reads with zeros'
  export.need(fields, 'zero_pad_pool', (True,), 'timm', why)
  architecture = _TIMM_NAMES.get((tuple(fields['blocks']), fields['width']))
  if architecture is None:
    raise UserError(
      f'timm has no BiT with blocks={tuple(fields["blocks"])} and '
      f'width={fields["width"]}; it has {list(_TIMM_NAMES.values())}.'
    )
  return export.timm_config(architecture, 'avg', {}, fields, image_size, class_names)


FORMATS = (
  Format(
    'bit',
    'bit',
    r'resnet/root_block/.+',
    lambda arrays, config: TF,
    infer,
    hints.google(),
    to='google',
    write_config=export.google_config(zero_pad_pool=True),
  ),
  Format(
    'timm',
    'bit',
    r'stem\.conv\.weight',
    lambda arrays, config: TIMM,
    infer,
    hints.timm(),
    to='timm',
    write_config=_timm_config,
  ),
)
