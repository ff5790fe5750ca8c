"""The ViTs of transformers: config.json and arrays to a `ViT`, and back.

The model_type of a config names a row of KINDS: its options pair keys of the config with
fields of `ViT`. A key that is absent has the default of its class. Arrays show neither
activation, epsilon nor rotary positions, so the config comes first; where it contradicts
the arrays, the file is refused.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vit_jax import models
from vit_jax.models.vit import has_cls
from vit_jax.weights import configs, layers, pipelines
from vit_jax.weights import transforms as t
from vit_jax.weights.configs import Facts
from vit_jax.weights.families.vit import (
  ATTENTION,
  BLOCK,
  MAP,
  MLP,
  POSITIONS,
  grid,
  infer,
)
from vit_jax.weights.formats import TRAINING, Format
from vit_jax.weights.rename import Arrays, Rule, Table, respelled, table, with_bare


class Option(NamedTuple):
  """Keys of a config, with the defaults of their class, and fields that say the same."""

  keys: dict[str, Any]
  fields: tuple[str, ...]
  load: Callable[..., tuple]  # values of the keys -> values of the fields
  save: Callable[..., tuple | None]  # the inverse; None: its class has no such value


def _same(key: str, default, field: str, load=lambda x: x, save=lambda x: x) -> Option:
  return Option({key: default}, (field,), lambda x: (load(x),), lambda x: (save(x),))


def _choice(keys: dict[str, Any], fields: str, values: dict) -> Option:
  """An option of a few values: {values of the keys: values of the fields}."""
  plural = lambda x: x if isinstance(x, tuple) else (x,)
  values = {plural(theirs): plural(ours) for theirs, ours in values.items()}

  def load(*theirs):
    if theirs not in values:
      stated = ', '.join(f'{k}={v!r}' for k, v in zip(keys, theirs, strict=True))
      raise ValueError(f'{stated} is not read, only one of {list(values)}')
    return values[theirs]

  inverse = {ours: theirs for theirs, ours in reversed(values.items())}
  return Option(keys, tuple(fields.split()), load, lambda *ours: inverse.get(ours))


def _act_of(act: str) -> str:
  return configs.HF_ACTS.get(act, act)


def _sizes(width=768, depth=12, heads=12, patch=16) -> tuple[Option, ...]:
  return (
    _same('hidden_size', width, 'width'),
    _same('num_hidden_layers', depth, 'depth'),
    _same('num_attention_heads', heads, 'num_heads'),
    _same('patch_size', patch, 'patch_size', configs.pair, configs.one),
  )


def _body(act='gelu', eps=1e-12, *sizes, mlp=3072, norm='layer_norm_eps', **more):
  """The options that nearly all classes have."""
  return (
    *_sizes(*sizes, **more),
    _same('intermediate_size', mlp, 'mlp_dim'),
    _same('hidden_act', act, 'act', configs.activation, _act_of),
    _same(norm, eps, 'norm_eps', configs.epsilon),
  )


def _dinov2_mlp() -> Option:
  """The MLP of DINOv2, as wide as a multiple of the model; two thirds of that if gated."""

  def load(ratio, gated, act, width):
    hidden = int(width * ratio)
    if not gated:
      return 'mlp', configs.activation(act), hidden, width
    return 'swiglu', 'silu', (int(hidden * 2 / 3) + 7) // 8 * 8, width

  def save(mlp, act, hidden, width):
    gated = mlp == 'swiglu'
    ratio = round(hidden / width * (1.5 if gated else 1))
    return ratio, gated, 'gelu' if gated else _act_of(act), width

  keys = {'mlp_ratio': 4, 'use_swiglu_ffn': False, 'hidden_act': 'gelu'}
  fields = ('mlp', 'act', 'mlp_dim', 'width')
  return Option(keys | {'hidden_size': 768}, fields, load, save)


def _augment() -> Option:
  """DINOv3's augmentation of places: a shift of 0 and factors of 1 are none."""

  def load(shift, jitter, rescale):
    values = (float(shift or 0), float(jitter or 1), float(rescale or 1))
    return (None if values == (0, 1, 1) else values,)

  keys = {'pos_embed_shift': None, 'pos_embed_jitter': None, 'pos_embed_rescale': 2.0}
  return Option(keys, ('rope_augment',), load, lambda x: x or (0.0, 1.0, 1.0))


