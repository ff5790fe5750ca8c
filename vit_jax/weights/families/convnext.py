"""ConvNeXt V1 and V2 in the published formats."""

import functools

import numpy as np

from vit_jax.models.convnext import VARIANTS
from vit_jax.weights import configs, rename
from vit_jax.weights.families.vit import columns
from vit_jax.weights.formats import Format, Writer
from vit_jax.weights.rename import Rule, add_bare_names, nest_rules, table

_BLOCK, _DOWN = 'stage{s+1}_block_{i}', 'stage{s+1}_downsample'
_TIMM = 'stages.{s}.blocks.{i}'

TIMM = table(
  rename.conv('stem.0', 'stem/conv'),
  rename.norm('stem.1', 'stem/norm'),
  rename.norm('stages.{s}.downsample.0', f'{_DOWN}/norm'),
  rename.conv('stages.{s}.downsample.1', f'{_DOWN}/conv'),
  rename.conv(f'{_TIMM}.conv_dw', f'{_BLOCK}/conv_dw'),
  rename.norm(f'{_TIMM}.norm', f'{_BLOCK}/norm'),
  rename.dense(f'{_TIMM}.mlp.fc1', f'{_BLOCK}/mlp/Dense_0', rename.pointwise_kernel),
  rename.norm(f'{_TIMM}.mlp.grn', f'{_BLOCK}/mlp/norm'),
  rename.dense(f'{_TIMM}.mlp.fc2', f'{_BLOCK}/mlp/Dense_1', rename.pointwise_kernel),
  Rule(f'{_TIMM}.gamma', f'{_BLOCK}/gamma'),
  rename.norm('head.norm', 'norm'),
  rename.dense('head.pre_logits.fc', 'pre_logits'),
  rename.dense('head.fc', 'head'),
)
# A model of timm as the image tower of open_clip, with a projection of one or two layers.
OPEN_CLIP = table(
  nest_rules(TIMM, 'trunk.'),
  rename.dense('head.proj', 'head'),
  rename.dense('head.mlp.fc1', 'pre_logits'),
  rename.dense('head.mlp.fc2', 'head'),
)


_STAGE = 'convnext.encoder.stages.{s}'
_LAYER, _BEFORE = f'{_STAGE}.layers.{{i}}', f'{_STAGE}.downsampling_layer'
HF = table(
  rename.conv('convnext.embeddings.patch_embeddings', 'stem/conv'),
  rename.norm('convnext.embeddings.layernorm', 'stem/norm'),
  rename.norm(f'{_BEFORE}.0', f'{_DOWN}/norm'),
  rename.conv(f'{_BEFORE}.1', f'{_DOWN}/conv'),
  rename.conv(f'{_LAYER}.dwconv', f'{_BLOCK}/conv_dw'),
  rename.norm(f'{_LAYER}.layernorm', f'{_BLOCK}/norm'),
  rename.dense(f'{_LAYER}.pwconv1', f'{_BLOCK}/mlp/Dense_0'),
  [
    Rule(
      f'{_LAYER}.grn.{theirs}', f'{_BLOCK}/mlp/norm/{ours}', rename.group_norm_vector
    )
    for theirs, ours in (('weight', 'scale'), ('bias', 'bias'))
  ],
  rename.dense(f'{_LAYER}.pwconv2', f'{_BLOCK}/mlp/Dense_1'),
  Rule(f'{_LAYER}.layer_scale_parameter', f'{_BLOCK}/gamma'),
  rename.norm('convnext.layernorm', 'norm'),
  rename.dense('classifier', 'head'),
)
HF_V2 = tuple(
  rule._replace(theirs=rule.theirs.replace('convnext.', 'convnextv2.', 1))
  for rule in HF
)


# Arguments of timm's ConvNeXt for which only one value is supported.
_ONLY = {
  'global_pool': 'avg',
  'output_stride': 32,
  'kernel_sizes': 7,
  'stem_type': 'patch',
  'conv_bias': True,
  'norm_layer': 'layernorm',
  'head_norm_first': False,
}
# Fields that no other library has.
_PLAIN = dict(projection=(None,), unit=(False,))


