"""ConvNeXt in the published formats."""

import numpy as np

from vit_jax.weights import export, hints, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

_BLOCK, _THEIRS = 'stage{s+1}_block_{i}', 'stages.{s}.blocks.{i}'

TIMM = (
  *layers.pair('stem.0', 'stem/conv', t.conv),
  *layers.norm('stem.1', 'stem/norm'),
  *layers.norm('stages.{s}.downsample.0', 'stage{s+1}_downsample/norm'),
  *layers.pair('stages.{s}.downsample.1', 'stage{s+1}_downsample/conv', t.conv),
  *layers.pair(f'{_THEIRS}.conv_dw', f'{_BLOCK}/conv_dw', t.conv),
  *layers.norm(f'{_THEIRS}.norm', f'{_BLOCK}/norm'),
  *layers.pair(f'{_THEIRS}.mlp.fc1', f'{_BLOCK}/mlp/Dense_0'),
  *layers.pair(f'{_THEIRS}.mlp.fc2', f'{_BLOCK}/mlp/Dense_1'),
  Rule(f'{_THEIRS}.gamma', f'{_BLOCK}/gamma'),
  *layers.norm('head.norm', 'norm'),
  *layers.pair('head.fc', 'head'),
)


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters tell."""
  scales = [name for name in flat if name.endswith('/gamma')]
  stages = [int(name.removeprefix('stage').split('_')[0]) for name in scales]
  numbers = range(1, max(stages, default=0) + 1)
  return dict(
    depths=tuple(stages.count(s) for s in numbers),
    widths=tuple(flat[f'stage{s}_block_0/gamma'].size for s in numbers),
    num_classes=flat['head/kernel'].shape[1] if 'head/kernel' in flat else None,
  )


def _timm_config(fields, image_size, class_names) -> dict:
  args = {'depths': list(fields['depths']), 'dims': list(fields['widths'])}
  return export.timm_config(
    'convnext_tiny', 'avg', args, fields, image_size, class_names
  )


FORMATS = (
  Format(
    'timm',
    'convnext',
    r'stages\.0\.blocks\.0\.conv_dw\.weight',
    lambda arrays, config: TIMM,
    infer,
    hints.timm(),
    to='timm',
    write_config=_timm_config,
  ),
)
