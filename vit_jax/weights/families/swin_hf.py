"""Swin, both versions, in transformers' format."""

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import export, hints, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.families import swin
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

# transformers 5 renamed the layers of the first version; files on the hub carry the older
# names, which all its versions read.
_OLD = {
  'query': 'attention.self.query',
  'key': 'attention.self.key',
  'value': 'attention.self.value',
  'out': 'attention.output.dense',
  'fc1': 'intermediate.dense',
  'fc2': 'output.dense',
  'table': 'attention.self.relative_position_bias_table',
  'mlp': 'attention.self.continuous_position_bias_mlp',
}
_NEW = {
  'query': 'attention.q_proj',
  'key': 'attention.k_proj',
  'value': 'attention.v_proj',
  'out': 'attention.o_proj',
  'fc1': 'mlp.fc1',
  'fc2': 'mlp.fc2',
  'table': 'attention.relative_position_bias.relative_position_bias_table',
  'mlp': 'attention.continuous_position_bias_mlp',
}
_MODEL_TYPES = {1: 'swin', 2: 'swinv2'}


def hf(stages: list[swin.Stage], prefix: str) -> tuple[Rule, ...]:
  """transformers' SwinForImageClassification and Swinv2ForImageClassification.

  Args:
    prefix: of what is not the classifier, 'swin.', 'swinv2.'; '' for a bare model.
  """
  embeddings = f'{prefix}embeddings'
  return (
    *layers.pair(f'{embeddings}.patch_embeddings.projection', 'stem/embedding', t.conv),
    *layers.norm(f'{embeddings}.norm', 'stem/norm'),
    *(
      rule
      for s, stage in enumerate(stages)
      for rule in (
        *_stage(s, stage, prefix, _OLD),
        *(r._replace(only_load=True) for r in _stage(s, stage, prefix, _NEW)),
      )
    ),
    *(
      rule
      for s in range(len(stages) - 1)
      for rule in swin.merging(
        f'{prefix}encoder.layers.{s}.downsample', f'stage{s + 2}_downsample'
      )
    ),
    *layers.norm(f'{prefix}layernorm', 'norm'),
    *layers.pair('classifier', 'head'),
  )


def _stage(s: int, stage: swin.Stage, prefix: str, names: dict) -> tuple[Rule, ...]:
  theirs = f'{prefix}encoder.layers.{s}.blocks.{{i}}'
  ours = f'stage{s + 1}_block_{{i}}'
  rules = [
    *layers.norm(f'{theirs}.layernorm_before', f'{ours}/norm1'),
    *layers.norm(f'{theirs}.layernorm_after', f'{ours}/norm2'),
    *layers.pair(f'{theirs}.{names["out"]}', f'{ours}/attention/out', t.out_kernel),
    *layers.pair(f'{theirs}.{names["fc1"]}', f'{ours}/mlp/Dense_0'),
    *layers.pair(f'{theirs}.{names["fc2"]}', f'{ours}/mlp/Dense_1'),
    *swin.table(f'{theirs}.{names["table"]}', ours, stage),
  ]
  for part in ('query', 'key', 'value'):
    rules += layers.pair(
      f'{theirs}.{names[part]}',
      f'{ours}/attention/{part}',
      t.heads_kernel,
      t.heads_bias,
    )
  if stage.window is None:
    rules += swin.position_mlp(f'{theirs}.{names["mlp"]}', ours)
  return swin.rules_of(stage, rules)


def _rules(arrays, config) -> tuple[Rule, ...]:
  name = r'(?:swin(?:v2)?\.)?encoder\.layers\.(\d+)\.blocks\.0\.attention\.'
  stages = swin.stages_of(
    arrays,
    rf'{name}(?:self|relative_position_bias)\.relative_position_bias_table',
    rf'{name}(?:self\.)?logit_scale',
    swin.square,
  )
  first = next((n for n in arrays if 'encoder.layers.' in n), '')
  return hf(stages, first.partition('encoder.')[0])


def _hints(config: dict, where: str) -> hints.Hints:
  model_type = config.get('model_type', 'swin')
  if model_type not in _MODEL_TYPES.values():
    model_type = 'swin'  # for the error
  found = hints.hf(model_type)(config, where)
  if config.get('layer_norm_eps', 1e-5) != 1e-5:
    raise UserError(
      f'{where}: layer_norm_eps is {config["layer_norm_eps"]}: of a Swin only 1e-5 is '
      'read, which transformers gives a part of its norms whatever the config says.'
    )
  stages = len(config.get('depths', range(4)))
  fields = {'act': found.fields['act'], 'borders': 'pad_shift'}
  if model_type == 'swinv2':
    fields['borders'] = 'pad_shift_twice'
  if 'window_size' in config:
    fields['windows'] = (config['window_size'],) * stages
  if any(pretrained := config.get('pretrained_window_sizes', ())):
    fields['pretrained_windows'] = tuple(pretrained[:stages])
  return found._replace(fields=fields)


def _config(fields, image_size, class_names) -> dict:
  swin.check_plain(fields, 'transformers')
  swin.check_one_window(fields, 'transformers')
  second, side = fields['version'] == 2, fields['windows'][0]
  same = ('pad_shift', 'pad_shift_twice')
  swin.check_borders(fields, image_size, same, 'transformers')
  for s in range(len(fields['depths'])):
    H, W = swin.map_of(fields, image_size, s)
    if min(H, W) < side and not (second and H == W):
      raise UserError(
        f'transformers cannot express windows of {side} for images of '
        f'{image_size[0]}x{image_size[1]} px: the map of stage {s + 1} is {H}x{W}, and it '
        'cuts no windows to size there. Choose another size of the images.'
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
  return export.hf_config(
    'Swinv2' if second else 'Swin',
    _MODEL_TYPES[fields['version']],
    args,
    fields,
    image_size,
    class_names,
  )


def _write_rules(flat) -> tuple[Rule, ...]:
  stages = swin.our_stages(flat)
  return hf(stages, 'swinv2.' if stages[0].window is None else 'swin.')


def _indices(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns which row of a table a query and a key have, which hub files of V1 hold."""
  found = {}
  for s, stage in enumerate(swin.our_stages(flat)):
    if stage.window is None:
      return {}
    h, w = stage.window
    y, x = (n.ravel() for n in np.indices((h, w)))
    index = (y[:, None] - y + h - 1) * (2 * w - 1) + x[:, None] - x + w - 1
    i = 0
    while f'stage{s + 1}_block_{i}/norm1/scale' in flat:
      name = (
        f'swin.encoder.layers.{s}.blocks.{i}.attention.self.relative_position_index'
      )
      found[name] = index
      i += 1
  return found


FORMATS = (
  Format(
    'hf',
    'swin',
    r'(swin(v2)?\.)?encoder\.layers\.0\.blocks\.0\.attention\..*'
    r'(relative_position_bias_table|logit_scale)',
    _rules,
    swin.infer,
    _hints,
    grid=swin.grid,
    to='hf',
    write_config=_config,
    write_rules=_write_rules,
    buffers=_indices,
  ),
)