def infer(flat: dict) -> dict:
  """Infers depths, widths, layer scale (which V2 lacks) and head from the parameters."""
  depths = rename.count_blocks(flat, 'norm/scale')
  numbers = range(1, len(depths) + 1)
  widths = tuple(flat[f'stage{s}_block_0/norm/scale'].size for s in numbers)
  return dict(
    depths=depths,
    widths=widths,
    layer_scale=1e-6 if 'stage1_block_0/gamma' in flat else None,
    representation_size=columns(flat, 'pre_logits/kernel'),
    num_classes=columns(flat, 'head/kernel'),
    head_bias='head/bias' in flat or 'head/kernel' not in flat,
    **_epsilons(1e-5 if (depths, widths) == VARIANTS['XXL'] else 1e-6),
  )


def _epsilons(eps: float) -> dict:
  return {'norm_eps': configs.epsilon(eps), 'body_norm_eps': eps}


def _timm_fields(args: dict, name: str) -> dict:
  # Ignored, because they follow from the names and shapes of the arrays.
  for key in ('conv_mlp', 'use_grn', 'head_hidden_size'):
    args.pop(key, None)
  fields = configs.timm_act(args, name)
  # A file without timm's name has the epsilon of its widths, see `infer`.
  if 'norm_eps' in args or name.startswith('convnext'):
    usual = 1e-5 if name.startswith('convnext_xxlarge') else 1e-6
    fields |= _epsilons(args.pop('norm_eps', usual))
  return fields


def _timm_config(fields, image_size, class_names) -> dict:
  configs.need(fields, 'timm', norm_eps=(fields['body_norm_eps'],), **_PLAIN)
  args = {'depths': list(fields['depths']), 'dims': list(fields['widths'])}
  if fields['act'] != 'gelu_erf':
    args['act_layer'] = fields['act']
  if fields['norm_eps'] != 1e-6:
    args['norm_eps'] = fields['norm_eps']
  if fields['representation_size']:
    args['head_hidden_size'] = fields['representation_size']
  name = 'convnextv2_tiny' if fields['layer_scale'] is None else 'convnext_tiny'
  return configs.timm_config(name, 'avg', args, fields, image_size, class_names)


def _bias(flat: dict, fields: dict) -> dict:
  """Returns a bias of zeros for a head that has none."""
  if fields['head_bias'] or 'head/kernel' not in flat:
    return {}
  return {'head.fc.bias': np.zeros(fields['num_classes'], np.float32)}


def _hf_config(fields, image_size, class_names) -> dict:
  plain = dict(body_norm_eps=(1e-6,), representation_size=(None,), head_bias=(True,))
  configs.need(fields, 'transformers', **plain, **_PLAIN)
  args = {
    'patch_size': 4,
    'num_stages': len(fields['depths']),
    'depths': list(fields['depths']),
    'hidden_sizes': list(fields['widths']),
    'layer_norm_eps': fields['norm_eps'],
    'drop_path_rate': fields['stochastic_depth'],
  }
  name = 'ConvNextV2' if fields['layer_scale'] is None else 'ConvNext'
  if name == 'ConvNext':
    # The value 0 would make transformers build a model without gamma.
    args['layer_scale_init_value'] = 1e-6
  return configs.hf_config(name, name.lower(), args, fields, image_size, class_names)


def _hf_facts(config: dict, source: str) -> configs.Facts:
  version = 'v2' if config.get('model_type') == 'convnextv2' else ''
  facts = configs.hf(f'convnext{version}')(config, source)
  return facts._replace(fields={'body_norm_eps': 1e-6} | facts.fields)


_format = functools.partial(Format, family='convnext', infer=infer)
FORMATS = (
  _format(
    name='timm',
    marker=r'stages\.0\.blocks\.0\.conv_dw\.weight',
    rules=TIMM,
    facts=configs.timm(_timm_fields, **_ONLY),
    writer=Writer(config=_timm_config, buffers=_bias, alike=('head_bias',)),
  ),
  _format(
    name='open_clip',
    marker=r'visual\.trunk\.stages\.0\.blocks\.0\.conv_dw\.weight',
    within=r'visual\.',
    rules=OPEN_CLIP,
    facts=configs.open_clip_trunk(configs.timm(_timm_fields, **_ONLY)),
  ),
  _format(
    name='hf',
    marker=r'(convnext(v2)?\.)?encoder\.stages\.0\.layers\.0\.dwconv\.weight',
    rules=table(add_bare_names(HF, 'convnext.'), HF_V2),
    facts=_hf_facts,
    writer=Writer(
      config=_hf_config,
      rules=lambda flat, fields: HF_V2 if fields['layer_scale'] is None else HF,
    ),
  ),
)
