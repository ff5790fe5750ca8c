"""ResNet with BatchNorm, in the formats of timm (and torchvision) and of transformers."""

import functools
from collections.abc import Callable

import numpy as np

from vit_jax.weights import configs, layers, rename
from vit_jax.weights.families.vit import columns
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Table, below, table, with_bare

_BLOCK, _TIMM = 'stage{s+1}_block_{i}', 'layer{s+1}.{i}'

TIMM = table(
  layers.conv('conv1', 'stem/conv'),
  layers.batch_norm('bn1', 'stem/norm'),
  [layers.conv(f'{_TIMM}.conv{k}', f'{_BLOCK}/conv{k}') for k in (1, 2, 3)],
  [layers.batch_norm(f'{_TIMM}.bn{k}', f'{_BLOCK}/norm{k}') for k in (1, 2, 3)],
  layers.conv(f'{_TIMM}.downsample.0', f'{_BLOCK}/conv_proj'),
  layers.batch_norm(f'{_TIMM}.downsample.1', f'{_BLOCK}/norm_proj'),
  layers.dense('fc', 'head'),
)


_STEM, _LAYER = 'embedder.embedder', 'encoder.stages.{s}.layers.{i}'
_PARTS = *((f'layer.{k}', k + 1) for k in range(3)), ('shortcut', '_proj')
# transformers' bare model, which is also the backbone of its DETR, and the classifier.
HF_BARE = table(
  layers.conv(f'{_STEM}.convolution', 'stem/conv'),
  layers.batch_norm(f'{_STEM}.normalization', 'stem/norm'),
  [layers.conv(f'{_LAYER}.{x}.convolution', f'{_BLOCK}/conv{k}') for x, k in _PARTS],
  [
    layers.batch_norm(f'{_LAYER}.{x}.normalization', f'{_BLOCK}/norm{k}')
    for x, k in _PARTS
  ],
)
HF = table(below(HF_BARE, 'resnet.'), layers.dense('classifier.1', 'head'))


def infer(flat: dict) -> dict:
  """Returns the model's fields that its parameters determine; no array shows dilation."""
  depths = layers.depths(flat, 'conv3/kernel')
  numbers = range(1, len(depths) + 1)
  return dict(
    depths=depths,
    widths=tuple(flat[f'stage{s}_block_0/conv3/kernel'].shape[3] for s in numbers),
    stem_width=flat['stem/conv/kernel'].shape[3],
    output_stride=max(32, 2 << len(numbers)),
    num_classes=columns(flat, 'head/kernel'),
  )


def _counts(rules: Table) -> Callable[[dict], dict]:
  """Returns the writer of PyTorch's counts of batches, which stand beside statistics."""

  def buffers(flat, fields):
    names = rename.to_theirs(
      {n: x for n, x in flat.items() if n.endswith('/mean')}, rules
    )
    zero = np.zeros((), np.int64)
    return {n.replace('running_mean', 'num_batches_tracked'): zero for n in names}

  return buffers


def _timm_fields(args: dict, name: str) -> dict:
  return {k: args.pop(k) for k in ('output_stride',) if k in args}


def _timm_config(fields, image_size, class_names) -> dict:
  configs.need(fields, 'timm', stem_width=(64,))
  if len(fields['depths']) != 4:
    raise ValueError(f'a ResNet of timm has 4 stages, not depths={fields["depths"]}')
  widths = [width // 4 for width in fields['widths']]
  args = {'layers': list(fields['depths']), 'channels': widths}
  if fields['output_stride'] < 32:
    args['output_stride'] = fields['output_stride']
  return configs.timm_config('resnet50', 'avg', args, fields, image_size, class_names)


# The values that keys of transformers' config must have.
_HF = {
  **{'layer_type': 'bottleneck', 'hidden_act': 'relu'},
  **{'downsample_in_first_stage': False, 'downsample_in_bottleneck': False},
}


def _hf_facts(config: dict, source: str) -> configs.Facts:
  configs.require(config, _HF, 'a ResNet')
  other = {key: value for key, value in config.items() if key not in _HF}
  return configs.hf('resnet')(other, source)._replace(fields={})


def _hf_config(fields, image_size, class_names) -> dict:
  strides = tuple(4 << s for s in range(len(fields['depths']) - 1, 6))
  configs.need(fields, 'transformers', output_stride=strides)
  args = {
    'embedding_size': fields['stem_width'],
    'hidden_sizes': list(fields['widths']),
    'depths': list(fields['depths']),
    **_HF,
    'image_size': list(image_size),
  }
  return configs.hf_config('ResNet', 'resnet', args, fields, image_size, class_names)


_format = functools.partial(
  Format, family='resnet', infer=infer, alike=('output_stride',)
)
FORMATS = (
  _format(
    'timm',
    marker=r'layer1\.0\.conv3\.weight',
    rules=TIMM,
    facts=configs.timm(
      _timm_fields, global_pool='avg', act_layer='relu', stem_type='', avg_down=False
    ),
    config=_timm_config,
    buffers=_counts(TIMM),
  ),
  _format(
    'hf',
    marker=r'(resnet\.)?encoder\.stages\.0\.layers\.0\.layer\.2\.convolution\.weight',
    rules=with_bare(HF, 'resnet.'),
    facts=_hf_facts,
    config=_hf_config,
    buffers=_counts(HF),
  ),
)
