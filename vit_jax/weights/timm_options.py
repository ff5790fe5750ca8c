"""Finds the name and the options with which timm builds a ViT of given fields.

This is the inverse of `models.timm.fields_of`. It starts from the nearest name of timm and
overrides options of that name. JSON cannot express some options, such as a class of blocks
or a norm with its own epsilon; only a name can bring those.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.models import timm, vit_later
from vit_jax.weights import configs
from vit_jax.weights.formats import TRAINING

USUAL = {f.name: f.default for f in dataclasses.fields(vit_later.LaterViT)}
# Fields without a timm option: training-only ones, and those stored elsewhere in the file.
_WITHOUT_OPTION = TRAINING - {'layer_scale'} | {'num_classes', 'parent', 'name'}
# Our `classifier` -> timm's `global_pool`.
_POOLS = {'token': 'token', 'distilled': 'token', 'gap': 'avg', 'map': 'map'}


class Architecture(NamedTuple):
  """The model that timm's `create_model(name, **args)` builds.

  Attributes:
    name: timm's name.
    kind: the model's class, a key of `models.timm.DEFAULTS`.
    args: options that override those of the name.
    options: all options of the model, `args` included.
  """

  name: str
  kind: str
  args: dict[str, Any]
  options: dict[str, Any]


def find(fields: Mapping) -> Architecture:
  """Finds the timm model with these fields, starting from the nearest name.

  Raises:
    ValueError: if timm has no such model. It names a field in which the nearest one differs.
  """
  target = _comparable({key: fields[key] for key in USUAL if key in fields})
  rows = [(n, row, _compare(target, row)) for n, row in timm.architectures().items()]
  # Nearest first. Ties: prefer `vit_*`, then short names; timm's `test_*` come last.
  rows.sort(key=lambda x: (not x[0].startswith('vit_'), len(x[0])))
  rows.sort(key=lambda x: (x[0].startswith('test_'), len(x[2])))
  misses = []
  for name, row, differ in rows:
    kind = row.get('class', 'vit')
    usual = timm.DEFAULTS[kind] | {k: v for k, v in row.items() if k != 'class'}
    settings = _settings(target, kind, usual)
    args = settings.pop('', {})
    for key in differ:
      args |= settings.get(key, {})
    args = {k: v for k, v in args.items() if not _equal(k, v, usual.get(k))}
    try:
      wrong = _compare(target, row | args)
    except ValueError:  # timm does not combine these options
      continue
    if not wrong:
      return Architecture(name, kind, args, usual | args)
    misses.append(wrong)
  key, value = next(iter(min(misses, key=len).items()))
  raise ValueError(f'timm cannot express {key}={fields[key]!r}, only {value!r}')


def write_vit(fields: dict) -> dict[str, Any]:
  """Returns the options of timm's class 'vit' for these fields."""
  settings = _settings(_comparable(USUAL | fields), 'vit', {})
  return {k: v for key in (*fields, 'cls_token') for k, v in settings[key].items()}


def _compare(target: dict, row: dict) -> dict:
  """Returns the fields in which the timm model with options `row` differs from `target`."""
  fields = _comparable(USUAL | timm.fields_of(row))
  return {key: fields[key] for key, value in target.items() if value != fields[key]}