_BIAS = _choice({'qkv_bias': True}, 'qkv_bias', {True: 'qkv', False: 'none'})
_SCALE = _same('layerscale_value', 1.0, 'layer_scale')
_EPS = _same('layer_norm_eps', 1e-6, 'norm_eps', configs.epsilon)
_VIT = (*_body(), _BIAS)
_DINOV2 = (_dinov2_mlp(), _EPS, _BIAS, _SCALE)
_SHARED = 'use_shared_relative_position_bias'
_BEIT = (
  *_body(),
  _choice(
    {'use_relative_position_bias': False, _SHARED: False},
    'relpos',
    {(False, False): 'none', (True, False): 'layer', (False, True): 'shared'},
  ),
  _choice(
    {'use_absolute_position_embeddings': False},
    'posemb',
    {False: 'none', True: 'learn'},
  ),
  _choice(
    {'use_mean_pooling': True},
    'classifier final_norm cls_token',
    {True: ('gap', 'pooled', True), False: ('token', 'tokens', True)},
  ),
  _same(
    'layer_scale_init_value', 0.1, 'layer_scale', lambda x: x or None, lambda x: x or 0
  ),
)
_BASE = (
  lambda x: None if x == 100 else float(x),
  lambda x: x if type(x) is float else 100,
)
_DINOV3 = (
  *(*_body('gelu', 1e-5, 384, heads=6, mlp=1536), _SCALE, _augment()),
  _same('num_register_tokens', 0, 'registers'),
  _same('rope_theta', 100, 'rope_base', *_BASE),
  _choice({'use_gated_mlp': False}, 'mlp', {False: 'mlp', True: 'swiglu'}),
  _choice(
    {'query_bias': True, 'key_bias': False, 'value_bias': True},
    'qkv_bias',
    {(True, False, True): 'qv', (True,) * 3: 'qkv', (False,) * 3: 'none'},
  ),
  _choice(
    {'proj_bias': True, 'mlp_bias': True},
    'dense_bias',
    {(True, True): True, (False, False): False},
  ),
)
_AIMV2 = (
  *_body('silu', 1e-5, 1024, 24, 8, 14, mlp=2816, norm='rms_norm_eps'),
  _choice(
    {'qkv_bias': False, 'mlp_bias': False},
    'qkv_bias dense_bias',
    {(False, False): ('none', False), (True, True): ('qkv', True)},
  ),
  _choice({'is_native': False}, 'posemb', {False: 'learn'}),
)


# -- names ----------------------------------------------------------------------------


def _blocks(layer: str, heads: int, norms, qkv, out, mlp, scales=('', '')) -> Table:
  """The names within a block; of norms, MLPs and LayerScales there are two."""
  inside = lambda name: f'{layer}.{name}'
  return table(
    [
      (
        layers.norm(inside(norms[i]), f'{BLOCK}/LayerNorm_{i}'),
        layers.dense(inside(mlp[i]), f'{MLP}/Dense_{i}'),
        Rule(inside(scales[i]), f'{BLOCK}/LayerScale_{i}/gamma'),
      )
      for i in (0, 1)
    ],
    [
      layers.into_heads(inside(name), f'{ATTENTION}/{x}', heads)
      for name, x in zip(qkv, layers.QKV, strict=True)
    ],
    layers.out_of_heads(inside(out), f'{ATTENTION}/out', heads),
  )


