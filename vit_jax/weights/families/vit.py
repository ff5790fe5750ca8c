"""ViT and its hybrids in the published formats."""

import math
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import export, hints
from vit_jax.weights import transforms as t
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

POSITIONS = 'Transformer/posembed_input/pos_embedding'
_BLOCK = 'Transformer/encoderblock_{i}'
_ATTENTION = f'{_BLOCK}/MultiHeadDotProductAttention_0'
_MLP = f'{_BLOCK}/MlpBlock_0'
_MAP = 'MAPHead_0'

# Before Linen, Flax numbered the modules of a block through; all files published with
# the paper, AugReg and SAM have those names. Newer ones have ours.
GOOGLE = (
  Rule(f'{_BLOCK}/MultiHeadDotProductAttention_1/{{rest}}', f'{_ATTENTION}/{{rest}}'),
  Rule(f'{_BLOCK}/LayerNorm_2/{{rest}}', f'{_BLOCK}/LayerNorm_1/{{rest}}'),
  Rule(f'{_BLOCK}/MlpBlock_3/{{rest}}', f'{_MLP}/{{rest}}'),
  Rule(f'{_BLOCK}/{{rest}}', f'{_BLOCK}/{{rest}}'),
  Rule('Transformer/encoder_norm/{rest}', 'Transformer/encoder_norm/{rest}'),
  Rule(POSITIONS, POSITIONS),
  Rule('Transformer/pos_embedding', POSITIONS, only_load=True),
  Rule('cls', 'cls'),
  Rule('embedding/{rest}', 'embedding/{rest}'),
  Rule('pre_logits/{rest}', 'pre_logits/{rest}'),
  Rule('head/{rest}', 'head/{rest}'),
  Rule(f'{_MAP}/{{rest}}', f'{_MAP}/{{rest}}'),
  # big_vision before 2022: the MAP head's modules beside the others.
  Rule('probe', f'{_MAP}/probe', only_load=True),
  Rule('LayerNorm_0/{rest}', f'{_MAP}/LayerNorm_0/{{rest}}', only_load=True),
  Rule('MlpBlock_0/{rest}', f'{_MAP}/MlpBlock_0/{{rest}}', only_load=True),
  Rule(
    'MultiHeadDotProductAttention_0/{rest}',
    f'{_MAP}/MultiHeadDotProductAttention_0/{{rest}}',
    only_load=True,
  ),
  # The ResNet of a hybrid.
  Rule('conv_root/kernel', 'conv_root/kernel'),
  Rule('gn_root/{rest}', 'gn_root/{rest}', t.group_norm),
  Rule('block{i}/unit{j}/gn{k}/{rest}', 'block{i}/unit{j}/gn{k}/{rest}', t.group_norm),
  Rule(
    'block{i}/unit{j}/gn_proj/{rest}', 'block{i}/unit{j}/gn_proj/{rest}', t.group_norm
  ),
  Rule('block{i}/unit{j}/{rest}', 'block{i}/unit{j}/{rest}'),
)


def big_vision(has_cls: bool) -> tuple[Rule, ...]:
  """Google's names, but positions at the top, of patches only."""
  transform = t.patch_positions if has_cls else t.same
  return (Rule('pos_embedding', POSITIONS, transform, only_load=True), *GOOGLE)


def _pair(theirs: str, ours: str, kernel=t.dense, bias=t.same) -> tuple[Rule, Rule]:
  """A layer with a weight and a bias."""
  return (
    Rule(f'{theirs}.weight', f'{ours}/kernel', kernel),
    Rule(f'{theirs}.bias', f'{ours}/bias', bias),
  )


def _norm(theirs: str, ours: str) -> tuple[Rule, Rule]:
  return (
    Rule(f'{theirs}.weight', f'{ours}/scale'),
    Rule(f'{theirs}.bias', f'{ours}/bias'),
  )


def _fused(theirs: str, ours: str, names: tuple[str, ...]) -> tuple[Rule, Rule]:
  """Projections that the file holds as one."""
  number = len(names)
  return (
    Rule(
      f'{theirs}.weight',
      tuple(f'{ours}/{name}/kernel' for name in names),
      t.joined(t.heads_kernel, number),
    ),
    Rule(
      f'{theirs}.bias',
      tuple(f'{ours}/{name}/bias' for name in names),
      t.joined(t.heads_bias, number),
    ),
  )


_RESNET = 'patch_embed.backbone'