def adapt(flat: dict, fields: dict, size: tuple[int, int]) -> tuple[dict, dict]:
  """Rewrites a ViT's parameters and fields into timm's form, with equal outputs.

  - Where registers have no position, the position of the class token is added to the
    token itself.
  - A head without a bias gets one of zeros.
  - Rotary positions of the Perception Encoder are scaled to the grid of `size`.
  """
  flat, fields, table = dict(flat), dict(fields), vit_later.FAMILY.position
  if fields['posemb_tokens'] == 'cls' and vit_later.has_cls(fields) and table in flat:
    fields['posemb_tokens'] = 'prefix'
    if fields['registers']:
      first, rest = np.split(flat[table], [1], axis=1)
      flat |= {'cls': flat['cls'] + first, table: rest}
      fields['posemb_tokens'] = 'patches'
  if not fields['head_bias'] and 'head/kernel' in flat:
    flat['head/bias'] = np.zeros(flat['head/kernel'].shape[-1:], np.float32)
    fields['head_bias'] = True
  if fields['rope'] == 'pe' and fields['rope_reference'] is None:
    stride = vit_later.FAMILY.stride(fields)
    fields['rope_reference'] = tuple(n // s for n, s in zip(size, stride, strict=True))
  return flat, fields


def _equal(option: str, value, usual) -> bool:
  """Whether two values of a timm option mean the same: None, False and 0 often do."""
  # An absent fc_norm is not False: it follows from the pooling.
  off = not value and not usual and option not in ('fc_norm', 'use_fc_norm')
  return off or value == usual


def _comparable(fields: dict) -> dict:
  """Returns the fields that timm's options set. They are equal for equivalent models."""
  fields = fields | configs.unify(fields)
  if fields['classifier'] != 'map':
    fields |= dict(map_heads=None, map_mlp_dim=None, map_prefix=False)
  return {k: v for k, v in fields.items() if k not in _WITHOUT_OPTION}


def _settings(fields: dict, kind: str, usual: dict) -> dict[str, dict]:
  """Returns {field: {option: value}}: the options to set if a field differs.

  Options under the key '' are always set. `usual` are the options of a timm name.
  """
  # timm counts the gate of a GluMlp as a part of its hidden layer.
  halves = 2 if str(usual.get('mlp_layer')).startswith('GluMlp') else 1
  hidden, names = halves * fields['mlp_dim'], timm.OPTIONS[kind]
  ratio = {'mlp_ratio': configs.timm_ratio(hidden, fields['width'])}
  if (align := usual.get('swiglu_align_to')) and hidden % align:
    ratio['swiglu_align_to'] = 0

  def own(values: dict) -> dict:
    """Renames options to those of the timm class, and drops the ones that it lacks."""
    return {names[k]: v for k, v in values.items() if k in names}

  norms, final = fields['extra_norms'], fields['final_norm']
  has_norm = final == 'tokens' if kind == 'eva' else final != 'none'
  shared = {
    'patch_size': {'patch_size': configs.int_or_pair(fields['patch_size'])},
    'width': {'embed_dim': fields['width'], **ratio},
    'depth': {'depth': fields['depth']},
    'num_heads': {'num_heads': fields['num_heads']},
    'mlp_dim': ratio,
    'cls_token': {'class_token': fields['cls_token']},
    'classifier': {'global_pool': _POOLS.get(fields['classifier'], '')},
    'posemb_tokens': {'no_embed_class': fields['posemb_tokens'] == 'patches'},
    'layer_scale': {'init_values': 1e-5 if fields['layer_scale'] else 0.0},
    'registers': own({'registers': fields['registers']}),
    # The first one, a norm of patches, is left out, because JSON cannot express it.
    'extra_norms': own({x: x in norms for x in timm.EXTRA_NORMS[1:]}),
    'final_norm': own({'final': has_norm, 'pooled': final == 'pooled'}),
    'qkv_bias': {'qkv_bias': fields['qkv_bias'] != 'none'},
  }
  gated = {
    'posemb': {'use_abs_pos_emb': fields['posemb'] == 'learn'},
    'mlp': {'swiglu_mlp': fields['mlp'] == 'swiglu'},
  }
  if kind == 'eva':
    return shared | gated | _eva(fields, usual)
  if kind == 'relpos':
    return shared | _relpos(fields)
  return shared | (gated | _beit(fields) if kind == 'beit' else _vit(fields))


def _vit(fields: dict) -> dict[str, dict]:
  norm = {}
  if fields['norm_eps'] == 1e-6:
    norm['norm_layer'] = {'layer': 'layernorm', 'rms': 'rmsnorm'}[fields['norm']]
  return {
    'posemb': {'pos_embed': fields['posemb']},
    'qkv_bias': {'qkv_bias': fields['qkv_bias'] == 'qkv'},
    'dense_bias': {'proj_bias': fields['dense_bias']},
    'norm': norm,
    'norm_eps': norm,
    'act': {'act_layer': fields['act'].replace('_erf', '')},
  }


def _eva(fields: dict, usual: dict) -> dict[str, dict]:
  rope, heads = fields['rope'], fields['kv_heads']
  rotary = {'use_rot_pos_emb': rope in timm.ROPES}
  if rope in timm.ROPES:
    rotary |= zip(timm.ROPE, timm.ROPES[rope], strict=True)
    rotary['rope_grid_offset'] = float(rope == 'pe' and fields['cls_token'])
  grouped = {'num_kv_heads': list(heads or [fields['num_heads']] * fields['depth'])}
  if heads:
    grouped |= {'qkv_fused': False}
  reference, where = fields['rope_reference'], fields['layer_scale_where']
  width, hidden = fields['width'], fields['map_mlp_dim'] or fields['mlp_dim']
  attention = 'rope' if fields['qkv_bias'] == 'qkv' or heads else 'eva'
  has_bias = fields['qkv_bias'] != 'none'
  return {
    '': rotary | (grouped if usual.get('num_kv_heads') else {}),
    'kv_heads': grouped,
    # JSON cannot express "no layer scale", so it cannot be switched off.
    'layer_scale': {'init_values': 1e-5} if fields['layer_scale'] else {},
    'qkv_bias': {'qkv_bias': has_bias, 'attn_type': attention},
    'layer_scale_where': {'attn_only_layer_scale': where == 'attention'},
    'block': {'use_post_norm': fields['block'] == 'post'},
    'rope_reference': {'ref_feat_shape': list(reference)} if reference else {},
    'map_heads': {'attn_pool_num_heads': fields['map_heads']},
    'map_mlp_dim': {'attn_pool_mlp_ratio': configs.timm_ratio(hidden, width)},
  }


def _beit(fields: dict) -> dict[str, dict]:
  relpos = fields['relpos']
  return {
    'cls_token': {},
    'posemb_tokens': {},
    'relpos': {
      'use_rel_pos_bias': relpos == 'layer',
      'use_shared_rel_pos_bias': relpos == 'shared',
    },
  }


def _relpos(fields: dict) -> dict[str, dict]:
  dim = fields['relpos_dim']
  return {
    'posemb_tokens': {},
    'relpos': {'shared_rel_pos': fields['relpos'] == 'shared'},
    'relpos_dim': {'rel_pos_type': 'mlp' if dim else 'bias', 'rel_pos_dim': dim},
  }