def _gated(mlp: str) -> Table:
  """The names of a gated MLP; without a gate, the other two layers are a plain one."""
  return table(
    layers.dense(f'{mlp}.gate_proj', f'{MLP}/gate'),
    layers.dense(f'{mlp}.up_proj', f'{MLP}/Dense_0'),
    layers.dense(f'{mlp}.down_proj', f'{MLP}/Dense_1'),
  )


def _loads(rules: Table) -> Table:
  return tuple(rule._replace(only_load=True) for rule in rules)


def _vit_names(
  prefix: str,
  fields: dict,
  norms=('layernorm_before', 'layernorm_after'),
  mlp=('intermediate.dense', 'output.dense'),
  scales=('lambda_1', 'lambda_2'),
  registers='distillation_token',
) -> Table:
  """The names of ViT, DeiT, I-JEPA, MSN, MAE, BEiT and Data2Vec; with others DINOv2's."""
  embeddings, layer = f'{prefix}embeddings', f'{prefix}encoder.layer.{{i}}'
  inside, bias = 'attention.attention', 'relative_position_bias'
  qkv = tuple(f'{inside}.{x}' for x in layers.QKV)
  heads, out = fields['num_heads'], 'attention.output.dense'
  both, newer = (), ()
  if fields.get('mlp') == 'swiglu':
    both = tuple(
      Rule(
        f'{layer}.mlp.weights_in.{theirs}',
        (f'{MLP}/gate/{leaf}', f'{MLP}/Dense_0/{leaf}'),
        t.joined(transform, 2),
      )
      for theirs, leaf, transform in (
        ('weight', 'kernel', t.dense),
        ('bias', 'bias', t.same),
      )
    )
    mlp, newer = ('mlp.fc1', 'mlp.weights_out'), _loads(_gated(f'{layer}.mlp'))
  ends = ['classifier', 'cls_classifier']
  ends = ends[::-1] if fields.get('classifier') == 'distilled' else ends
  rules = table(
    both,
    Rule(f'{embeddings}.cls_token', 'cls'),
    Rule(f'{embeddings}.{registers}', 'registers'),
    Rule(f'{embeddings}.position_embeddings', POSITIONS),
    layers.conv(f'{embeddings}.patch_embeddings.projection', 'embedding'),
    _blocks(layer, heads, norms, qkv, out, mlp, scales),
    Rule(f'{layer}.{inside}.{bias}.{bias}_table', f'{BLOCK}/relpos/table'),
    Rule(f'{prefix}encoder.{bias}.{bias}_table', 'Transformer/relpos/table'),
    layers.norm(f'{prefix}layernorm', 'Transformer/encoder_norm'),
    layers.norm(f'{prefix}pooler.layernorm', 'pooled_norm'),
    layers.dense(f'{prefix}pooler.dense', 'pre_logits'),
    [layers.dense(name, 'head') for name in ends],
    layers.dense('distillation_classifier', 'head_dist'),
  )
  changes = (
    (rf'attention\.attention\.{bias}', bias),
    (rf'encoder\.{bias}', 'shared_position_bias'),
    *layers.TRANSFORMERS_5,
  )
  rules = table(rules, newer, respelled(rules, *changes))
  rules = table(rules, respelled(rules, (r'encoder\.layer\.', 'layers.')))
  return with_bare(rules, prefix)


def _dinov3_names(prefix: str, fields: dict) -> Table:
  scales = ('layer_scale1.lambda1', 'layer_scale2.lambda1')
  qkv = tuple(f'attention.{x}_proj' for x in 'qkv')
  mlp = ('mlp.up_proj', 'mlp.down_proj')
  args = fields['num_heads'], ('norm1', 'norm2'), qkv, 'attention.o_proj', mlp, scales
  rules = table(
    Rule('embeddings.cls_token', 'cls'),
    Rule('embeddings.register_tokens', 'registers'),
    layers.conv('embeddings.patch_embeddings', 'embedding'),
    _blocks('layer.{i}', *args),
    layers.dense('layer.{i}.mlp.gate_proj', f'{MLP}/gate'),
    layers.norm('norm', 'Transformer/encoder_norm'),
  )
  return table(rules, respelled(rules, (r'^layer\.', 'model.layer.')))


