"""timm's Vision Transformers: the options behind its names, and their meaning here.

A file that timm writes holds only the options that differ from those of its architecture.
The architecture's name therefore decides about LayerScale, registers, activation, positions
and pooling. timm.json is the registry of timm 1.0.31: for each name the options that differ
from the defaults of its class. timm_classes.json has the classes of the weights.
"""

import functools
import json
import math
import re
from pathlib import Path

from vit_jax import models
from vit_jax.errors import did_you_mean
from vit_jax.models.vit import VARIANTS

# The default options of timm's classes, except those that are None, False or 0.
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
  'relpos': _COMMON
  | dict(global_pool='avg', class_token=False, fc_norm=False, init_values=1e-6)
  | dict(rel_pos_type='mlp'),
}
DEFAULTS['distilled'] = DEFAULTS['vit']
# Options that have the same meaning in all classes, but different names.
EXTRA_NORMS = ('patches', 'tokens', 'qk', 'attention', 'mlp')
OPTIONS = {
  'vit': dict(registers='reg_tokens', final='final_norm', pooled='fc_norm')
  | dict(patches='embed_norm_layer', tokens='pre_norm', qk='qk_norm')
  | dict(attention='scale_attn_norm', mlp='scale_mlp_norm'),
  'eva': dict(registers='num_reg_tokens', final='use_post_transformer_norm')
  | dict(pooled='use_fc_norm', tokens='use_pre_transformer_norm', qk='qk_norm')
  | dict(attention='scale_attn_inner', mlp='scale_mlp'),
  'beit': dict(pooled='use_fc_norm', mlp='scale_mlp'),
  'relpos': dict(pooled='fc_norm', qk='qk_norm'),
}
OPTIONS['distilled'] = OPTIONS['vit']
# Options of rotary positions. ROPES: {kind in `nn.positions`: values of these options}.
ROPE = ('rope_type', 'rope_grid_indexing', 'rope_temperature', 'rope_rotate_half')
ROPES = {
  'eva': ('cat', 'ij', 10_000.0, False),
  'axial': ('cat', 'xy', 100.0, False),
  'mixed': ('mixed', 'xy', 10.0, False),
  'pe': ('cat', 'xy', 10_000.0, False),
  'dinov3': ('dinov3', 'ij', 100.0, True),
}
_ACTS = {'gelu': 'gelu_erf', 'gelu_tanh': 'gelu_tanh', 'quick_gelu': 'quick_gelu'}
_ACTS |= {'silu': 'silu', 'relu': 'relu'}
_BLOCKS = {
  'Block': 'pre',
  'ResPostBlock': 'post',
  'ResPostRelPosBlock': 'post',
  'ParallelScalingBlock': 'parallel',
  'ParallelThingsBlock': 'branches',
}
# Options that concern training only, or that follow from the arrays and the image size.
NO_MATTER = (
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


@functools.cache
def _classes() -> dict[str, int | None]:
  """Returns {name: number of classes}, None for no head.

  timm_classes.json lists the names whose weights do not have 1,000 classes, and the names
  with a tag that have another number than without it. For ViTs without a tag, timm.json has
  the number.
  """
  text = Path(__file__).with_name('timm_classes.json').read_text(encoding='utf-8')
  rows = json.loads(text).items()
  return {name: int(number) or None for number, names in rows for name in names.split()}


def classes_of(name: str) -> dict:
  """Returns {'num_classes': number} if it is unusual for the weights of this name."""
  names = [n for n in (name, name.partition('.')[0]) if n in _classes()]
  return {'num_classes': _classes()[names[0]]} if names else {}


def options(name: str) -> dict | None:
  """Returns the options of a name, with or without a tag; None if timm has no such ViT."""
  return architectures().get(name.partition('.')[0])


def fields_of(row: dict) -> dict:
  """Returns the fields of `ViT` for timm's options. Options of training are left out.

  Raises:
    ValueError: for an option that is unknown, or has no meaning here.
  """
  row = dict(row)
  kind = row.pop('class', 'vit')
  get = _Options(DEFAULTS[kind], row)
  fields = _shared(get, OPTIONS[kind])
  fields |= {'eva': _eva, 'beit': _beit, 'relpos': _relpos}.get(kind, _vit)(get)
  if kind == 'distilled':
    fields |= dict(classifier='distilled', cls_token=None, registers=1)
  if 'num_classes' in row:
    fields['num_classes'] = row['num_classes'] or None
  for key in sorted(row.keys() - get.read):
    if not re.fullmatch(NO_MATTER, key):
      value = f'{key}={row[key]!r}'
      raise ValueError(
        f"timm's {value} is not supported: it may change the computation"
      )
  return fields


class _Options:
  """A model's timm options, with their defaults. Records which options were read."""

  def __init__(self, defaults: dict, row: dict):
    self.values, self.read = defaults | row, set()

  def __call__(self, key: str, *known):
    """Returns an option, or None without one; raises ValueError unless it is in `known`."""
    self.read.add(key)
    value = self.values.get(key)
    if known and value not in known:
      near = did_you_mean(str(value), map(str, known))
      raise ValueError(
        f"timm's {key}={value!r} is unknown, expected one of {list(known)}.{near}"
      )
    return value


def _shared(get: _Options, names: dict[str, str]) -> dict:
  """Returns the fields whose options have the same meaning in all classes."""
  own = lambda name: get(names[name]) if name in names else None
  patch, width = get('patch_size'), get('embed_dim')
  norm = re.fullmatch(
    r'(LayerNorm|RmsNorm|layernorm|rmsnorm)(?:\(eps=([\d.e-]+)\))?', get('norm_layer')
  )
  if not norm:
    raise ValueError(
      f"timm's norm_layer={get('norm_layer')!r} is unknown, expected LayerNorm or RmsNorm"
    )
  classifier = _POOLS[get('global_pool', *_POOLS)]
  has_cls = get('class_token')
  if classifier == 'token' and not has_cls:
    raise ValueError("timm's global_pool='token' needs class_token=True")
  pooled = classifier == 'gap' if own('pooled') is None else own('pooled')
  has_final = own('final') if 'final' in names else True
  return dict(
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
    registers=own('registers') or 0,
    patch_bias=not own('tokens'),
    extra_norms=tuple(filter(own, EXTRA_NORMS)),
    final_norm='pooled' if pooled else 'tokens' if has_final else 'none',
  )


def _vit(get: _Options) -> dict:
  act = re.sub(r'\W.*', '', str(get('act_layer') or 'gelu')).lower()
  if act not in _ACTS:
    raise ValueError(
      f"timm's act_layer={act!r} is unknown, expected one of {list(_ACTS)}"
    )
  fields = dict(
    posemb=get('pos_embed', 'learn', 'none'),
    qkv_bias='qkv' if get('qkv_bias') else 'none',
    dense_bias=get('proj_bias'),
    block=_BLOCKS[get('block_fn', None, *_BLOCKS) or 'Block'],
    act=_ACTS[act],
  )
  get('pool_include_prefix', None, False)
  get('attn_layer', None, 'attn')
  # timm's GluMlp has one hidden layer, half of which is the gate. SwiGLU has two layers.
  glu = 'GluMlp(act_layer=SiLU, gate_last=False)'
  if mlp := get('mlp_layer', None, '', 'SwiGLU', glu):
    hidden = int(get('embed_dim') * get('mlp_ratio'))
    fields |= dict(mlp='swiglu', mlp_dim=hidden // 2 if mlp == glu else hidden)
  return fields


def _gated(get: _Options) -> dict:
  """Returns the fields that follow from options which EVA and BEiT share."""
  gated = get('swiglu_mlp')
  return dict(
    posemb='learn' if get('use_abs_pos_emb') else 'none',
    act='silu' if gated else 'gelu_erf',
    mlp='swiglu' if gated else 'mlp',
  )


def _eva(get: _Options) -> dict:
  ratio, width = get('mlp_ratio'), get('embed_dim')
  bias = {'eva': 'qv', 'rope': 'qkv'}[get('attn_type', 'eva', 'rope')]
  get('qkv_fused')  # this option only changes how the arrays are stored
  fields = dict(
    qkv_bias=bias if get('qkv_bias') else 'none',
    block='post' if get('use_post_norm') else 'pre',
    layer_scale_where='attention' if get('attn_only_layer_scale') else 'both',
  )
  if align := get('swiglu_align_to'):
    fields['mlp_dim'] = math.ceil(int(width * ratio) / align) * align
  heads = get('num_kv_heads')
  if heads and set(heads) != {get('num_heads')}:
    fields['kv_heads'] = tuple(heads)
  if get('global_pool') == 'map':
    # EVA's attention pooling reads all tokens, not only patches.
    fields |= dict(map_prefix=True, map_heads=get('attn_pool_num_heads'))
    fields['map_mlp_dim'] = int(width * (get('attn_pool_mlp_ratio') or ratio))
  return _gated(get) | fields | (_rope(get) if get('use_rot_pos_emb') else {})


def _rope(get: _Options) -> dict:
  get('rope_type', 'cat', 'mixed', 'dinov3')
  kind, axes, base, half = map(get, ROPE)
  values = (kind, axes, float(base), half or False)
  rope = next((name for name, row in ROPES.items() if row == values), None)
  first, reference = get('rope_grid_offset') or 0, get('ref_feat_shape')
  if rope is None or first != (rope == 'pe' and get('class_token')):
    raise ValueError(f"timm's rotary positions {(*values, first)} are not supported")
  fields = {'rope': rope}
  if reference and rope in ('eva', 'pe'):
    fields['rope_reference'] = tuple(reference)
  if rescale := get('rope_rescale_coords'):
    fields['rope_augment'] = (0.0, 1.0, rescale)
  return fields


def _beit(get: _Options) -> dict:
  shared, layer = get('use_shared_rel_pos_bias'), get('use_rel_pos_bias')
  if shared and layer:
    raise ValueError(
      'timm would add two biases: that of use_shared_rel_pos_bias, and one per layer'
    )
  return _gated(get) | dict(
    relpos='layer' if layer else 'shared' if shared else 'none',
    qkv_bias='qv' if get('qkv_bias') else 'none',
  )


def _relpos(get: _Options) -> dict:
  hidden = get('rel_pos_dim') or 128  # the default of timm's MLP
  # timm also has the MLP of Swin V2, but in no published model.
  kind = get('rel_pos_type', 'mlp', 'bias')
  return dict(
    posemb='none',
    act='gelu_erf',
    qkv_bias='qkv' if get('qkv_bias') else 'none',
    block=_BLOCKS[get('block_fn', None, 'ResPostRelPosBlock') or 'Block'],
    relpos='shared' if get('shared_rel_pos') else 'layer',
    relpos_dim=hidden if kind == 'mlp' else None,
  )


def _find_variant(name: str) -> tuple[str | None, dict] | None:
  """Returns (variant, fields) of a timm ViT by its name; None for other names.

  See `Family.published`.
  """
  if (row := options(name)) is None:
    return None
  fields, usual = fields_of(row), models.signature('vit').parameters
  shape = tuple(fields[key] for key in ('width', 'depth', 'mlp_dim', 'num_heads'))
  size = next((size for size, numbers in VARIANTS.items() if numbers == shape), None)
  if size is None:
    return None, fields
  variant = f'{size}/{fields["patch_size"][0]}'  # timm's patches are square
  in_variant = {'patch_size', 'width', 'depth', 'mlp_dim', 'num_heads'}
  return variant, {
    key: value
    for key, value in fields.items()
    if key not in in_variant and value != usual[key].default
  }


_SIZES = dict(tiny='Ti', small='S', medium='M', base='B', large='L', so400m='So400m')
_SIZES |= dict(huge='H', giant='g', giantopt='g-opt', gigantic='G')
_SIZE = '|'.join(_SIZES)
# See `Family.published`.
PUBLISHED = (
  (r'(\w+)', _find_variant),
  # Hybrids: vit_base_r50_s16_384, vit_tiny_r_s16_p8_224.
  (
    rf'vit_({_SIZE})_r(\d+)_s(\d+)(?:_\d+)?',
    lambda size, r, s: (f'R{r}+{_SIZES[size]}/{s}', {}),
  ),
  (rf'vit_({_SIZE})_r_s16_p8(?:_\d+)?', lambda size: (f'R+{_SIZES[size]}/16', {})),
)
