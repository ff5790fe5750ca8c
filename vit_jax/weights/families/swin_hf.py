"""Swin, both versions, in transformers' format."""

import numpy as np

from vit_jax.weights import config_writers, configs, layers
from vit_jax.weights.families import swin
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Table, respelled, table

_BLOCK = swin.Names(
  norms=('layernorm_before', 'layernorm_after'),
  out='attention.output.dense',
  mlp=('intermediate.dense', 'output.dense'),
  table='attention.self.relative_position_bias_table',
  position_mlp='attention.self.continuous_position_bias_mlp',
)
# Names of transformers 5, besides those that it shares with other models.
_NEWER = (
  (r'self\.(relative_position_bias)_table', r'\1.\1_table'),
  (r'attention\.self\.', 'attention.'),
)
_MODEL_TYPES = {1: 'swin', 2: 'swinv2'}


def hf(stages: list[swin.Stage], prefix: str) -> Table:
  """transformers' SwinForImageClassification and Swinv2ForImageClassification.

  Args:
    prefix: of what is not the classifier, 'swin.', 'swinv2.'; '' for a bare model.
  """
  embeddings = f'{prefix}embeddings'
  blocks = table(_stage(s, stage, prefix) for s, stage in enumerate(stages))
  return table(
    swin.around(
      f'{embeddings}.patch_embeddings.projection',
      f'{embeddings}.norm',
      f'{prefix}encoder.layers.{{s}}.downsample',
      '{s+2}',
      f'{prefix}layernorm',
      'classifier',
    ),
    blocks,
    respelled(blocks, *layers.TRANSFORMERS_5, *_NEWER),
  )


def _stage(s: int, stage: swin.Stage, prefix: str) -> Table:
  theirs = f'{prefix}encoder.layers.{s}.blocks.{{i}}'
  ours, heads = f'stage{s + 1}_block_{{i}}', stage.heads
  return table(
    swin.block(theirs, ours, stage, _BLOCK),
    [
      layers.into_heads(f'{theirs}.attention.self.{x}', f'{ours}/attention/{x}', heads)
      for x in layers.QKV
    ],
  )


def _rules(arrays, facts) -> Table:
  name = r'(?:swin(?:v2)?\.)?encoder\.layers\.(\d+)\.blocks\.0\.attention\.'
  stages = swin.stages_of(
    arrays,
    rf'{name}(?:self|relative_position_bias)\.relative_position_bias_table',
    rf'{name}(?:self\.)?logit_scale',
    swin.square,
  )
  first = next((n for n in arrays if 'encoder.layers.' in n), '')
  return hf(stages, first.partition('encoder.')[0])


def _facts(config: dict, source: str) -> configs.Facts:
  model_type = config.get('model_type', 'swin')
  if model_type not in _MODEL_TYPES.values():
    model_type = 'swin'  # for the error
  facts = configs.hf(model_type)(config, source)
  # transformers gives a part of its norms 1e-5 whatever the config says.
  configs.require(config, {'layer_norm_eps': 1e-5}, 'a Swin')
  stages = len(config.get('depths', range(4)))
  fields = {'act': facts.fields['act'], 'borders': 'pad_shift'}
  if model_type == 'swinv2':
    fields['borders'] = 'pad_shift_twice'
  if 'window_size' in config:
    fields['windows'] = (
      configs.pair(config['window_size'], 'window_size')[0],
    ) * stages
  if any(pretrained := config.get('pretrained_window_sizes', ())):
    fields['pretrained_windows'] = tuple(pretrained[:stages])
  return facts._replace(fields=fields)


def _config(fields, image_size, class_names) -> dict:
  swin.check_plain(fields, 'transformers')
  swin.check_one_window(fields, 'transformers')
  second, side = fields['version'] == 2, fields['windows'][0]
  same = ('pad_shift', 'pad_shift_twice')
  swin.check_borders(fields, image_size, same, 'transformers')
  for s in range(len(fields['depths'])):
    H, W = swin.map_of(fields, image_size, s)
    if min(H, W) < side and not (second and H == W):
      raise ValueError(
        f'transformers cannot express windows of {side} for images of '
        f'{image_size[0]}x{image_size[1]} px: the map of stage {s + 1} is {H}x{W}, and it '
        'cuts no windows to size there. Choose another size of the images'
      )
  args = {
    'patch_size': fields['patch_size'][0],
    'embed_dim': fields['width'],
    'depths': list(fields['depths']),
    'num_heads': list(fields['num_heads']),
    'window_size': side,
    'mlp_ratio': fields['mlp_ratio'],
    'qkv_bias': True,
    'use_absolute_embeddings': False,
    'layer_norm_eps': 1e-5,
    'drop_path_rate': fields['stochastic_depth'],
  }
  if second and fields['pretrained_windows']:
    args['pretrained_window_sizes'] = list(fields['pretrained_windows'])
  name, model_type = 'Swinv2' if second else 'Swin', _MODEL_TYPES[fields['version']]
  return config_writers.hf(name, model_type, args, fields, image_size, class_names)


def _write_rules(flat, fields) -> Table:
  stages = swin.our_stages(flat)
  return hf(stages, 'swinv2.' if stages[0].window is None else 'swin.')


def _indices(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the row of a table that a query and a key have, which hub files of V1 hold."""
  arrays = {}
  for s, (stage, depth) in enumerate(
    zip(swin.our_stages(flat), swin.depths(flat), strict=True)
  ):
    if stage.window is None:
      return {}
    h, w = stage.window
    y, x = (n.ravel() for n in np.indices((h, w)))
    index = (y[:, None] - y + h - 1) * (2 * w - 1) + x[:, None] - x + w - 1
    for i in range(depth):
      name = f'swin.encoder.layers.{s}.blocks.{i}.attention.self'
      arrays[f'{name}.relative_position_index'] = index
  return arrays


FORMATS = (
  Format(
    'hf',
    'swin',
    r'(swin(v2)?\.)?encoder\.layers\.0\.blocks\.0\.attention\..*'
    r'(relative_position_bias_table|logit_scale)',
    _rules,
    swin.infer,
    _facts,
    grid=swin.grid,
    config=_config,
    write_rules=_write_rules,
    buffers=_indices,
  ),
)