def _tower_names(prefix: str, fields: dict, flat_patches: bool = False) -> Table:
  """The names of the image tower of CLIP and SigLIP, and of a head beside it."""
  layer, pool = f'{prefix}encoder.layers.{{i}}', f'{prefix}head'
  norms, mlp = ('layer_norm1', 'layer_norm2'), ('mlp.fc1', 'mlp.fc2')
  qkv, out = tuple(f'self_attn.{x}_proj' for x in 'qkv'), 'self_attn.out_proj'
  heads, pooling = fields['num_heads'], f'{MAP}/MultiHeadDotProductAttention_0'
  patches = t.patches(fields['patch_size']) if flat_patches else t.conv
  rules = table(
    Rule(f'{prefix}embeddings.class_embedding', 'cls', t.vector),
    Rule(f'{prefix}embeddings.position_embedding.weight', POSITIONS, t.rows),
    layers.dense(f'{prefix}embeddings.patch_embedding', 'embedding', patches),
    layers.norm(f'{prefix}pre_layrnorm', 'Transformer/pre_norm'),
    _blocks(layer, heads, norms, qkv, out, mlp),
    layers.norm(f'{prefix}post_layernorm', 'Transformer/encoder_norm'),
    Rule(f'{pool}.probe', f'{MAP}/probe'),
    layers.fused(f'{pool}.attention.in_proj', pooling, heads, dot='_'),
    layers.out_of_heads(f'{pool}.attention.out_proj', f'{pooling}/out', heads),
    layers.norm(f'{pool}.layernorm', f'{MAP}/LayerNorm_0'),
    layers.dense(f'{pool}.mlp.fc1', f'{MAP}/MlpBlock_0/Dense_0'),
    layers.dense(f'{pool}.mlp.fc2', f'{MAP}/MlpBlock_0/Dense_1'),
  )
  ends = ['classifier', 'visual_projection']
  ends = ends if fields.get('head_bias', True) else ends[::-1]
  return table(with_bare(rules, prefix), [layers.dense(name, 'head') for name in ends])


def _aimv2_names(prefix: str, fields: dict) -> Table:
  layer, mlp = 'encoder.layers.{i}', ('ffn.up_proj', 'ffn.down_proj')
  qkv = tuple(f'attention.{x}_proj' for x in 'qkv')
  args = ('rms_norm1', 'rms_norm2'), qkv, 'attention.out_proj', mlp
  return table(
    Rule('embeddings.position_embedding.weight', POSITIONS, t.rows),
    layers.conv('embeddings.patch_embed', 'embedding'),
    layers.norm('embeddings.rms_norm', 'embedding_norm'),
    _blocks(layer, fields['num_heads'], *args),
    layers.dense(f'{layer}.ffn.gate_proj', f'{MLP}/gate'),
    layers.norm('rms_norm', 'Transformer/encoder_norm'),
  )


# -- the kinds of models --------------------------------------------------------------


class Head(NamedTuple):
  """A class of transformers, by the end of its name."""

  suffix: str
  fields: dict
  config: tuple = ()  # more keys of its config, with values
  whole: str | None = None  # model_type of its config, which has a vision_config


class Kind(NamedTuple):
  """The models of one model_type."""

  name: str  # the first part of the names of its classes
  prefix: str  # names of parameters begin with it, beside a head
  names: Callable[[str, dict], Table]  # (prefix, fields) -> rules
  options: tuple[Option, ...]
  fixed: dict  # fields that all its models have
  heads: tuple[Head, ...]
  # The published preprocessor_config.json, for files without one; {}: unknown.
  processor: dict
  square: bool = True  # whether it takes square images only
  mask_token: tuple[int, ...] = ()  # first axes of the one that its class demands