def timm(positions: t.Transform = t.same, has_stages: bool = True) -> tuple[Rule, ...]:
  """timm's VisionTransformer, VisionTransformer with attention pooling, and hybrids.

  Args:
    positions: `patch_positions` where a cls token has no row among them.
    has_stages: whether a hybrid's ResNet is more than its root.
  """
  pool, unit = f'{_MAP}/MultiHeadDotProductAttention_0', 'block{s+1}/unit{u+1}'
  stage, root = f'{_RESNET}.stages.{{s}}.blocks.{{u}}', f'{_RESNET}.stem'
  root = root if has_stages else _RESNET
  return (
    Rule('cls_token', 'cls'),
    Rule('pos_embed', POSITIONS, positions),
    *_pair('patch_embed.proj', 'embedding', t.conv),
    *_norm('blocks.{i}.norm1', f'{_BLOCK}/LayerNorm_0'),
    *_norm('blocks.{i}.norm2', f'{_BLOCK}/LayerNorm_1'),
    *_fused('blocks.{i}.attn.qkv', _ATTENTION, ('query', 'key', 'value')),
    *_pair('blocks.{i}.attn.proj', f'{_ATTENTION}/out', t.out_kernel),
    *_pair('blocks.{i}.mlp.fc1', f'{_MLP}/Dense_0'),
    *_pair('blocks.{i}.mlp.fc2', f'{_MLP}/Dense_1'),
    *_norm('norm', 'Transformer/encoder_norm'),
    *_pair('head', 'head'),
    Rule('attn_pool.latent', f'{_MAP}/probe'),
    *_pair('attn_pool.q', f'{pool}/query', t.heads_kernel, t.heads_bias),
    *_fused('attn_pool.kv', pool, ('key', 'value')),
    *_pair('attn_pool.proj', f'{pool}/out', t.out_kernel),
    *_norm('attn_pool.norm', f'{_MAP}/LayerNorm_0'),
    *_pair('attn_pool.mlp.fc1', f'{_MAP}/MlpBlock_0/Dense_0'),
    *_pair('attn_pool.mlp.fc2', f'{_MAP}/MlpBlock_0/Dense_1'),
    Rule(f'{root}.conv.weight', 'conv_root/kernel', t.conv),
    *_norm(f'{root}.norm', 'gn_root'),
    Rule(f'{stage}.conv{{k}}.weight', f'{unit}/conv{{k}}/kernel', t.conv),
    *_norm(f'{stage}.norm{{k}}', f'{unit}/gn{{k}}'),
    Rule(f'{stage}.downsample.conv.weight', f'{unit}/conv_proj/kernel', t.conv),
    *_norm(f'{stage}.downsample.norm', f'{unit}/gn_proj'),
  )


def _hf(layer: str, names: dict[str, str], prefix: str) -> tuple[Rule, ...]:
  embeddings = f'{prefix}embeddings'
  layer = f'{prefix}{layer}.{{i}}'
  return (
    Rule(f'{embeddings}.cls_token', 'cls'),
    Rule(f'{embeddings}.position_embeddings', POSITIONS),
    *_pair(f'{embeddings}.patch_embeddings.projection', 'embedding', t.conv),
    *_norm(f'{layer}.layernorm_before', f'{_BLOCK}/LayerNorm_0'),
    *_norm(f'{layer}.layernorm_after', f'{_BLOCK}/LayerNorm_1'),
    *(
      rule
      for part in ('query', 'key', 'value')
      for rule in _pair(
        f'{layer}.{names[part]}', f'{_ATTENTION}/{part}', t.heads_kernel, t.heads_bias
      )
    ),
    *_pair(f'{layer}.{names["out"]}', f'{_ATTENTION}/out', t.out_kernel),
    *_pair(f'{layer}.{names["fc1"]}', f'{_MLP}/Dense_0'),
    *_pair(f'{layer}.{names["fc2"]}', f'{_MLP}/Dense_1'),
    *_norm(f'{prefix}layernorm', 'Transformer/encoder_norm'),
    *_pair(f'{prefix}pooler.dense', 'pre_logits'),
    *_pair('classifier', 'head'),
  )


# transformers 5 renamed the layers; files on the hub carry the older names, which all
# its versions read.
_HF_OLD = {
  'query': 'attention.attention.query',
  'key': 'attention.attention.key',
  'value': 'attention.attention.value',
  'out': 'attention.output.dense',
  'fc1': 'intermediate.dense',
  'fc2': 'output.dense',
}
_HF_NEW = {
  'query': 'attention.q_proj',
  'key': 'attention.k_proj',
  'value': 'attention.v_proj',
  'out': 'attention.o_proj',
  'fc1': 'mlp.fc1',
  'fc2': 'mlp.fc2',
}


