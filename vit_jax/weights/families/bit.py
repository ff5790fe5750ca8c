"""ResNets with GroupNorm: BiT, which is pre-activation, and big_vision's ResNet."""

from vit_jax.weights import configs, rename
from vit_jax.weights.families.vit import RESNET, columns, resnet_blocks
from vit_jax.weights.formats import Format, Writer
from vit_jax.weights.rename import Rule, table

_UNIT, _STAGE = 'block{s+1}/unit{u+01}', 'stages.{s}.blocks.{u}'
_CONV, _PARTS = 'standardized_conv2d', ((1, 'a'), (2, 'b'), (3, 'c'))

# The published TensorFlow files add a number to the names of some convolutions.
TF = table(
  Rule(f'resnet/{{rest}}/{_CONV}/kernel', f'{{rest}}/{_CONV}/kernel'),
  Rule(
    f'resnet/{{rest}}/{_CONV}_{{n}}/kernel',
    f'{{rest}}/{_CONV}/kernel',
    rename.same,
    True,
  ),
  [
    Rule(
      f'resnet/{at}group_norm/{theirs}',
      f'{at}group_norm/{ours}',
      rename.group_norm_vector,
    )
    for at in ('{rest}/', '')
    for theirs, ours in (('gamma', 'scale'), ('beta', 'bias'))
  ],
  Rule('resnet/head/conv2d/{rest}', 'head/conv2d/{rest}'),
)

TIMM = table(
  rename.conv('stem.conv', f'root_block/{_CONV}'),
  rename.conv(f'{_STAGE}.downsample.conv', f'{_UNIT}/a/proj/{_CONV}'),
  [rename.conv(f'{_STAGE}.conv{k}', f'{_UNIT}/{x}/{_CONV}') for k, x in _PARTS],
  [rename.norm(f'{_STAGE}.norm{k}', f'{_UNIT}/{x}/group_norm') for k, x in _PARTS],
  rename.norm('norm', 'group_norm'),
  rename.conv('head.fc', 'head/conv2d'),
)


def _infer(root: str, head: str):
  """Makes the function `infer`, given the names of the first kernel and the head's kernel."""
  return lambda flat: dict(
    blocks=resnet_blocks(flat),
    width=columns(flat, root),
    num_classes=columns(flat, head),
  )


infer = _infer(f'root_block/{_CONV}/kernel', 'head/conv2d/kernel')

# (blocks, width) -> timm's name. timm has one function per shape.
_TIMM_NAMES = {
  ((3, 4, 6, 3), 64): 'resnetv2_50x1_bit',
  ((3, 4, 6, 3), 192): 'resnetv2_50x3_bit',
  ((3, 4, 23, 3), 64): 'resnetv2_101x1_bit',
  ((3, 4, 23, 3), 192): 'resnetv2_101x3_bit',
  ((3, 8, 36, 3), 128): 'resnetv2_152x2_bit',
  ((3, 8, 36, 3), 256): 'resnetv2_152x4_bit',
}


def _timm_config(fields, image_size, class_names) -> dict:
  configs.need(fields, 'timm', zero_pad_pool=(True,))
  blocks, width = tuple(fields['blocks']), fields['width']
  if (architecture := _TIMM_NAMES.get((blocks, width))) is None:
    names = list(_TIMM_NAMES.values())
    raise ValueError(f'timm has no BiT with {blocks=}, {width=}, only {names}')
  return configs.timm_config(architecture, 'avg', {}, fields, image_size, class_names)


FORMATS = (
  Format(
    name='bit',
    family='bit',
    marker=r'resnet/root_block/.+',
    facts=configs.google(),
    rules=TF,
    infer=infer,
    writer=Writer(config=configs.google_config(zero_pad_pool=True)),
  ),
  Format(
    name='timm',
    family='bit',
    marker=r'stem\.conv\.weight',
    facts=configs.timm(
      global_pool='avg', output_stride=32, avg_down=False, preact=True
    ),
    rules=TIMM,
    infer=infer,
    writer=Writer(config=_timm_config),
  ),
  Format(
    name='big_vision',
    family='resnet_gn',
    marker=r'conv_root/kernel',
    facts=configs.google(),
    rules=RESNET,
    infer=_infer('conv_root/kernel', 'head/kernel'),
    writer=Writer(config=configs.google_config()),
  ),
)