_CLASSIFY = 'ForImageClassification'
_BARE, _LEARNED = {'num_classes': None}, {'posemb': 'learn'}
_TOKEN, _MEAN = {'classifier': 'token'}, {'classifier': 'gap'}
_TOKEN_HEADS = (Head(_CLASSIFY, _TOKEN), Head('Model', _TOKEN | _BARE))
_MEAN_HEADS = (Head(_CLASSIFY, _MEAN), Head('Model', _MEAN | _BARE))
_DEIT_HEADS = (
  Head(f'{_CLASSIFY}WithTeacher', {'classifier': 'distilled'}),
  *_TOKEN_HEADS,
)
_DINOV2_HEADS = (Head(_CLASSIFY, {'classifier': 'token_mean'}), _TOKEN_HEADS[1])
_ALL_BUT_CLASS = _MEAN | {'cls_token': True, 'final_norm': 'none'}
_CLIP_HEADS = (
  Head('VisionModelWithProjection', _TOKEN | {'head_bias': False}),
  Head('VisionModel', _TOKEN | _BARE),
  Head(_CLASSIFY, _ALL_BUT_CLASS, whole='clip'),
)
_NO_HEAD = (('vision_use_head', False),)
_SIGLIP_HEADS = (
  Head('VisionModel', {'classifier': 'map'} | _BARE),
  Head('VisionModel', _MEAN | _BARE, _NO_HEAD),
  Head(_CLASSIFY, _MEAN, _NO_HEAD, whole='siglip'),
)
_IMAGENET = {'image_mean': pipelines.MEAN, 'image_std': pipelines.STD}
_TYPE, _CLIP = 'image_processor_type', {'image_processor_type': 'CLIPImageProcessor'}
_BIT = {_TYPE: 'BitImageProcessor', 'size': {'shortest_edge': 256}, **_IMAGENET}

_vit = functools.partial(Kind, names=_vit_names, fixed=_LEARNED, square=False)
_dinov2 = functools.partial(
  Kind,
  names=functools.partial(
    _vit_names,
    norms=('norm1', 'norm2'),
    mlp=('mlp.fc1', 'mlp.fc2'),
    scales=('layer_scale1.lambda1', 'layer_scale2.lambda1'),
    registers='register_tokens',
  ),
  heads=_DINOV2_HEADS,
  processor=_BIT,
  mask_token=(1,),
)
# A model is written as the first kind that has all of its fields.
KINDS = {
  'vit': _vit('ViT', 'vit.', options=_VIT, heads=_TOKEN_HEADS, processor={}),
  'deit': _vit(
    *('DeiT', 'deit.'),
    options=_VIT,
    fixed=_LEARNED | {'registers': 1},
    heads=_DEIT_HEADS,
    processor={_TYPE: 'DeiTImageProcessor', **_IMAGENET},
  ),
  'ijepa': _vit(
    'IJepa', 'ijepa.', options=_VIT, heads=_MEAN_HEADS, processor=_IMAGENET
  ),
  'dinov2': _dinov2(
    'Dinov2', 'dinov2.', options=(*_sizes(patch=14), *_DINOV2), fixed=_LEARNED
  ),
  'dinov2_with_registers': _dinov2(
    *('Dinov2WithRegisters', 'dinov2_with_registers.'),
    options=(*_sizes(), *_DINOV2, _same('num_register_tokens', 4, 'registers')),
    fixed=_LEARNED | {'posemb_tokens': 'cls'},
  ),
  'dinov3_vit': Kind(
    *('DINOv3ViT', '', _dinov3_names, _DINOV3),
    fixed={'posemb': 'none', 'rope': 'dinov3'},
    heads=_TOKEN_HEADS[1:],
    processor={_TYPE: 'DINOv3ViTImageProcessor'},
    square=False,
    mask_token=(1, 1),
  ),
  'clip_vision_model': Kind(
    *('CLIP', 'vision_model.', _tower_names, _body('quick_gelu', 1e-5, patch=32)),
    fixed=_LEARNED | {'extra_norms': ('tokens',), 'patch_bias': False},
    heads=_CLIP_HEADS,
    processor=_CLIP,
  ),
  'siglip_vision_model': Kind(
    *('Siglip', 'vision_model.', _tower_names, _body('gelu_pytorch_tanh', 1e-6)),
    fixed=_LEARNED,
    heads=_SIGLIP_HEADS,
    processor={_TYPE: 'SiglipImageProcessor'},
  ),
  'beit': Kind(
    *('Beit', 'beit.', _vit_names, _BEIT, {'qkv_bias': 'qv'}),
    heads=(Head(_CLASSIFY, {}), Head('Model', _BARE)),
    processor={'resample': 2},
  ),
  'aimv2_vision_model': Kind(
    *('Aimv2', '', _aimv2_names, _AIMV2),
    fixed={'norm': 'rms', 'extra_norms': ('patches',), 'mlp': 'swiglu'},
    heads=(Head('VisionModel', _MEAN | _BARE, (('use_head', False),)),),
    processor=_CLIP,
  ),
}
# These are read only: as others, they would be written as those.
KINDS['data2vec-vision'] = KINDS['beit']._replace(prefix='data2vec_vision.')
KINDS['vit_mae'] = KINDS['vit']._replace(processor=_IMAGENET)
KINDS['vit_msn'] = KINDS['vit_mae']._replace(options=(*_body(eps=1e-6), _BIAS))
_NAFLEX = 'siglip2_vision_model'
KINDS[_NAFLEX] = KINDS['siglip_vision_model']._replace(
  names=functools.partial(_tower_names, flat_patches=True), processor={'resample': 2}
)
# Configs of image and text: that of the image tower is in their 'vision_config'.
_WHOLE = {
  'clip': 'clip_vision_model',
  'siglip': 'siglip_vision_model',
  'siglip2': _NAFLEX,
}


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
  fields = kind.fixed | _stated(kind, inner)
  return configs.hf_facts(config, fields, configs.pair(size), kind.processor)


