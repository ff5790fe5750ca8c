"""timm's Vision Transformers: the options of its names, and their meaning here.

A file that timm writes holds only the options that differ from those of its architecture,
so the name decides about LayerScale, registers, activation, positions and pooling. timm.json
has timm 1.0.31's registry: the options of each name that differ from their class's.
"""

import functools
import json
import math
import re
from pathlib import Path

from vit_jax.errors import did_you_mean

# The classes' defaults that a translation reads, where they are not None, False or 0.
_COMMON = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12, mlp_ratio=4.0)
_COMMON |= dict(qkv_bias=True, class_token=True, norm_layer='LayerNorm')
DEFAULTS = {
  'vit': _COMMON
  | dict(global_pool='token', pos_embed='learn', final_norm=True, proj_bias=True),
  'eva': _COMMON
  | dict(global_pool='avg', qkv_fused=True, use_abs_pos_emb=True, attn_type='eva')
  | dict(use_post_transformer_norm=True, rope_type='cat', rope_grid_indexing='ij')
  | dict(rope_temperature=10_000.0),
  'beit': _COMMON | dict(global_pool='avg', use_abs_pos_emb=True),
}
DEFAULTS['distilled'] = DEFAULTS['vit']
_ACTS = {'gelu': 'gelu_erf', 'gelu_tanh': 'gelu_tanh', 'quick_gelu': 'quick_gelu'}
_ACTS |= {'silu': 'silu', 'relu': 'relu'}
_BLOCKS = {
  'Block': 'pre',
  'ResPostBlock': 'post',
  'ParallelScalingBlock': 'parallel',
  'ParallelThingsBlock': 'branches',
}
# Options that concern training, or that arrays and images tell.
_NO_MATTER = re.compile(
  r'num_classes|img_size|in_chans|(\w+_)?drop(_\w+)?_rate|weight_init|fix_init'
  r'|head_init_scale|(dynamic|strict)_img_(size|pad)'
)
_POOLS = {'token': 'token', 'avg': 'gap', 'map': 'map', '': 'none'}


@functools.cache
def architectures() -> dict[str, dict]:
  """Returns {timm's name: its options}."""
  text = Path(__file__).with_suffix('.json').read_text(encoding='utf-8')
  rows = json.loads(text).items()
  return {name: options for names, options in rows for name in names.split()}


def options(name: str) -> dict | None:
  """Returns the options of a name, with or without its tag; None for no ViT of timm."""
  return architectures().get(name.partition('.')[0])


def fields_of(row: dict) -> dict:
  """Returns the fields of `ViT` for timm's options, without those that concern training.

  Raises:
    ValueError: for an option that is unknown, or has no meaning here.
  """
  row = dict(row)
  kind = row.pop('class', 'vit')
  get = _Options(DEFAULTS[kind], row)
  fields = _shared(get)
  fields |= _eva(get) if kind == 'eva' else _beit(get) if kind == 'beit' else _vit(get)
  if kind == 'distilled':
    fields |= dict(classifier='distilled', cls_token=None, registers=1)
  if 'num_classes' in row:
    fields['num_classes'] = row['num_classes'] or None
  for key in sorted(row.keys() - get.read):
    if _NO_MATTER.fullmatch(key):
      continue
    raise ValueError(
      f'{key}={row[key]!r} of timm is not read: it may compute something else'
    )
  return fields


class _Options:
  """timm's options over their defaults; notes which were read."""

  def __init__(self, defaults: dict, row: dict):
    self.values, self.read = defaults | row, set()

  def __call__(self, key: str, *known):
    """Returns an option, None if it is absent; ValueError unless it is one of `known`."""
    self.read.add(key)
    value = self.values.get(key)
    if known and value not in known:
      expected = f'{list(known)} are{did_you_mean(str(value), map(str, known))}'
      raise ValueError(f'{key}={value!r} of timm is not read: {expected}')
    return value


def _shared(get: _Options) -> dict:
  """Returns the fields whose options all classes share."""
  patch, width = get('patch_size'), get('embed_dim')
  norm = re.fullmatch(
    r'(LayerNorm|RmsNorm|layernorm|rmsnorm)(?:\(eps=([\d.e-]+)\))?', get('norm_layer')
  )
  if not norm:
    raise ValueError(f'norm_layer={get("norm_layer")!r} of timm is not read')
  classifier = _POOLS[get('global_pool', *_POOLS)]
  has_cls = get('class_token')
  fields = dict(
    patch_size=tuple(patch) if isinstance(patch, list | tuple) else (patch, patch),
    width=width,
    depth=get('depth'),
    num_heads=get('num_heads'),
    mlp_dim=int(width * get('mlp_ratio')),
    classifier=classifier,
    cls_token=True if has_cls and classifier != 'token' else None,
    norm='rms' if norm[1].lower() == 'rmsnorm' else 'layer',
    norm_eps=float(norm[2] or 1e-6),
    layer_scale=get('init_values') or None,
    posemb_tokens='patches' if get('no_embed_class') else 'prefix',
  )
  if classifier == 'token' and not has_cls:
    raise ValueError("global_pool='token' of timm needs its class_token")
  return fields


