"""ViT and its hybrids in timm's format."""

import math
import re

from vit_jax.weights import config_writers, configs, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.families.vit import (
  ATTENTION,
  BLOCK,
  MAP,
  MLP,
  POSITIONS,
  grid,
  infer,
  resnet_blocks,
)
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule, Table, table

_RESNET = 'patch_embed.backbone'


def timm(heads: int, positions: t.Transform = t.same, has_stages: bool = True) -> Table:
  """timm's VisionTransformer, VisionTransformer with attention pooling, and hybrids.

  Args:
    positions: `patch_positions` where a class token has no row among them.
    has_stages: whether a hybrid's ResNet is more than its root.
  """
  pool, unit = f'{MAP}/MultiHeadDotProductAttention_0', 'block{s+1}/unit{u+1}'
  stage = f'{_RESNET}.stages.{{s}}.blocks.{{u}}'
  root = f'{_RESNET}.stem' if has_stages else _RESNET
  return table(
    Rule('cls_token', 'cls'),
    Rule('pos_embed', POSITIONS, positions),
    layers.conv('patch_embed.proj', 'embedding'),
    layers.norm('blocks.{i}.norm1', f'{BLOCK}/LayerNorm_0'),
    layers.norm('blocks.{i}.norm2', f'{BLOCK}/LayerNorm_1'),
    layers.fused('blocks.{i}.attn.qkv', ATTENTION, heads),
    layers.out_of_heads('blocks.{i}.attn.proj', f'{ATTENTION}/out', heads),
    layers.dense('blocks.{i}.mlp.fc1', f'{MLP}/Dense_0'),
    layers.dense('blocks.{i}.mlp.fc2', f'{MLP}/Dense_1'),
    layers.norm('norm', 'Transformer/encoder_norm'),
    layers.dense('head', 'head'),
    Rule('attn_pool.latent', f'{MAP}/probe'),
    layers.into_heads('attn_pool.q', f'{pool}/query', heads),
    layers.fused('attn_pool.kv', pool, heads, ('key', 'value')),
    layers.out_of_heads('attn_pool.proj', f'{pool}/out', heads),
    layers.norm('attn_pool.norm', f'{MAP}/LayerNorm_0'),
    layers.dense('attn_pool.mlp.fc1', f'{MAP}/MlpBlock_0/Dense_0'),
    layers.dense('attn_pool.mlp.fc2', f'{MAP}/MlpBlock_0/Dense_1'),
    layers.conv(f'{root}.conv', 'conv_root'),
    layers.norm(f'{root}.norm', 'gn_root'),
    layers.conv(f'{stage}.conv{{k}}', f'{unit}/conv{{k}}'),
    layers.norm(f'{stage}.norm{{k}}', f'{unit}/gn{{k}}'),
    layers.conv(f'{stage}.downsample.conv', f'{unit}/conv_proj'),
    layers.norm(f'{stage}.downsample.norm', f'{unit}/gn_proj'),
  )


def _rules(arrays, facts) -> Table:
  positions = t.same
  if 'cls_token' in arrays and 'pos_embed' in arrays:
    rows = arrays['pos_embed'].shape[1]
    # One row more than a square of patches is the class token's.
    only_patches = math.isqrt(rows) ** 2 == rows
    if facts.config.get('model_args', {}).get('no_embed_class', only_patches):
      positions = t.patch_positions
  has_stages = any(name.startswith(f'{_RESNET}.stages') for name in arrays)
  return timm(facts.fields['num_heads'], positions, has_stages)


# timm's SigLIP architectures whose GELU is the tanh approximation.
_TANH = (
  r'vit_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_'
  r'|vit_large_patch16_siglip_(gap_)?512'
)


def _fields(config: dict, name: str) -> dict:
  args = config.get('model_args', {})
  usual = 'gelu_tanh' if re.match(_TANH, name) else 'gelu'
  fields = {'act': configs.activation(args.get('act_layer', usual))}
  if 'num_heads' in args:
    fields['num_heads'] = args['num_heads']
  pool = args.get('global_pool', config.get('global_pool', 'token'))
  if pool == 'avg' and args.get('class_token', '_gap' not in name):
    raise ValueError("global_pool 'avg' beside a class_token is not read")
  return fields


# timm's hybrids are functions, one per ResNet.
_HYBRIDS = {
  (): 'vit_tiny_r_s16_p8_224',
  (2, 2, 2, 2): 'vit_small_r26_s32_224',
  (3, 4, 9): 'vit_base_r50_s16_224',
  (3, 4, 6, 3): 'vit_large_r50_s32_224',
}


def _config(fields, image_size, class_names) -> dict:
  one = dict(norm_eps=(1e-6,), posemb_where=('stem',), attention=('full',))
  one |= dict(representation_size=(None,), posemb=('learn', 'none'))
  config_writers.need(fields, 'timm', **one, classifier=('token', 'gap', 'map'))
  pool = {'token': 'token', 'gap': 'avg', 'map': 'map'}[fields['classifier']]
  args = config_writers.timm_patches(fields, image_size)
  args |= {
    'num_heads': fields['num_heads'],
    'mlp_ratio': config_writers.timm_ratio(fields['mlp_dim'], fields['width']),
    'class_token': fields['classifier'] == 'token',
    'no_embed_class': False,  # the table has a row for it: 5 x 5 is also 1 + 4 x 6
    'global_pool': pool,
    'fc_norm': False,  # norm, then the mean; by default timm has them the other way
    'act_layer': fields['act'].replace('_erf', ''),
    'depth': fields['depth'],
  }
  if fields['posemb'] == 'none':
    args['pos_embed'] = 'none'
  architecture = 'vit_base_patch16_224'
  if fields.get('stem_blocks') is not None:
    architecture = _HYBRIDS.get(tuple(fields['stem_blocks']))
    if architecture is None or fields['stem_width'] != 64:
      shape = f'stem_blocks={fields["stem_blocks"]}, stem_width={fields["stem_width"]}'
      raise ValueError(
        f'timm has hybrids of {list(_HYBRIDS)} with width 64, not {shape}'
      )
  return config_writers.timm(architecture, pool, args, fields, image_size, class_names)


FORMATS = (
  Format(
    'timm',
    'vit',
    r'blocks\.0\.attn\.qkv\.weight',
    _rules,
    infer,
    configs.timm(_fields),
    grid=grid,
    flat_heads=True,
    config=_config,
    write_rules=lambda flat, fields: timm(
      fields['num_heads'], has_stages=bool(resnet_blocks(flat))
    ),
  ),
)