def _stated(kind: Kind, config: dict) -> dict:
  fields = {}
  for option in kind.options:
    values = (config.get(key, default) for key, default in option.keys.items())
    fields |= zip(option.fields, option.load(*values), strict=True)
  return fields


def _read_rules(arrays: Arrays, facts: Facts) -> Table:
  kind = KINDS[_inner(facts.config or {})[0]]
  return kind.names(kind.prefix, facts.fields)


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
  usual = {k: p.default for k, p in models.signature('vit').parameters.items()}
  shown = usual | infer(flat)
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
  for head in KINDS[name].heads:
    pool = head.fields.get('classifier')
    its = 'num_classes' not in head.fields, head.fields.get('head_bias', True)
    if tells == (*its, pool == 'distilled', pool == 'map'):
      return head.fields
  raise ValueError(f'no class of {name} has a head as its arrays have')


# -- written --------------------------------------------------------------------------

# The same model by other values: None, or a table that has no other rows.
_ALIKE = ('cls_token', 'posemb_tokens', 'map_heads', 'map_mlp_dim')


def _plain(fields: dict) -> dict:
  """Returns fields with one value for each of those in _ALIKE that compute the same."""
  return fields | {
    'cls_token': has_cls(fields),
    'posemb_tokens': fields['posemb_tokens'] if fields['registers'] else 'prefix',
    'map_heads': fields['map_heads'] or fields['num_heads'],
    'map_mlp_dim': fields['map_mlp_dim'] or fields['mlp_dim'],
    'layer_scale': fields['layer_scale'] is not None,
  }


