"""The options of timm's Vision Transformers that build a model of given fields.

The inverse of `models.timm.fields_of`: a name of timm, and options over its own. Some options
have no text, such as classes of blocks and norms with an epsilon: only names have them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.models import timm, vit
from vit_jax.weights import configs
from vit_jax.weights.formats import TRAINING

_USUAL = {f.name: f.default for f in dataclasses.fields(vit.ViT)}
# Fields that no option tells: those of training alone, and what the file says elsewhere.
_UNTOLD = TRAINING - {'layer_scale'} | {'num_classes', 'parent', 'name'}
_POOLS = {'token': 'token', 'distilled': 'token', 'gap': 'avg', 'map': 'map'}
_ROPES = {
  'eva': dict(rope_type='cat', rope_grid_indexing='ij', rope_temperature=10_000.0),
  'axial': dict(rope_type='cat', rope_grid_indexing='xy', rope_temperature=100.0),
  'mixed': dict(rope_type='mixed', rope_grid_indexing='xy', rope_temperature=10.0),
  'pe': dict(rope_type='cat', rope_grid_indexing='xy', rope_temperature=10_000.0),
  'dinov3': dict(rope_type='dinov3', rope_grid_indexing='ij', rope_temperature=100.0),
}


class Architecture(NamedTuple):
  """The model `create_model(name, **args)` of timm.

  Attributes:
    kind: a key of `models.timm.DEFAULTS`.
    options: all options of the model, those of the name and `args` over them.
  """

  name: str
  kind: str
  args: dict[str, Any]
  options: dict[str, Any]


def architecture(fields: Mapping) -> Architecture:
  """Returns timm's model of these fields, by the nearest of its names.

  Raises:
    ValueError: timm has none. It names a field that the nearest model has otherwise.
  """
  target = _comparable({key: fields[key] for key in _USUAL if key in fields})
  rows = []
  for name, row in timm.architectures().items():
    other = _comparable(_USUAL | timm.fields_of(row))
    differ = [key for key, value in target.items() if value != other[key]]
    # Among equals a plain ViT's name, and a short one; timm's own tests come last.
    order = (
      name.startswith('test_'),
      len(differ),
      not name.startswith('vit_'),
      len(name),
    )
    rows.append((order, name, row, differ))
  best = None
  for _, name, row, differ in sorted(rows, key=lambda x: x[0]):
    kind = row.get('class', 'vit')
    usual = timm.DEFAULTS[kind] | {k: v for k, v in row.items() if k != 'class'}
    settings = _WRITERS[kind](target, usual)
    args = settings.pop('', {})
    for key in differ:
      args |= settings.get(key, {})
    args = {k: v for k, v in args.items() if not _equal(k, v, usual.get(k))}
    try:
      other = _comparable(_USUAL | timm.fields_of(row | args))
    except ValueError:  # options that do not go together
      continue
    wrong = [key for key in target if target[key] != other[key]]
    if not wrong:
      return Architecture(name, kind, args, usual | args)
    if best is None or len(wrong) < len(best[0]):
      best = wrong, other
  assert best, 'some name of timm has consistent options'
  wrong, other = best
  raise ValueError(
    f'timm cannot express {wrong[0]}={fields[wrong[0]]!r}, but {other[wrong[0]]!r}'
  )


def equal(flat: dict, fields: dict, size: tuple[int, int]) -> tuple[dict, dict]:
  """Returns (parameters, fields) of a ViT as timm has it, with equal outputs.

  Beside registers without a position, the cls token absorbs its own; a head has a bias; and
  places of the Perception Encoder are scaled to the grid that images of this size have.
  """
  flat, fields, table = dict(flat), dict(fields), vit.FAMILY.position
  if fields['posemb_tokens'] == 'cls' and vit.has_cls(fields) and table in flat:
    fields['posemb_tokens'] = 'prefix'
    if fields['registers']:
      first, rest = np.split(flat[table], [1], axis=1)
      flat |= {'cls': flat['cls'] + first, table: rest}
      fields['posemb_tokens'] = 'patches'
  if not fields['head_bias'] and 'head/kernel' in flat:
    flat['head/bias'] = np.zeros(flat['head/kernel'].shape[-1:], np.float32)
    fields['head_bias'] = True
  if fields['rope'] == 'pe' and fields['rope_reference'] is None:
    stride = vit.FAMILY.stride(fields)
    fields['rope_reference'] = tuple(n // s for n, s in zip(size, stride, strict=True))
  return flat, fields


def _equal(option: str, value, usual) -> bool:
  off = not value and not usual and option not in ('fc_norm', 'use_fc_norm')
  return off or value == usual  # an absent fc_norm follows from the pooling


def _comparable(fields: dict) -> dict:
  """Returns the fields that files of timm tell, equal for equal models."""
  same = {
    'cls_token': vit.has_cls(fields),
    'layer_scale': fields['layer_scale'] is not None,
    'map_heads': fields['map_heads'] or fields['num_heads'],
    'map_mlp_dim': fields['map_mlp_dim'] or fields['mlp_dim'],
  }
  if fields['classifier'] != 'map':
    same |= dict(map_heads=None, map_mlp_dim=None, map_prefix=False)
  return {k: v for k, v in (fields | same).items() if k not in _UNTOLD}


# Each returns {field: {option: value}} to set where the field differs from the name's, and
# at '' options to set always.


def _shared(fields: dict, usual: dict) -> dict:
  # The hidden layer of a GluMlp holds the gate, too.
  halves = 2 if str(usual.get('mlp_layer')).startswith('GluMlp') else 1
  hidden = halves * fields['mlp_dim']
  ratio = {'mlp_ratio': configs.timm_ratio(hidden, fields['width'])}
  if (align := usual.get('swiglu_align_to')) and hidden % align:
    ratio['swiglu_align_to'] = 0
  return {
    'patch_size': {'patch_size': configs.one(fields['patch_size'])},
    'width': {'embed_dim': fields['width'], **ratio},
    'depth': {'depth': fields['depth']},
    'num_heads': {'num_heads': fields['num_heads']},
    'mlp_dim': ratio,
    'cls_token': {'class_token': fields['cls_token']},
    'classifier': {'global_pool': _POOLS.get(fields['classifier'], '')},
    'posemb_tokens': {'no_embed_class': fields['posemb_tokens'] == 'patches'},
    'layer_scale': {'init_values': 1e-5 if fields['layer_scale'] else 0.0},
  }


def _vit(fields: dict, usual: dict) -> dict:
  norms, final = fields['extra_norms'], fields['final_norm']
  norm = {}
  if fields['norm_eps'] == 1e-6:
    norm['norm_layer'] = {'layer': 'layernorm', 'rms': 'rmsnorm'}[fields['norm']]
  return _shared(fields, usual) | {
    'registers': {'reg_tokens': fields['registers']},
    'posemb': {'pos_embed': fields['posemb']},
    'qkv_bias': {'qkv_bias': fields['qkv_bias'] == 'qkv'},
    'dense_bias': {'proj_bias': fields['dense_bias']},
    'norm': norm,
    'norm_eps': norm,
    'extra_norms': {
      'pre_norm': 'tokens' in norms,
      'qk_norm': 'qk' in norms,
      'scale_attn_norm': 'attention' in norms,
      'scale_mlp_norm': 'mlp' in norms,
    },
    'act': {'act_layer': fields['act'].replace('_erf', '')},
    'final_norm': {'final_norm': final != 'none', 'fc_norm': final == 'pooled'},
  }


def _eva(fields: dict, usual: dict) -> dict:
  norms, final, rope = fields['extra_norms'], fields['final_norm'], fields['rope']
  heads, rotary = fields['kv_heads'], {'use_rot_pos_emb': rope in _ROPES}
  if rope in _ROPES:
    rotary |= _ROPES[rope] | {'rope_rotate_half': rope == 'dinov3'}
    rotary['rope_grid_offset'] = float(rope == 'pe' and fields['cls_token'])
  grouped = {'num_kv_heads': list(heads or [fields['num_heads']] * fields['depth'])}
  if heads:
    grouped |= {'qkv_fused': False}
  reference = fields['rope_reference']
  width, hidden = fields['width'], fields['map_mlp_dim'] or fields['mlp_dim']
  return _shared(fields, usual) | {
    '': rotary | (grouped if usual.get('num_kv_heads') else {}),
    'kv_heads': grouped,
    # Nothing that JSON has takes the scale of a name away.
    'layer_scale': {'init_values': 1e-5} if fields['layer_scale'] else {},
    'registers': {'num_reg_tokens': fields['registers']},
    'posemb': {'use_abs_pos_emb': fields['posemb'] == 'learn'},
    'qkv_bias': {
      'qkv_bias': fields['qkv_bias'] != 'none',
      'attn_type': 'rope' if fields['qkv_bias'] == 'qkv' or heads else 'eva',
    },
    'extra_norms': {
      'use_pre_transformer_norm': 'tokens' in norms,
      'qk_norm': 'qk' in norms,
      'scale_attn_inner': 'attention' in norms,
      'scale_mlp': 'mlp' in norms,
    },
    'layer_scale_where': {
      'attn_only_layer_scale': fields['layer_scale_where'] == 'attention'
    },
    'mlp': {'swiglu_mlp': fields['mlp'] == 'swiglu'},
    'block': {'use_post_norm': fields['block'] == 'post'},
    'rope_reference': {'ref_feat_shape': list(reference)} if reference else {},
    'map_heads': {'attn_pool_num_heads': fields['map_heads']},
    'map_mlp_dim': {'attn_pool_mlp_ratio': configs.timm_ratio(hidden, width)},
    'final_norm': {
      'use_fc_norm': final == 'pooled',
      'use_post_transformer_norm': final == 'tokens',
    },
  }


def _beit(fields: dict, usual: dict) -> dict:
  return _shared(fields, usual) | {
    'cls_token': {},
    'posemb_tokens': {},
    'posemb': {'use_abs_pos_emb': fields['posemb'] == 'learn'},
    'relpos': {
      'use_rel_pos_bias': fields['relpos'] == 'layer',
      'use_shared_rel_pos_bias': fields['relpos'] == 'shared',
    },
    'qkv_bias': {'qkv_bias': fields['qkv_bias'] != 'none'},
    'extra_norms': {'scale_mlp': 'mlp' in fields['extra_norms']},
    'mlp': {'swiglu_mlp': fields['mlp'] == 'swiglu'},
    'final_norm': {'use_fc_norm': fields['final_norm'] == 'pooled'},
  }


_WRITERS = {'vit': _vit, 'distilled': _vit, 'eva': _eva, 'beit': _beit}
