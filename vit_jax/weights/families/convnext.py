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


_HF = 'encoder.stages.{s}.layers.{i}'


def hf(prefix: str = 'convnext.') -> tuple[Rule, ...]:
  """transformers' ConvNextForImageClassification; prefix '' for a bare ConvNextModel."""
  theirs, encoder = f'{prefix}{_HF}', f'{prefix}encoder.stages.{{s}}'
  return (
    *layers.pair(f'{prefix}embeddings.patch_embeddings', 'stem/conv', t.conv),
    *layers.norm(f'{prefix}embeddings.layernorm', 'stem/norm'),
    *layers.norm(f'{encoder}.downsampling_layer.0', 'stage{s+1}_downsample/norm'),
    *layers.pair(
      f'{encoder}.downsampling_layer.1', 'stage{s+1}_downsample/conv', t.conv
    ),
    *layers.pair(f'{theirs}.dwconv', f'{_BLOCK}/conv_dw', t.conv),
    *layers.norm(f'{theirs}.layernorm', f'{_BLOCK}/norm'),
    *layers.pair(f'{theirs}.pwconv1', f'{_BLOCK}/mlp/Dense_0'),
    *layers.pair(f'{theirs}.pwconv2', f'{_BLOCK}/mlp/Dense_1'),
    Rule(f'{theirs}.layer_scale_parameter', f'{_BLOCK}/gamma'),
    *layers.norm(f'{prefix}layernorm', 'norm'),
    *layers.pair('classifier', 'head'),
  )


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters determine."""
  scales = [name for name in flat if name.endswith('/gamma')]
  stages = [int(name.removeprefix('stage').split('_')[0]) for name in scales]
  numbers = range(1, max(stages, default=0) + 1)
  return dict(
    depths=tuple(stages.count(s) for s in numbers),
    widths=tuple(flat[f'stage{s}_block_0/gamma'].size for s in numbers),
    num_classes=flat['head/kernel'].shape[1] if 'head/kernel' in flat else None,
  )


def _timm_fields(config: dict, where: str) -> dict:
  act = config.get('model_args', {}).get('act_layer', 'gelu')
  return {'act': hints.activation(act, where)}


def _timm_config(fields, image_size, class_names) -> dict:
  export.need(fields, 'norm_eps', (1e-6,), 'timm', 'its ConvNeXt has one for all norms')
  args = {'depths': list(fields['depths']), 'dims': list(fields['widths'])}
  if fields['act'] != 'gelu_erf':
    args['act_layer'] = fields['act']
  return export.timm_config(
    'convnext_tiny', 'avg', args, fields, image_size, class_names
  )


def _hf_config(fields, image_size, class_names) -> dict:
  args = {
    'patch_size': 4,
    'num_stages': len(fields['depths']),
    'depths': list(fields['depths']),
    'hidden_sizes': list(fields['widths']),
    'layer_scale_init_value': 1e-6,  # with 0 it would have no gamma
    'layer_norm_eps': fields['norm_eps'],
    'drop_path_rate': fields['stochastic_depth'],
  }
  name = 'ConvNext'
  return export.hf_config(name, 'convnext', args, fields, image_size, class_names)


def _hf_rules(arrays, config) -> tuple[Rule, ...]:
  return hf('convnext.' if any(name.startswith('convnext.') for name in arrays) else '')


FORMATS = (
  Format(
    'timm',
    'convnext',
    r'stages\.0\.blocks\.0\.conv_dw\.weight',
    lambda arrays, config: TIMM,
    infer,
    hints.timm(_timm_fields),
    to='timm',
    write_config=_timm_config,
  ),
  Format(
    'hf',
    'convnext',
    r'(convnext\.)?encoder\.stages\.0\.layers\.0\.dwconv\.weight',
    _hf_rules,
    infer,
    hints.hf('convnext'),
    to='hf',
    write_config=_hf_config,
    write_rules=lambda flat: hf(),
  ),
)