def _class_of(fields: dict) -> tuple[str, Head, dict]:
  """Returns (model_type, its class, keys of the config) that express all fields."""
  usual = {k: p.default for k, p in models.signature('vit').parameters.items()}
  best, ours = None, _plain(fields)
  for name, kind in KINDS.items():
    args = {}
    for option in kind.options:
      values = option.save(*(fields[field] for field in option.fields))
      args |= zip(option.keys, values or option.keys.values(), strict=True)
    try:
      known = usual | kind.fixed | _stated(kind, args)
    except ValueError:
      continue
    for head in kind.heads:
      theirs = _plain(known | {'num_classes': fields['num_classes']} | head.fields)
      differ = [k for k in ours if k not in TRAINING - {'layer_scale'}]
      differ = [k for k in differ if ours[k] != theirs.get(k)]
      if head.fields.get('head_bias') is False and fields['num_classes'] is None:
        differ.append('num_classes')
      if best is None or len(differ) < len(best[0]):
        best = differ, name, head, args | dict(head.config), theirs
  differ, name, head, args, theirs = best
  if differ:
    key = differ[0]
    raise ValueError(
      f'hf ({name}) cannot express {key}={fields[key]!r}, but {theirs.get(key)!r}'
    )
  return name, head, args


def _config(fields: dict, image_size: tuple[int, int], class_names) -> dict:
  fields = {key: fields[key] for key in fields}  # every one of them is looked at
  name, head, args = _class_of(fields)
  kind, classes = KINDS[name], fields['num_classes']
  if kind.square and image_size[0] != image_size[1]:
    raise ValueError(f'hf ({name}) takes square images, not {image_size}')
  args |= {'image_size': configs.one(image_size), 'num_channels': 3}
  args |= {'architectures': [kind.name + head.suffix], 'model_type': name}
  if head.suffix.endswith('WithProjection'):
    args['projection_dim'], classes = classes, None
  if head.whole:
    names = {'architectures': args.pop('architectures'), 'model_type': head.whole}
    args = names | {'vision_config': args}
  return args | configs.labels(class_names, classes)


def _write_rules(flat: Arrays, fields: dict) -> Table:
  name, head, _ = _class_of(fields)
  kind = KINDS[name]
  return kind.names('' if head.suffix == 'Model' else kind.prefix, fields)


def _mask_token(flat: Arrays, fields: dict) -> Arrays:
  """Returns zeros for the token of masked patches that a class demands."""
  name, head, _ = _class_of(fields)
  if not (axes := KINDS[name].mask_token):
    return {}
  prefix = '' if head.suffix == 'Model' else KINDS[name].prefix
  zeros = np.zeros((*axes, fields['width']), np.float32)
  return {f'{prefix}embeddings.mask_token': zeros}


def _typed(*kinds: str) -> Callable[[dict, str], bool]:
  return lambda config, file: config.get('model_type') in kinds


# Arrays of decoders, and of what stands beside an image tower.
_IGNORED = r'(decoder|lm_head|text_model|text_projection)\..*|logit_(scale|bias)'
_FORMAT = Format(
  'hf',
  'vit',
  marker='.+',
  when=_typed(*KINDS, *_WHOLE),
  ignored=_IGNORED,
  rules=_read_rules,
  infer=infer,
  facts=facts,
  grid=grid,
  positions=_head,
  # Only DINOv2 with registers antialiases.
  resize=lambda f: 'bicubic' if f.get('posemb_tokens') == 'cls' else 'bicubic_plain',
  flat_heads=True,
)
# Classifiers of a mean of tokens do not read all of their tower.
_mean_of_tower = lambda unread, *kinds: _FORMAT._replace(
  marker=r'classifier\.weight',
  when=_typed(*kinds),
  ignored=rf'{_IGNORED}|vision_model\.{unread}\..*',
)
FORMATS = (
  _mean_of_tower('post_layernorm', 'clip'),
  _mean_of_tower('head', 'siglip', 'siglip2'),
  _FORMAT._replace(
    config=_config, write_rules=_write_rules, buffers=_mask_token, alike=_ALIKE
  ),
  _FORMAT._replace(  # without a model_type
    marker=r'(vit\.)?(encoder\.layer|layers)\.0\.layernorm_before\..+',
    when=lambda config, file: True,
  ),
)