def hf(prefix: str = 'vit.') -> tuple[Rule, ...]:
  """transformers' ViTForImageClassification; prefix '' for a bare ViTModel."""
  new = (rule._replace(only_load=True) for rule in _hf('layers', _HF_NEW, prefix))
  return (*_hf('encoder.layer', _HF_OLD, prefix), *new)


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters, unstacked, tell.

  Raises:
    UserError: if a ViT's parts are missing.
  """
  kernel = _of(flat, 'embedding/kernel', 4)
  depth = len({name.split('/')[1] for name in flat if '/encoderblock_' in name})
  query = _of(flat, f'{_ATTENTION.format(i=0)}/query/kernel', 3)
  fields = dict(
    patch_size=kernel.shape[:2],
    width=kernel.shape[3],
    depth=depth,
    mlp_dim=_of(flat, f'{_MLP.format(i=0)}/Dense_0/kernel', 2).shape[1],
    num_heads=query.shape[1],
    classifier='token'
    if 'cls' in flat
    else 'map'
    if f'{_MAP}/probe' in flat
    else 'gap',
    posemb='learn' if POSITIONS in flat else 'none',
    num_classes=None,
    representation_size=None,
  )
  if 'head/kernel' in flat:
    fields['num_classes'] = _of(flat, 'head/kernel', 2).shape[1]
  if 'pre_logits/kernel' in flat:
    fields['representation_size'] = _of(flat, 'pre_logits/kernel', 2).shape[1]
  if 'conv_root/kernel' in flat:
    fields['stem_width'] = flat['conv_root/kernel'].shape[-1]
    fields['stem_blocks'] = resnet_blocks(flat)
  return fields


def resnet_blocks(flat) -> tuple[int, ...]:
  """Returns the number of units of each block of a ResNet."""
  units = {m[0] for name in flat if (m := re.match(r'block\d+/unit\d+/', name))}
  numbers = [int(unit.split('/')[0][len('block') :]) for unit in units]
  return tuple(numbers.count(i + 1) for i in range(max(numbers, default=0)))


def grid(flat: dict[str, np.ndarray], fields: dict) -> tuple[int, int] | None:
  """Returns (h, w) of the position embeddings; None unless they are square."""
  if POSITIONS not in flat:
    return None
  rows = flat[POSITIONS].shape[1] - (fields['classifier'] == 'token')
  side = math.isqrt(rows)
  return (side, side) if side * side == rows else None


def _of(flat, name, ndim):
  if name not in flat:
    raise UserError(f'The file lacks {name}, which every ViT has.')
  if flat[name].ndim != ndim:
    raise UserError(
      f'{name} has shape {flat[name].shape}; a ViT has {ndim} dimensions.'
    )
  return flat[name]


def _infer_google(flat: dict[str, np.ndarray]) -> dict:
  fields = infer(flat)
  if fields['posemb'] == 'none':
    # The models published in these formats without a table have this one.
    fields['posemb'] = 'sincos2d'
  return fields


def _timm_rules(arrays, config) -> tuple[Rule, ...]:
  positions = t.same
  if 'cls_token' in arrays and 'pos_embed' in arrays:
    rows = arrays['pos_embed'].shape[1]
    # One row more than a square of patches is the cls token's.
    only_patches = math.isqrt(rows) ** 2 == rows
    if config.get('model_args', {}).get('no_embed_class', only_patches):
      positions = t.patch_positions
  has_stages = any(name.startswith(f'{_RESNET}.stages') for name in arrays)
  return timm(positions, has_stages)


def _timm_fields(config: dict, where: str) -> dict:
  args = config.get('model_args', {})
  fields = {'act': hints.activation(args.get('act_layer', 'gelu'), where)}
  if 'num_heads' in args:
    fields['num_heads'] = args['num_heads']
  pool = args.get('global_pool', config.get('global_pool', 'token'))
  if pool == 'avg' and args.get('class_token', True):
    raise UserError(
      f'{where}: a timm model that averages its patch tokens and has a cls token beside '
      "them (global_pool 'avg' with class_token) is not among our classifiers."
    )
  return fields


# timm's hybrids are functions, one per ResNet.
_TIMM_HYBRIDS = {
  (): 'vit_tiny_r_s16_p8_224',
  (2, 2, 2, 2): 'vit_small_r26_s32_224',
  (3, 4, 9): 'vit_base_r50_s16_224',
  (3, 4, 6, 3): 'vit_large_r50_s32_224',
}


def _timm_config(fields, image_size, class_names) -> dict:
  export.need(fields, 'norm_eps', (1e-6,), 'timm')
  export.need(fields, 'posemb', ('learn', 'none'), 'timm')
  export.need(fields, 'representation_size', (None,), 'timm')
  export.need(fields, 'classifier', ('token', 'gap', 'map'), 'timm')
  pool = {'token': 'token', 'gap': 'avg', 'map': 'map'}[fields['classifier']]
  args = export.timm_transformer(fields, image_size)
  args |= {
    'num_heads': fields['num_heads'],
    'mlp_ratio': export.timm_ratio(fields['mlp_dim'], fields['width']),
    'class_token': fields['classifier'] == 'token',
    'global_pool': pool,
    'fc_norm': False,  # norm first, then the mean
    'act_layer': fields['act'].replace('_erf', ''),
    'depth': fields['depth'],
  }
  if fields['posemb'] == 'none':
    args['pos_embed'] = 'none'
  architecture = 'vit_base_patch16_224'
  if fields.get('stem_blocks') is not None:
    architecture = _TIMM_HYBRIDS.get(tuple(fields['stem_blocks']))
    if architecture is None or fields['stem_width'] != 64:
      raise UserError(
        f'timm has no hybrid with stem_blocks={tuple(fields["stem_blocks"])} and '
        f'stem_width={fields["stem_width"]}; it has {list(_TIMM_HYBRIDS)} of width 64.'
      )
  return export.timm_config(architecture, pool, args, fields, image_size, class_names)


def _hf_config(fields, image_size, class_names) -> dict:
  export.need(fields, 'classifier', ('token',), 'transformers')
  export.need(fields, 'posemb', ('learn',), 'transformers')
  export.need(fields, 'representation_size', (None,), 'transformers')
  export.need(fields, 'stem_blocks', (None,), 'transformers')
  one = lambda pair: pair[0] if pair[0] == pair[1] else list(pair)
  classes = fields['num_classes']
  labels = class_names or [f'LABEL_{i}' for i in range(classes or 0)]
  act = {'gelu_erf': 'gelu', 'gelu_tanh': 'gelu_pytorch_tanh'}[fields['act']]
  return {
    'architectures': ['ViTForImageClassification' if classes else 'ViTModel'],
    'model_type': 'vit',
    'hidden_size': fields['width'],
    'num_hidden_layers': fields['depth'],
    'num_attention_heads': fields['num_heads'],
    'intermediate_size': fields['mlp_dim'],
    'image_size': one(tuple(image_size)),
    'patch_size': one(tuple(fields['patch_size'])),
    'num_channels': 3,
    'hidden_act': act,
    'layer_norm_eps': fields['norm_eps'],
    'qkv_bias': True,
    'id2label': {str(i): name for i, name in enumerate(labels)},
    'label2id': {name: i for i, name in enumerate(labels)},
  }


def _hf_rules(arrays, config) -> tuple[Rule, ...]:
  return hf('vit.' if any(name.startswith('vit.') for name in arrays) else '')


FORMATS = (
  Format(
    'google',
    'vit',
    r'Transformer/.+',
    lambda arrays, config: GOOGLE,
    _infer_google,
    hints.google(act='gelu_tanh'),
    lacks='pos_embedding',
    grid=grid,
    to='google',
    write_config=export.google_config(act='gelu_tanh', norm_eps=1e-6, posemb='learn'),
  ),
  Format(
    'big_vision',
    'vit',
    r'pos_embedding',
    lambda arrays, config: big_vision('cls' in arrays),
    _infer_google,
    hints.google(act='gelu_tanh'),
    grid=grid,
  ),
  Format(
    'timm',
    'vit',
    r'blocks\.0\.attn\.qkv\.weight',
    _timm_rules,
    infer,
    hints.timm(_timm_fields),
    grid=grid,
    flat_heads=True,
    to='timm',
    write_config=_timm_config,
    write_rules=lambda flat: timm(has_stages=bool(resnet_blocks(flat))),
  ),
  Format(
    'hf',
    'vit',
    r'(vit\.)?(encoder\.layer|layers)\.0\.layernorm_before\..+',
    _hf_rules,
    infer,
    hints.hf('vit'),
    grid=grid,
    flat_heads=True,
    to='hf',
    write_config=_hf_config,
    write_rules=lambda flat: hf(),
  ),
)
