"""Reads the ViTs of transformers into our `ViT`, and writes them.

The model_type of a config selects a row of KINDS, which translates its keys to fields of
`ViT`. A key that is absent has the default of its class. Fields come from the config, because
activation, epsilon and rotary positions do not follow from the arrays. If the config
contradicts the arrays, reading raises ValueError.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.nn.positions import SINES
from vit_jax.weights import configs, rename, timm_options
from vit_jax.weights.configs import Facts
from vit_jax.weights.families import vit
from vit_jax.weights.families.vit import ATTENTION, BLOCK, MAP, MLP, POSITIONS
from vit_jax.weights.formats import TRAINING, Format, Writer
from vit_jax.weights.rename import Arrays, Rule, Table, add_bare_names, respell, table

# -- keys of configs and fields -------------------------------------------------------

# Keys that correspond to one field.
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
# Functions that turn the value of a key into that of a field, where the two differ. _SAVE has
# the inverse functions.
_LOAD = {'patch_size': configs.pair, 'hidden_act': configs.activation}
_LOAD |= dict.fromkeys(('layer_norm_eps', 'rms_norm_eps'), configs.epsilon)
_LOAD |= {'layer_scale_init_value': lambda x: x or None}
_SAVE = {
  'patch_size': configs.int_or_pair,
  'hidden_act': lambda x: configs.HF_ACTS.get(x, x),
}
_SAVE |= {'layer_scale_init_value': lambda x: x or 0.0}
# Keys -> (fields, {values of the keys: values of the fields}). Several keys or fields are
# separated by spaces, and their values are tuples.
_CHOICES = {
  'qkv_bias': ('qkv_bias', {True: 'qkv', False: 'none'}),
  # In AIMv2, `qkv_bias` also switches the bias of the projection after attention.
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
  'is_native': ('posemb', {False: 'learn', True: 'sincos2d_mae'}),
  'use_head': ('classifier', {False: 'gap', True: 'query'}),
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
  """Returns the rows (keys, fields, values) of _CHOICES for a kind with these keys.

  A row is left out if another row has all of its keys and further ones.
  """
  plural = lambda x: x if isinstance(x, tuple) else (x,)
  rows = {tuple(names.split()): row for names, row in _CHOICES.items()}
  rows = {names: row for names, row in rows.items() if {*names} <= {*keys}}
  return [
    (names, fields.split(), {plural(a): plural(b) for a, b in values.items()})
    for names, (fields, values) in rows.items()
    if not any({*names} < {*others} for others in rows)
  ]


def _read_fields(kind: 'Kind', config: dict) -> dict:
  """Translates a config to fields; raises ValueError for an unknown value."""
  values = {key: config.get(key, usual) for key, usual in kind.keys.items()}
  fields, same = dict(kind.fixed), lambda x: x
  for key in values.keys() & _FIELDS.keys():
    fields[_FIELDS[key]] = _LOAD.get(key, same)(values[key])
  for keys, names, rows in _choices(values):
    theirs = tuple(values[key] for key in keys)
    if theirs not in rows:
      values = ', '.join(f'{k}={v!r}' for k, v in zip(keys, theirs, strict=True))
      raise ValueError(f'{values} is unknown, expected one of {list(rows)}')
    fields |= zip(names, rows[theirs], strict=True)
  if 'mlp_ratio' in values:
    # Only DINOv2 has this key. A gated MLP has two thirds of the stated width.
    fields['mlp_dim'] = int(values['hidden_size'] * values['mlp_ratio'])
    if values['use_swiglu_ffn']:
      hidden = (int(fields['mlp_dim'] * 2 / 3) + 7) // 8 * 8
      fields |= {'mlp': 'swiglu', 'act': 'silu', 'mlp_dim': hidden}
  return fields


def write_fields(kind: 'Kind', fields: dict) -> dict:
  """Translates fields to a config. A key keeps its default if none of its values fits."""
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


def make_rules(
  kind: 'Kind', fields: dict, bare: bool = False, flat: bool = False
) -> Table:
  """Makes the rename table of a kind.

  Args:
    kind: the kind of model.
    fields: the model's fields.
    bare: whether names lack the prefix, as in a model without a head.
    flat: whether the patch embedding is a dense layer.
  """
  # '-' and '--' stand for modules that the kind lacks, because no array has such a name.
  names = {'cls': '-', 'registers': '-', 'positions': '-', 'gate': '-', 'scales': '--'}
  names, heads = names | kind.names, fields['num_heads']
  top = lambda name: f'{"" if bare else kind.prefix}{name}'
  inside = lambda name: top(f'{names["layer"]}.{name}')
  is_table = names['positions'].endswith('.weight')
  vector, rows = (
    (rename.vector, rename.rows) if is_table else (rename.same, rename.same)
  )
  patches = rename.patch_kernel(fields['patch_size']) if flat else rename.conv_kernel
  bias = 'relative_position_bias'
  mlp, packed = names['mlp'], ()
  # DINOv2, whose files pack two layers into one array.
  if fields.get('mlp') == 'swiglu' and 'gate' not in kind.names:
    mlp = ('-', 'mlp.weights_out')
    packed = rename.join(inside('mlp.weights_in'), vit.GATED)
  # Name of the head -> whether it has a bias. The first rule that fits is used for writing.
  ends = {'classifier': True, 'visual_projection': False}
  ends = sorted(ends, key=lambda name: ends[name] != fields.get('head_bias', True))
  ends.insert(0 if fields.get('classifier') == 'distilled' else 2, 'cls_classifier')
  rules = table(
    packed,
    Rule(top(names['cls']), 'cls', vector),
    Rule(top(names['registers']), 'registers'),
    Rule(top(names['positions']), POSITIONS, rows),
    rename.dense(top(names['patches']), 'embedding', patches),
    rename.norm(top('embeddings.rms_norm'), 'embedding_norm'),
    rename.norm(top('pre_layrnorm'), 'Transformer/pre_norm'),
    [
      (
        rename.norm(inside(names['norms'][i]), f'{BLOCK}/LayerNorm_{i}'),
        rename.dense(inside(mlp[i]), f'{MLP}/Dense_{i}'),
        Rule(inside(names['scales'][i]), f'{BLOCK}/LayerScale_{i}/gamma'),
      )
      for i in (0, 1)
    ],
    rename.dense(inside(names['gate']), f'{MLP}/gate'),
    [
      rename.split_heads(inside(theirs), f'{ATTENTION}/{ours}', heads)
      for theirs, ours in zip(names['qkv'], rename.QKV, strict=True)
    ],
    rename.merge_heads(inside(names['out']), f'{ATTENTION}/out', heads),
    Rule(inside(f'attention.attention.{bias}.{bias}_table'), f'{BLOCK}/relpos/table'),
    Rule(top(f'encoder.{bias}.{bias}_table'), 'Transformer/relpos/table'),
    rename.norm(top(names['last']), 'Transformer/encoder_norm'),
    rename.norm(top('pooler.layernorm'), 'pooled_norm'),
    rename.dense(top('pooler.dense'), 'pre_logits'),
    rename.attention_pool(top('head'), MAP, heads),
    vit.query_head(top('head'), heads, ('k_proj', 'v_proj', 'output_proj')),
    [rename.dense(end, 'head') for end in ends],
    rename.dense('distillation_classifier', 'head_dist'),
  )
  # Names of transformers 5, which some files have.
  newer = respell(
    rules,
    (rf'attention\.attention\.{bias}', bias),
    (rf'encoder\.{bias}', 'shared_position_bias'),
    (r'^layer\.', 'model.layer.'),
    *rename.TRANSFORMERS_5,
  )
  rules = table(rules, newer)
  rules = table(rules, respell(rules, (r'encoder\.layer\.', 'layers.')))
  return add_bare_names(rules, kind.prefix)


# -- the kinds of models --------------------------------------------------------------


class Kind(NamedTuple):
  """The models of one model_type."""

  name: str  # common prefix of its classes, such as 'ViT'
  prefix: str  # prefix of the body's parameters, in models with a head
  names: dict[str, Any]  # names of those modules that differ between kinds
  keys: dict[str, Any]  # the config's keys that are read, with their defaults
  fixed: dict[str, Any]  # fields that all of its models share
  # (suffix of a class, fields of its pooling and head) for each class.
  heads: list[tuple[str, dict]]
  # The published preprocessor_config.json, for files without one. None: unknown.
  processor: dict | None = None
  square: bool = False  # whether it takes square images only
  # Leading axes of the mask token that the class requires; None: no mask token.
  mask_token: list[int] | None = None


def _kinds() -> dict[str, Kind]:
  """Reads vit_hf.json. A row with a key `like` holds only the differences from that row."""
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


# The order matters: a model is written as the first kind that can express its fields.
KINDS = _kinds()
_NAFLEX = 'siglip2_vision_model'
# Models of image and text, whose 'vision_config' is the config of the image tower.
_WHOLE = {'clip': 'clip_vision_model', 'siglip': 'siglip_vision_model'}
_WHOLE |= {'siglip2': _NAFLEX, 'aimv2': 'aimv2'}


def _inner(config: dict) -> tuple[str, dict]:
  """Returns (key of KINDS, the config of the image tower)."""
  kind = config.get('model_type', 'vit')
  if kind in _WHOLE:
    old = configs.section(config, 'vision_config_dict')
    return _WHOLE[kind], configs.section(config, 'vision_config') | old
  if kind not in KINDS:
    raise ValueError(f'model_type={kind!r}, expected one of {[*KINDS, *_WHOLE]}')
  if kind == 'beit' and 'BeitForMaskedImageModeling' in config.get('architectures', ()):
    # This class normalises every token, as models without mean pooling do.
    config = config | {'use_mean_pooling': False}
  return kind, config


# -- reading --------------------------------------------------------------------------


def facts(config: dict, source: str) -> Facts:
  """Reads the config of a ViT, or of the image tower of a model of image and text."""
  if not config:
    return Facts({'act': 'gelu_erf'})
  name, inner = _inner(config)
  kind = KINDS[name]
  size = inner.get('image_size', 224)
  if name == _NAFLEX:  # It takes any size. Use the size of its position table.
    size = math.isqrt(inner.get('num_patches', 256)) * inner.get('patch_size', 16)
  fields = _read_fields(kind, inner)
  return configs.hf_facts(config, fields, configs.pair(size), kind.processor)


def _read_rules(arrays: Arrays, facts: Facts) -> Table:
  name, _ = _inner(facts.config or {})
  return make_rules(KINDS[name], facts.fields, flat=name == _NAFLEX)


# Fields that follow from the arrays, which the config can therefore contradict.
_INFERRED = ('patch_size', 'width', 'depth', 'mlp_dim', 'registers', 'qkv_bias', 'mlp')
_INFERRED += ('dense_bias', 'patch_bias', 'norm', 'extra_norms', 'posemb', 'relpos')
_INFERRED += ('final_norm',)


def _find_head(flat: Arrays, fields: dict, facts: Facts) -> dict:
  """Returns the fields of pooling and head, which follow from the arrays.

  Raises:
    ValueError: if the config contradicts the arrays.
  """
  if not facts.config:
    return {}
  inferred = timm_options.USUAL | vit.infer(flat)
  from_config = {**facts.fields}
  from_config['layer_scale'] = facts.fields.get('layer_scale') is not None
  inferred['layer_scale'] = inferred['layer_scale'] is not None
  from_config['use_head'] = facts.fields.get('classifier') == 'query'
  inferred['use_head'] = inferred['classifier'] == 'query'
  if from_config.get('posemb') in SINES and inferred['posemb'] == 'none':
    inferred['posemb'] = from_config['posemb']  # they have no arrays
  for key in (*_INFERRED, 'layer_scale', 'use_head'):
    if key in from_config and from_config[key] != inferred[key]:
      raise ValueError(
        f'its config says {key}={from_config[key]!r}, but its arrays say {inferred[key]!r}'
      )
  name, _ = _inner(facts.config)
  has_head = 'head/kernel' in flat
  from_arrays = (
    has_head,
    not has_head or 'head/bias' in flat,
    'head_dist/kernel' in flat,
    f'{MAP}/probe' in flat,
  )
  for _, head in KINDS[name].heads:
    pool = head.get('classifier')
    of_class = (
      'num_classes' not in head,
      head.get('head_bias', True),
      pool == 'distilled',
      pool == 'map',
    )
    if from_arrays == of_class:
      return head
  raise ValueError(f'no class of {name} has the head that its arrays have')


# -- writing --------------------------------------------------------------------------

# Fields in which different values can describe the same model. Reading may return another one
# of these values.
_ALIKE = ('cls_token', 'posemb_tokens', 'map_heads', 'map_mlp_dim')


def _unify(fields: dict) -> dict:
  """Returns the fields, with those in _ALIKE normalised."""
  tokens = fields['posemb_tokens'] if fields['registers'] else 'prefix'
  return fields | {'posemb_tokens': tokens} | configs.unify(fields)


def _find_class(fields: dict) -> tuple[str, str, dict]:
  """Finds the class that can express all fields: (model_type, suffix, config)."""
  fits, ours = [], _unify(fields)
  for name, kind in KINDS.items():
    if name in _WHOLE:
      continue
    args = write_fields(kind, fields)
    again = timm_options.USUAL | _read_fields(kind, args)
    for suffix, head in kind.heads:
      theirs = _unify(again | {'num_classes': fields['num_classes']} | head)
      compared = ours.keys() - (TRAINING - {'layer_scale'})
      differ = [k for k in ours if k in compared and ours[k] != theirs.get(k)]
      if 'num_classes' not in head and fields['num_classes'] is None:
        differ.append('num_classes')
      fits.append((differ, name, suffix, args, theirs))
  differ, name, suffix, args, theirs = min(fits, key=lambda fit: len(fit[0]))
  if differ:
    key = differ[0]
    raise ValueError(
      f'hf ({name}) cannot express {key}={fields[key]!r}, only {theirs.get(key)!r}'
    )
  return name, suffix, args


def _config(fields: dict, image_size: tuple[int, int], class_names) -> dict:
  name, suffix, args = _find_class(fields)
  kind, classes = KINDS[name], fields['num_classes']
  if kind.square and image_size[0] != image_size[1]:
    raise ValueError(f'hf ({name}) takes square images, not {image_size}')
  args |= {'image_size': configs.int_or_pair(image_size), 'num_channels': 3}
  args |= {'architectures': [kind.name + suffix], 'model_type': name}
  if suffix.endswith('WithProjection'):
    args['projection_dim'], classes = classes, None
  return args | configs.labels(class_names, classes)


def _write_rules(flat: Arrays, fields: dict) -> Table:
  name, suffix, _ = _find_class(fields)
  return make_rules(KINDS[name], fields, bare=suffix == 'Model')


def _mask_token(flat: Arrays, fields: dict) -> Arrays:
  """Returns a mask token of zeros, for a class that requires one."""
  name, suffix, _ = _find_class(fields)
  if not (axes := KINDS[name].mask_token):
    return {}
  prefix = '' if suffix == 'Model' else KINDS[name].prefix
  zeros = np.zeros((*axes, fields['width']), np.float32)
  return {f'{prefix}embeddings.mask_token': zeros}


def _has_type(*kinds: str) -> Callable[[dict, str], bool]:
  """Returns a function that says whether a config's model_type is one of `kinds`."""
  return lambda config, file: config.get('model_type') in kinds