def _vit(get: _Options) -> dict:
  act = re.sub(r'\W.*', '', str(get('act_layer') or 'gelu')).lower()
  mlp = str(get('mlp_layer') or '')
  extra = {
    'patches': get('embed_norm_layer'),
    'tokens': get('pre_norm'),
    'qk': get('qk_norm'),
    'attention': get('scale_attn_norm'),
    'mlp': get('scale_mlp_norm'),
  }
  fields = dict(
    registers=get('reg_tokens') or 0,
    posemb=get('pos_embed', 'learn', 'none'),
    qkv_bias='qkv' if get('qkv_bias') else 'none',
    dense_bias=get('proj_bias'),
    patch_bias=not get('pre_norm'),
    extra_norms=tuple(name for name, there in extra.items() if there),
    block=_BLOCKS[get('block_fn', None, *_BLOCKS) or 'Block'],
    act=_act(act),
  )
  get('pool_include_prefix', None, False)
  get('attn_layer', None, 'attn')
  if mlp:
    # Their GluMlp splits its hidden layer: half is the gate. SwiGLU has two layers.
    if mlp not in ('SwiGLU', 'GluMlp(act_layer=SiLU, gate_last=False)'):
      raise ValueError(f'mlp_layer={mlp!r} of timm is not read')
    hidden = int(get('embed_dim') * get('mlp_ratio'))
    fields |= dict(mlp='swiglu', mlp_dim=hidden if mlp == 'SwiGLU' else hidden // 2)
  pooled = get('fc_norm')
  pooled = get('global_pool') == 'avg' if pooled is None else pooled
  return fields | dict(final_norm=_final(get('final_norm'), pooled))


def _act(name: str) -> str:
  if name not in _ACTS:
    raise ValueError(f'act_layer={name!r} of timm is not read: one of {list(_ACTS)} is')
  return _ACTS[name]


def _final(norm: bool, pooled: bool) -> str:
  return 'pooled' if pooled else 'tokens' if norm else 'none'


def _eva(get: _Options) -> dict:
  ratio, width = get('mlp_ratio'), get('embed_dim')
  attention = get('attn_type', 'eva', 'rope')
  extra = {
    'tokens': get('use_pre_transformer_norm'),
    'qk': get('qk_norm'),
    'attention': get('scale_attn_inner'),
    'mlp': get('scale_mlp'),
  }
  get('qkv_fused')  # an arrangement of the arrays
  fields = dict(
    registers=get('num_reg_tokens') or 0,
    posemb='learn' if get('use_abs_pos_emb') else 'none',
    qkv_bias='none' if not get('qkv_bias') else 'qv' if attention == 'eva' else 'qkv',
    patch_bias=not get('use_pre_transformer_norm'),
    extra_norms=tuple(name for name, there in extra.items() if there),
    block='post' if get('use_post_norm') else 'pre',
    layer_scale_where='attention' if get('attn_only_layer_scale') else 'both',
    act='silu' if get('swiglu_mlp') else 'gelu_erf',
    mlp='swiglu' if get('swiglu_mlp') else 'mlp',
  )
  if align := get('swiglu_align_to'):
    fields['mlp_dim'] = math.ceil(int(width * ratio) / align) * align
  heads = get('num_kv_heads')
  if heads and set(heads) != {get('num_heads')}:
    fields['kv_heads'] = tuple(heads)
  if get('global_pool') == 'map':
    # They pool over all tokens.
    fields |= dict(map_prefix=True, map_heads=get('attn_pool_num_heads'))
    fields['map_mlp_dim'] = int(width * (get('attn_pool_mlp_ratio') or ratio))
  pooled = get('use_fc_norm')
  pooled = get('global_pool') == 'avg' if pooled is None else pooled
  norm = get('use_post_transformer_norm')
  return fields | _rope(get) | dict(final_norm=_final(norm, pooled))


def _rope(get: _Options) -> dict:
  if not get('use_rot_pos_emb'):
    return {}
  kind, axes = get('rope_type', 'cat', 'mixed', 'dinov3'), get('rope_grid_indexing')
  first, base = get('rope_grid_offset') or 0, float(get('rope_temperature'))
  half, reference = get('rope_rotate_half') or False, get('ref_feat_shape')
  fields = {
    ('mixed', 'xy', 0, 10.0, False): 'mixed',
    ('cat', 'xy', 0, 100.0, False): 'axial',
    ('cat', 'ij', 0, 10_000.0, False): 'eva',
    ('cat', 'xy', 0, 10_000.0, False): 'pe',
    ('cat', 'xy', 1, 10_000.0, False): 'pe',
    ('dinov3', 'ij', 0, 100.0, True): 'dinov3',
  }
  key = (kind, axes, int(first), base, half)
  if key not in fields or (fields[key] == 'pe' and get('class_token') != bool(first)):
    raise ValueError(f'rotary positions {key} of timm are not read')
  rope = {'rope': fields[key]}
  if reference and rope['rope'] in ('eva', 'pe'):
    rope['rope_reference'] = tuple(reference)
  if rescale := get('rope_rescale_coords'):
    rope['rope_augment'] = (0.0, 1.0, rescale)
  return rope


def _beit(get: _Options) -> dict:
  pooled = get('use_fc_norm')
  pooled = get('global_pool') == 'avg' if pooled is None else pooled
  shared, gated = get('use_shared_rel_pos_bias'), get('swiglu_mlp')
  layer = get('use_rel_pos_bias')
  if shared and layer:
    raise ValueError(
      'timm would add the tables of use_shared_rel_pos_bias and of layers'
    )
  return dict(
    posemb='learn' if get('use_abs_pos_emb') else 'none',
    relpos='layer' if layer else 'shared' if shared else 'none',
    qkv_bias='qv' if get('qkv_bias') else 'none',
    final_norm=_final(True, pooled),
    extra_norms=('mlp',) if get('scale_mlp') else (),
    act='silu' if gated else 'gelu_erf',
    mlp='swiglu' if gated else 'mlp',
  )
