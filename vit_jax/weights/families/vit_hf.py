"""The ViTs of transformers: config.json and arrays to a `ViT`, and back.

The model_type of a config names a row of KINDS, which says how its keys and the fields of
`ViT` translate. A key that is absent has the default of its class. Arrays show neither
activation, epsilon nor rotary positions, so the config comes first; where it contradicts
the arrays, the file is refused.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.weights import configs, layers, timm_options
from vit_jax.weights import transforms as t
from vit_jax.weights.configs import Facts
from vit_jax.weights.families import vit
from vit_jax.weights.families.vit import ATTENTION, BLOCK, MAP, MLP, POSITIONS
from vit_jax.weights.formats import TRAINING, Format, Writer
from vit_jax.weights.rename import Arrays, Rule, Table, respelled, table, with_bare

# -- keys of configs and fields -------------------------------------------------------

# Keys that have a field of their own.
_FIELDS = {
  'hidden_size': 'width',
  'num_hidden_layers': 'depth',
  'num_attention_heads': 'num_heads',
  'intermediate_size': 'mlp_dim',
  'patch_size': 'patch_size',
  'hidden_act': 'act',
  'layer_norm_eps': 'norm_eps',
  'rms_norm_eps': 'norm_eps',
  'num_register_tokens': 'registers',
  'layerscale_value': 'layer_scale',
  'layer_scale_init_value': 'layer_scale',
}
_LOAD = {'patch_size': configs.pair, 'hidden_act': configs.activation}
_LOAD |= dict.fromkeys(('layer_norm_eps', 'rms_norm_eps'), configs.epsilon)
_LOAD |= {'layer_scale_init_value': lambda x: x or None}
_SAVE = {'patch_size': configs.one, 'hidden_act': lambda x: configs.HF_ACTS.get(x, x)}
_SAVE |= {'layer_scale_init_value': lambda x: x or 0.0}
# Keys -> (fields, {values of the keys: values of the fields}); one of each stands alone.
_CHOICES = {
  'qkv_bias': ('qkv_bias', {True: 'qkv', False: 'none'}),
  # AIMv2, where the first is also that of the last projection.
  'qkv_bias mlp_bias': (
    'qkv_bias dense_bias',
    {(False, False): ('none', False), (True, True): ('qkv', True)},
  ),
  'query_bias key_bias value_bias': (
    'qkv_bias',
    {(True, False, True): 'qv', (True,) * 3: 'qkv', (False,) * 3: 'none'},
  ),
  'proj_bias mlp_bias': ('dense_bias', {(True, True): True, (False, False): False}),
  'use_gated_mlp': ('mlp', {False: 'mlp', True: 'swiglu'}),
  'rope_theta': ('rope_base', {100.0: None}),
  'is_native use_head': ('posemb', {(False, False): 'learn'}),
  'use_relative_position_bias use_shared_relative_position_bias': (
    'relpos',
    {(False, False): 'none', (True, False): 'layer', (False, True): 'shared'},
  ),
  'use_absolute_position_embeddings': ('posemb', {False: 'none', True: 'learn'}),
  'use_mean_pooling': (
    'classifier final_norm cls_token',
    {True: ('gap', 'pooled', True), False: ('token', 'tokens', True)},
  ),
}


def _choices(keys) -> list[tuple]:
  """Returns (keys, fields, values) of those _CHOICES that a kind has."""
  plural = lambda x: x if isinstance(x, tuple) else (x,)
  rows = {tuple(names.split()): row for names, row in _CHOICES.items()}
  rows = {names: row for names, row in rows.items() if {*names} <= {*keys}}
  return [
    (names, fields.split(), {plural(a): plural(b) for a, b in values.items()})
    for names, (fields, values) in rows.items()
    if not any({*names} < {*others} for others in rows)
  ]


def _to_fields(kind: 'Kind', config: dict) -> dict:
  """Returns the fields that a config states; ValueError for values that are not read."""
  values = {key: config.get(key, usual) for key, usual in kind.keys.items()}
  fields, same = dict(kind.fixed), lambda x: x
  for key in values.keys() & _FIELDS.keys():
    fields[_FIELDS[key]] = _LOAD.get(key, same)(values[key])
  for keys, names, rows in _choices(values):
    theirs = tuple(values[key] for key in keys)
    if theirs not in rows:
      stated = ', '.join(f'{k}={v!r}' for k, v in zip(keys, theirs, strict=True))
      raise ValueError(f'{stated} is not read, only one of {list(rows)}')
    fields |= zip(names, rows[theirs], strict=True)
  if 'mlp_ratio' in values:  # DINOv2's gated MLPs have two thirds of the width
    fields['mlp_dim'] = int(values['hidden_size'] * values['mlp_ratio'])
    if values['use_swiglu_ffn']:
      hidden = (int(fields['mlp_dim'] * 2 / 3) + 7) // 8 * 8
      fields |= {'mlp': 'swiglu', 'act': 'silu', 'mlp_dim': hidden}
  return fields


def _to_config(kind: 'Kind', fields: dict) -> dict:
  """Returns a config; a key keeps its default where the class has no value like ours."""
  config, same = dict(kind.keys), lambda x: x
  for key in config.keys() & _FIELDS.keys():
    config[key] = _SAVE.get(key, same)(fields[_FIELDS[key]])
  for keys, names, rows in _choices(config):
    ours = tuple(fields[name] for name in names)
    theirs = next((key for key, value in rows.items() if value == ours), None)
    config |= zip(keys, theirs or [config[key] for key in keys], strict=True)
  if 'mlp_ratio' in config:
    gated = fields['mlp'] == 'swiglu'
    ratio = round(fields['mlp_dim'] / fields['width'] * (1.5 if gated else 1))
    config |= {'mlp_ratio': ratio, 'use_swiglu_ffn': gated}
    config |= {'hidden_act': 'gelu'} if gated else {}
  return config


# -- names ----------------------------------------------------------------------------


def _rules(kind: 'Kind', fields: dict, bare: bool = False, flat: bool = False) -> Table:
  """Returns the rename table of a kind.

  Args:
    bare: without the prefix of models with a head.
    flat: whether the patch embedding is a dense layer.
  """
  # No file has an array of the name '-'.
  names = {'cls': '-', 'registers': '-', 'positions': '-', 'gate': '-', 'scales': '--'}
  names, heads = names | kind.names, fields['num_heads']
  top = lambda name: f'{"" if bare else kind.prefix}{name}'
  inside = lambda name: top(f'{names["layer"]}.{name}')
  is_table = names['positions'].endswith('.weight')
  vector, rows = (t.vector, t.rows) if is_table else (t.same, t.same)
  patches = t.patches(fields['patch_size']) if flat else t.conv
  bias = 'relative_position_bias'
  mlp, packed = names['mlp'], ()
  if fields.get('mlp') == 'swiglu' and 'gate' not in kind.names:  # DINOv2
    mlp = ('-', 'mlp.weights_out')
    packed = layers.joined(inside('mlp.weights_in'), vit.GATED)
  ends = {'classifier': True, 'visual_projection': False}  # whether it has a bias
  ends = sorted(ends, key=lambda name: ends[name] != fields.get('head_bias', True))
  ends.insert(0 if fields.get('classifier') == 'distilled' else 2, 'cls_classifier')
  rules = table(
    packed,
    Rule(top(names['cls']), 'cls', vector),
    Rule(top(names['registers']), 'registers'),
    Rule(top(names['positions']), POSITIONS, rows),
    layers.dense(top(names['patches']), 'embedding', patches),
    layers.norm(top('embeddings.rms_norm'), 'embedding_norm'),
    layers.norm(top('pre_layrnorm'), 'Transformer/pre_norm'),
    [
      (
        layers.norm(inside(names['norms'][i]), f'{BLOCK}/LayerNorm_{i}'),
        layers.dense(inside(mlp[i]), f'{MLP}/Dense_{i}'),
        Rule(inside(names['scales'][i]), f'{BLOCK}/LayerScale_{i}/gamma'),
      )
      for i in (0, 1)
    ],
    layers.dense(inside(names['gate']), f'{MLP}/gate'),
    [
      layers.into_heads(inside(theirs), f'{ATTENTION}/{ours}', heads)
      for theirs, ours in zip(names['qkv'], layers.QKV, strict=True)
    ],
    layers.out_of_heads(inside(names['out']), f'{ATTENTION}/out', heads),
    Rule(inside(f'attention.attention.{bias}.{bias}_table'), f'{BLOCK}/relpos/table'),
    Rule(top(f'encoder.{bias}.{bias}_table'), 'Transformer/relpos/table'),
    layers.norm(top(names['last']), 'Transformer/encoder_norm'),
    layers.norm(top('pooler.layernorm'), 'pooled_norm'),
    layers.dense(top('pooler.dense'), 'pre_logits'),
    layers.attention_pool(top('head'), MAP, heads),
    [layers.dense(end, 'head') for end in ends],
    layers.dense('distillation_classifier', 'head_dist'),
  )
  # As the library has named its modules since version 5: some files have these names.
  newer = respelled(
    rules,
    (rf'attention\.attention\.{bias}', bias),
    (rf'encoder\.{bias}', 'shared_position_bias'),
    (r'^layer\.', 'model.layer.'),
    *layers.TRANSFORMERS_5,
  )
  rules = table(rules, newer)
  rules = table(rules, respelled(rules, (r'encoder\.layer\.', 'layers.')))
  return with_bare(rules, kind.prefix)


# -- the kinds of models --------------------------------------------------------------


class Kind(NamedTuple):
  """The models of one model_type."""

  name: str  # the first part of the names of its classes
  prefix: str  # names of parameters begin with it, beside a head
  names: dict[str, Any]  # names that differ between kinds
  keys: dict[str, Any]  # keys of the config that decide -> defaults of the class
  fixed: dict[str, Any]  # fields that all its models have
  # Ends of the names of its classes, with fields of the pooling and the head.
  heads: list[tuple[str, dict]]
  # The published preprocessor_config.json, for files without one; None: unknown.
  processor: dict | None = None
  square: bool = False  # whether it takes square images only
  mask_token: list[int] | None = None  # first axes of the one that its class demands


def _kinds() -> dict[str, Kind]:
  """Returns the rows of vit_hf.json; one that is `like` another one holds the differences."""
  rows, kinds = json.loads(Path(__file__).with_suffix('.json').read_text('utf-8')), {}
  for kind, row in rows.items():
    usual = kinds[row.pop('like')]._asdict() if 'like' in row else {}
    parts = {k: (usual.get(k) or {}) | x for k, x in row.items() if isinstance(x, dict)}
    row = {**usual, **row, **parts}
    row['keys'] = {k: x for k, x in row['keys'].items() if x is not None}
    row['fixed'] = {
      k: tuple(x) if isinstance(x, list) else x for k, x in row['fixed'].items()
    }
    kinds[kind] = Kind(**row)
  return kinds


# A model is written as the first kind that has all of its fields.
KINDS = _kinds()
_NAFLEX = 'siglip2_vision_model'
# Configs of image and text: that of the image tower is in their 'vision_config'.
_WHOLE = {'clip': 'clip_vision_model', 'siglip': 'siglip_vision_model'}
_WHOLE |= {'siglip2': _NAFLEX}


def _inner(config: dict) -> tuple[str, dict]:
  """Returns (key of KINDS, the config of the image tower)."""
  kind = config.get('model_type', 'vit')
  if kind in _WHOLE:
    old = configs.section(config, 'vision_config_dict')
    return _WHOLE[kind], configs.section(config, 'vision_config') | old
  if kind not in KINDS:
    raise ValueError(f'model_type is {kind!r}, expected one of {[*KINDS, *_WHOLE]}')
  if kind == 'beit' and 'BeitForMaskedImageModeling' in config.get('architectures', ()):
    config = config | {'use_mean_pooling': False}  # which has a norm of every token
  return kind, config


# -- read -----------------------------------------------------------------------------


def facts(config: dict, source: str) -> Facts:
  """Returns the facts of a config, also of one of image and text."""
  if not config:
    return Facts({'act': 'gelu_erf'})
  name, inner = _inner(config)
  kind = KINDS[name]
  size = inner.get('image_size', 224)
  if name == _NAFLEX:  # takes any size: here that of its positions
    size = math.isqrt(inner.get('num_patches', 256)) * inner.get('patch_size', 16)
  fields = _to_fields(kind, inner)
  return configs.hf_facts(config, fields, configs.pair(size), kind.processor)


def _read_rules(arrays: Arrays, facts: Facts) -> Table:
  name, _ = _inner(facts.config or {})
  return _rules(KINDS[name], facts.fields, flat=name == _NAFLEX)


# Fields that arrays show.
_SHOWN = ('patch_size', 'width', 'depth', 'mlp_dim', 'registers', 'qkv_bias', 'mlp')
_SHOWN += ('dense_bias', 'patch_bias', 'norm', 'extra_norms', 'posemb', 'relpos')
_SHOWN += ('final_norm',)


def _head(flat: Arrays, fields: dict, facts: Facts) -> dict:
  """Returns the fields of the pooling and the head, which the arrays tell.

  Raises:
    ValueError: where the config contradicts the arrays.
  """
  if not facts.config:
    return {}
  shown = timm_options.USUAL | vit.infer(flat)
  stated = facts.fields | {'layer_scale': facts.fields.get('layer_scale') is not None}
  shown['layer_scale'] = shown['layer_scale'] is not None
  for key in (*_SHOWN, 'layer_scale'):
    if key in stated and stated[key] != shown[key]:
      raise ValueError(
        f'its config says {key}={stated[key]!r}, its arrays {shown[key]!r}'
      )
  name, _ = _inner(facts.config)
  has = 'head/kernel' in flat
  tells = has, not has or 'head/bias' in flat
  tells += 'head_dist/kernel' in flat, f'{MAP}/probe' in flat
  for _, head in KINDS[name].heads:
    pool = head.get('classifier')
    its = 'num_classes' not in head, head.get('head_bias', True)
    if tells == (*its, pool == 'distilled', pool == 'map'):
      return head
  raise ValueError(f'no class of {name} has a head as its arrays have')


# -- written --------------------------------------------------------------------------

# The same model by other values: None, or a table that has no other rows.
_ALIKE = ('cls_token', 'posemb_tokens', 'map_heads', 'map_mlp_dim')


def _plain(fields: dict) -> dict:
  """Returns fields with one value for each of those in _ALIKE that compute the same."""
  tokens = fields['posemb_tokens'] if fields['registers'] else 'prefix'
  return fields | {'posemb_tokens': tokens} | configs.alike(fields)


def _class_of(fields: dict) -> tuple[str, str, dict]:
  """Returns (model_type, end of the class, its config) that express all fields."""
  fits, ours = [], _plain(fields)
  for name, kind in KINDS.items():
    args = _to_config(kind, fields)
    known = timm_options.USUAL | _to_fields(kind, args)
    for suffix, head in kind.heads:
      theirs = _plain(known | {'num_classes': fields['num_classes']} | head)
      compared = ours.keys() - (TRAINING - {'layer_scale'})
      differ = [k for k in ours if k in compared and ours[k] != theirs.get(k)]
      if 'num_classes' not in head and fields['num_classes'] is None:
        differ.append('num_classes')
      fits.append((differ, name, suffix, args, theirs))
  differ, name, suffix, args, theirs = min(fits, key=lambda fit: len(fit[0]))
  if differ:
    key = differ[0]
    raise ValueError(
      f'hf ({name}) cannot express {key}={fields[key]!r}, but {theirs.get(key)!r}'
    )
  return name, suffix, args


def _config(fields: dict, image_size: tuple[int, int], class_names) -> dict:
  name, suffix, args = _class_of(fields)
  kind, classes = KINDS[name], fields['num_classes']
  if kind.square and image_size[0] != image_size[1]:
    raise ValueError(f'hf ({name}) takes square images, not {image_size}')
  args |= {'image_size': configs.one(image_size), 'num_channels': 3}
  args |= {'architectures': [kind.name + suffix], 'model_type': name}
  if suffix.endswith('WithProjection'):
    args['projection_dim'], classes = classes, None
  return args | configs.labels(class_names, classes)


def _write_rules(flat: Arrays, fields: dict) -> Table:
  name, suffix, _ = _class_of(fields)
  return _rules(KINDS[name], fields, bare=suffix == 'Model')


def _mask_token(flat: Arrays, fields: dict) -> Arrays:
  """Returns zeros for the token of masked patches that a class demands."""
  name, suffix, _ = _class_of(fields)
  if not (axes := KINDS[name].mask_token):
    return {}
  prefix = '' if suffix == 'Model' else KINDS[name].prefix
  zeros = np.zeros((*axes, fields['width']), np.float32)
  return {f'{prefix}embeddings.mask_token': zeros}


def _typed(*kinds: str) -> Callable[[dict, str], bool]:
  return lambda config, file: config.get('model_type') in kinds


# Arrays of decoders, and of what stands beside an image tower.
_IGNORED = r'(decoder|lm_head|text_model|text_projection)\..*|logit_(scale|bias)'
_FORMAT = Format(
  name='hf',
  family='vit',
  marker='.+',
  when=_typed(*KINDS, *_WHOLE),
  ignored=_IGNORED,
  rules=_read_rules,
  infer=vit.infer,
  facts=facts,
  grid=vit.grid,
  conclude=_head,
  # Only DINOv2 with registers antialiases.
  resize=lambda f: 'bicubic' if f.get('posemb_tokens') == 'cls' else 'bicubic_plain',
  needs=('num_heads',),
)
FORMATS = (
  # SigLIP's classifiers, which do not read the tower's pooling.
  dataclasses.replace(
    _FORMAT,
    marker=r'classifier\.weight',
    when=_typed('siglip'),
    ignored=rf'{_IGNORED}|vision_model\.head\..*',
  ),
  dataclasses.replace(
    _FORMAT,
    when=_typed('siglip2', _NAFLEX),
    resize=lambda fields: 'bilinear_antialias',
  ),
  dataclasses.replace(
    _FORMAT,
    writer=Writer(
      config=_config, rules=_write_rules, buffers=_mask_token, alike=_ALIKE
    ),
  ),
  # Files without a model_type.
  dataclasses.replace(
    _FORMAT,
    marker=r'(vit\.)?(encoder\.layer|layers)\.0\.layernorm_before\..+',
    when=lambda config, file: True,
  ),
)