# Arrays of decoders and of text towers.
_IGNORED = r'(decoder|lm_head|text_model|text_projection)\..*|logit_(scale|bias)'
FORMAT = Format(
  name='hf',
  family='vit',
  marker='.+',
  when=_has_type(*({*KINDS, *_WHOLE} - {'aimv2'})),
  ignored=_IGNORED,
  rules=_read_rules,
  infer=vit.infer,
  facts=facts,
  grid=vit.grid,
  conclude=_find_head,
  # Only in DINOv2 with registers does transformers antialias.
  resize=lambda f: 'bicubic' if f.get('posemb_tokens') == 'cls' else 'bicubic_plain',
  needs=('num_heads',),
)
FORMATS = (
  # Apple's own files of AIMv2 have the same model_type, but other names.
  dataclasses.replace(FORMAT, marker=r'vision_model\..+', when=_has_type('aimv2')),
  # SigLIP's classifiers average the tokens, and ignore the tower's own pooling.
  dataclasses.replace(
    FORMAT,
    marker=r'classifier\.weight',
    when=_has_type('siglip'),
    ignored=rf'{_IGNORED}|vision_model\.head\..*',
  ),
  dataclasses.replace(
    FORMAT,
    when=_has_type('siglip2', _NAFLEX),
    resize=lambda fields: 'bilinear_antialias',
  ),
  dataclasses.replace(
    FORMAT,
    writer=Writer(
      config=_config, rules=_write_rules, buffers=_mask_token, alike=_ALIKE
    ),
  ),
  # Files without a model_type.
  dataclasses.replace(
    FORMAT,
    marker=r'(vit\.)?(encoder\.layer|layers)\.0\.layernorm_before\..+',
    when=lambda config, file: True,
  ),
)
