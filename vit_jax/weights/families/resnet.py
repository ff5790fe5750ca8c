"""ResNet with BatchNorm, in the formats of timm (and torchvision) and of transformers."""

import re
from collections.abc import Callable

import numpy as np

from vit_jax import trees
from vit_jax.errors import UserError
from vit_jax.weights import export, hints, layers, rename
from vit_jax.weights import transforms as t
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

_BLOCK = 'stage{s+1}_block_{i}'


def _norm(theirs: str, ours: str) -> tuple[Rule, ...]:
  """A batch norm: parameters, statistics; of a frozen norm all four are statistics."""
  stats = f'{trees.STATS}/{ours}'
  return (
    *layers.norm(theirs, ours),
    Rule(f'{theirs}.running_mean', f'{stats}/mean'),
    Rule(f'{theirs}.running_var', f'{stats}/var'),
    *layers.norm(theirs, stats),
  )


TIMM = (
  Rule('conv1.weight', 'stem/conv/kernel', t.conv),
  *_norm('bn1', 'stem/norm'),
  *(
    rule
    for k in (1, 2, 3)
    for rule in (
      Rule(f'layer{{s+1}}.{{i}}.conv{k}.weight', f'{_BLOCK}/conv{k}/kernel', t.conv),
      *_norm(f'layer{{s+1}}.{{i}}.bn{k}', f'{_BLOCK}/norm{k}'),
    )
  ),
  Rule('layer{s+1}.{i}.downsample.0.weight', f'{_BLOCK}/conv_proj/kernel', t.conv),
  *_norm('layer{s+1}.{i}.downsample.1', f'{_BLOCK}/norm_proj'),
  *layers.pair('fc', 'head'),
)


def hf(prefix: str) -> tuple[Rule, ...]:
  """transformers' ResNetForImageClassification.

  Args:
    prefix: of what is not the classifier, 'resnet.'; '' for a bare model.
  """
  stem, block = (
    f'{prefix}embedder.embedder',
    f'{prefix}encoder.stages.{{s}}.layers.{{i}}',
  )
  convs = [(f'layer.{k - 1}', k) for k in (1, 2, 3)] + [('shortcut', '_proj')]
  return (
    Rule(f'{stem}.convolution.weight', 'stem/conv/kernel', t.conv),
    *_norm(f'{stem}.normalization', 'stem/norm'),
    *(
      rule
      for theirs, k in convs
      for rule in (
        Rule(
          f'{block}.{theirs}.convolution.weight', f'{_BLOCK}/conv{k}/kernel', t.conv
        ),
        *_norm(f'{block}.{theirs}.normalization', f'{_BLOCK}/norm{k}'),
      )
    ),
    *layers.pair('classifier.1', 'head'),
  )


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters determine; no array shows dilation."""
  blocks = [re.match(r'stage(\d+)_block_\d+/conv3/kernel', name) for name in flat]
  stages = [int(match[1]) for match in blocks if match]
  numbers = range(1, max(stages) + 1)
  return dict(
    depths=tuple(stages.count(s) for s in numbers),
    widths=tuple(flat[f'stage{s}_block_0/conv3/kernel'].shape[3] for s in numbers),
    stem_width=flat['stem/conv/kernel'].shape[3],
    output_stride=32,
    num_classes=flat['head/kernel'].shape[1] if 'head/kernel' in flat else None,
  )


def _counts(rules) -> Callable[[dict], dict]:
  """Returns the writer of PyTorch's counts of batches, which stand beside statistics."""

  def buffers(flat):
    means = {name: x for name, x in flat.items() if name.endswith('/mean')}
    names = rename.to_theirs(means, rules, None, 'timm')
    zero = np.zeros((), np.int64)
    return {n.replace('running_mean', 'num_batches_tracked'): zero for n in names}

  return buffers


# -- timm, and torchvision's names -------------------------------------------------------

# Arguments of timm's ResNet that the arrays show, or that are read.
_TIMM_ARGS = ('layers', 'channels', 'output_stride', 'num_classes', 'in_chans')


def _timm_fields(config: dict, where: str) -> dict:
  args = config.get('model_args', {})
  if other := args.keys() - {*_TIMM_ARGS}:
    raise UserError(
      f'{where}: a ResNet of timm with model_args.{min(other)} is not read: it may compute '
      f'something else with the same arrays. Those that are read: {list(_TIMM_ARGS)}.'
    )
  return {k: v for k, v in args.items() if k == 'output_stride'}


def _timm_config(fields, image_size, class_names) -> dict:
  export.need(
    fields, 'stem_width', (64,), 'timm', 'the stem of its ResNet is that wide'
  )
  if len(fields['depths']) != 4:
    raise UserError(
      f'timm cannot express depths={tuple(fields["depths"])}: its ResNet has 4 stages.'
    )
  args = {
    'layers': list(fields['depths']),
    'channels': [width // 4 for width in fields['widths']],
  }
  if fields['output_stride'] != 32:
    args['output_stride'] = fields['output_stride']
  return export.timm_config('resnet50', 'avg', args, fields, image_size, class_names)


# -- transformers ------------------------------------------------------------------------

# What each key of its config must be.
_HF = {
  'layer_type': 'bottleneck',
  'hidden_act': 'relu',
  'downsample_in_first_stage': False,
  'downsample_in_bottleneck': False,
}


def _hf_hints(config: dict, where: str) -> hints.Hints:
  for key, value in _HF.items():
    if config.get(key, value) != value:
      raise UserError(
        f'{where}: a ResNet with {key}={config[key]!r} is not read; expected {value!r}.'
      )
  other = {key: value for key, value in config.items() if key not in _HF}
  return hints.hf('resnet')(other, where)._replace(fields={})


def _hf_config(fields, image_size, class_names) -> dict:
  strides = {4 << s for s in range(len(fields['depths']) - 1, 6)}
  why = 'none of its stages is dilated'
  export.need(fields, 'output_stride', tuple(sorted(strides)), 'transformers', why)
  classes = fields['num_classes']
  labels = class_names or [f'LABEL_{i}' for i in range(classes or 0)]
  return {
    'architectures': [f'ResNet{"ForImageClassification" if classes else "Model"}'],
    'model_type': 'resnet',
    'num_channels': 3,
    'embedding_size': fields['stem_width'],
    'hidden_sizes': list(fields['widths']),
    'depths': list(fields['depths']),
    **_HF,
    'image_size': list(image_size),
    'id2label': {str(i): name for i, name in enumerate(labels)},
    'label2id': {name: i for i, name in enumerate(labels)},
  }


def _prefix(arrays) -> str:
  return 'resnet.' if any(name.startswith('resnet.') for name in arrays) else ''


FORMATS = (
  Format(
    'timm',
    'resnet',
    r'layer1\.0\.conv3\.weight',
    lambda arrays, config: TIMM,
    infer,
    hints.timm(_timm_fields),
    to='timm',
    write_config=_timm_config,
    buffers=_counts(TIMM),
  ),
  Format(
    'hf',
    'resnet',
    r'(resnet\.)?encoder\.stages\.0\.layers\.0\.layer\.2\.convolution\.weight',
    lambda arrays, config: hf(_prefix(arrays)),
    infer,
    _hf_hints,
    to='hf',
    write_config=_hf_config,
    write_rules=lambda flat: hf('resnet.'),
    buffers=_counts(hf('resnet.')),
  ),
)
