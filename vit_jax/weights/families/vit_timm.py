"""ViT and its hybrids in timm's format."""

import math
import re

from vit_jax.errors import UserError
from vit_jax.weights import export, hints, layers
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
from vit_jax.weights.rename import Rule

_RESNET = 'patch_embed.backbone'


def timm(positions: t.Transform = t.same, has_stages: bool = True) -> tuple[Rule, ...]:
  """timm's VisionTransformer, VisionTransformer with attention pooling, and hybrids.

  Args:
    positions: `patch_positions` where a cls token has no row among them.
    has_stages: whether a hybrid's ResNet is more than its root.
  """
  pool, unit = f'{MAP}/MultiHeadDotProductAttention_0', 'block{s+1}/unit{u+1}'
  stage, root = f'{_RESNET}.stages.{{s}}.blocks.{{u}}', f'{_RESNET}.stem'
  root = root if has_stages else _RESNET
  return (
    Rule('cls_token', 'cls'),
    Rule('pos_embed', POSITIONS, positions),
    *layers.pair('patch_embed.proj', 'embedding', t.conv),
    *layers.norm('blocks.{i}.norm1', f'{BLOCK}/LayerNorm_0'),
    *layers.norm('blocks.{i}.norm2', f'{BLOCK}/LayerNorm_1'),
    *layers.fused('blocks.{i}.attn.qkv', ATTENTION, ('query', 'key', 'value')),
    *layers.pair('blocks.{i}.attn.proj', f'{ATTENTION}/out', t.out_kernel),
    *layers.pair('blocks.{i}.mlp.fc1', f'{MLP}/Dense_0'),
    *layers.pair('blocks.{i}.mlp.fc2', f'{MLP}/Dense_1'),
    *layers.norm('norm', 'Transformer/encoder_norm'),
    *layers.pair('head', 'head'),
    Rule('attn_pool.latent', f'{MAP}/probe'),
    *layers.pair('attn_pool.q', f'{pool}/query', t.heads_kernel, t.heads_bias),
    *layers.fused('attn_pool.kv', pool, ('key', 'value')),
    *layers.pair('attn_pool.proj', f'{pool}/out', t.out_kernel),
    *layers.norm('attn_pool.norm', f'{MAP}/LayerNorm_0'),
    *layers.pair('attn_pool.mlp.fc1', f'{MAP}/MlpBlock_0/Dense_0'),
    *layers.pair('attn_pool.mlp.fc2', f'{MAP}/MlpBlock_0/Dense_1'),
    Rule(f'{root}.conv.weight', 'conv_root/kernel', t.conv),
    *layers.norm(f'{root}.norm', 'gn_root'),
    Rule(f'{stage}.conv{{k}}.weight', f'{unit}/conv{{k}}/kernel', t.conv),
    *layers.norm(f'{stage}.norm{{k}}', f'{unit}/gn{{k}}'),
    Rule(f'{stage}.downsample.conv.weight', f'{unit}/conv_proj/kernel', t.conv),
    *layers.norm(f'{stage}.downsample.norm', f'{unit}/gn_proj'),
  )


def _rules(arrays, config) -> tuple[Rule, ...]:
  positions = t.same
  if 'cls_token' in arrays and 'pos_embed' in arrays:
    rows = arrays['pos_embed'].shape[1]
    # One row more than a square of patches is the cls token's.
    only_patches = math.isqrt(rows) ** 2 == rows
    if config.get('model_args', {}).get('no_embed_class', only_patches):
      positions = t.patch_positions
  has_stages = any(name.startswith(f'{_RESNET}.stages') for name in arrays)
  return timm(positions, has_stages)


# timm's SigLIP architectures whose GELU is the tanh approximation.
_TANH = (
  r'vit_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_'
  r'|vit_large_patch16_siglip_(gap_)?512'
)


def _fields(config: dict, where: str) -> dict:
  args, name = config.get('model_args', {}), config.get('architecture') or ''
  usual = 'gelu_tanh' if re.match(_TANH, name) else 'gelu'
  fields = {'act': hints.activation(args.get('act_layer', usual), where)}
  if 'num_heads' in args:
    fields['num_heads'] = args['num_heads']
  pool = args.get('global_pool', config.get('global_pool', 'token'))
  if pool == 'avg' and args.get('class_token', '_gap' not in name):
    raise UserError(
      f'{where}: a timm model that averages its patch tokens and has a cls token beside '
      "them (global_pool 'avg' with class_token) is not among our classifiers."
    )
  return fields


# timm's hybrids are functions, one per ResNet.
_HYBRIDS = {
  (): 'vit_tiny_r_s16_p8_224',
  (2, 2, 2, 2): 'vit_small_r26_s32_224',
  (3, 4, 9): 'vit_base_r50_s16_224',
  (3, 4, 6, 3): 'vit_large_r50_s32_224',
}


def _config(fields, image_size, class_names) -> dict:
  for key, allowed, why in (
    ('norm_eps', (1e-6,), 'its ViT builds its norms with that'),
    ('posemb', ('learn', 'none'), 'its ViT adds a table of positions, or nothing'),
    ('posemb_where', ('stem',), 'its ViT adds positions once'),
    ('attention', ('full',), 'in its ViT every token attends to all'),
    ('representation_size', (None,), 'its head is one linear layer'),
    ('classifier', ('token', 'gap', 'map'), 'its ViT classifies one vector per image'),
  ):
    export.need(fields, key, allowed, 'timm', why)
  pool = {'token': 'token', 'gap': 'avg', 'map': 'map'}[fields['classifier']]
  args = export.timm_transformer(fields, image_size)
  args |= {
    'num_heads': fields['num_heads'],
    'mlp_ratio': export.timm_ratio(fields['mlp_dim'], fields['width']),
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
      raise UserError(
        f'timm has no hybrid with stem_blocks={tuple(fields["stem_blocks"])} and '
        f'stem_width={fields["stem_width"]}; it has {list(_HYBRIDS)} of width 64.'
      )
  return export.timm_config(architecture, pool, args, fields, image_size, class_names)


FORMATS = (
  Format(
    'timm',
    'vit',
    r'blocks\.0\.attn\.qkv\.weight',
    _rules,
    infer,
    hints.timm(_fields),
    grid=grid,
    flat_heads=True,
    to='timm',
    write_config=_config,
    write_rules=lambda flat: timm(has_stages=bool(resnet_blocks(flat))),
  ),
)
