"""ViTs under the names of their authors' code: DINOv2, DINOv3, CLIP, MAE, EVA-02 and others.

The arrays tell widths, depth, registers, norms, gates and biases. They do not tell heads,
activation and rotary positions: those are constants of the authors' code, follow from the
name of a published file, or are passed by the user.
"""

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax.weights import configs, layers, pipelines
from vit_jax.weights import transforms as t
from vit_jax.weights.configs import Facts, Reader
from vit_jax.weights.families import vit
from vit_jax.weights.families.vit import ATTENTION, BLOCK, MAP, MLP, POSITIONS
from vit_jax.weights.formats import TRAINING, Fields, Format, Writer
from vit_jax.weights.rename import Arrays, Rule, Table, below, respelled, table

# -- what published names tell ----------------------------------------------------------

_CLIP_LEVELS = dict(zip(('mean', 'std'), pipelines.CLIP, strict=True))
_HALF_LEVELS = {'mean': (0.5,) * 3, 'std': (0.5,) * 3}
# Images in evaluation, in timm's words, with ImageNet's levels unless others are named:
# DINOv2, MAE and DeiT crop, CLIP crops nothing but a square, DINOv3 and PE squash.
_CROPPED = {'interpolation': 'bicubic', 'crop_pct': 0.875}
_WHOLE = {'interpolation': 'bicubic', 'crop_pct': 1.0}
_SQUASHED = {'interpolation': 'bilinear', 'crop_pct': 1.0, 'crop_mode': 'squash'}


def published(name: str) -> tuple[Fields, dict]:
  """Returns (fields, facts of images) that the name of a published file tells.

  vit_originals.json has regexes of names. A group of the regex tells the heads.
  """
  rows = json.loads(Path(__file__).with_suffix('.json').read_text('utf-8'))
  for regex, row in rows.items():
    if match := re.fullmatch(regex, name):
      heads = row['heads'][match[1]] if 'heads' in row else None
      fields = {'num_heads': heads} if heads else {}
      return fields | row.get('fields', {}), row.get('images', {})
  return {}, {}


def _facts(images: dict, image_size=None, **usual) -> Reader:
  """Returns the reader of facts: constants, then a published name, then our own config.

  `images` are those in evaluation, as `pipelines.of_timm` reads them.
  """

  def read(config, source):
    fields, special = published(Path(source).name)
    facts = configs.ours(config, usual | fields)
    size = facts.image_size or image_size
    return facts._replace(image_size=size, images=images | special)

  return read


# -- rename tables --------------------------------------------------------------------


def _gated(theirs: str, gate='w1', value='w2', out='w3', packed='w12') -> Table:
  """Returns the rules of a SwiGLU, its first two layers apart or packed, gate first."""
  return table(
    layers.dense(f'{theirs}.{gate}', f'{MLP}/gate'),
    layers.dense(f'{theirs}.{value}', f'{MLP}/Dense_0'),
    layers.dense(f'{theirs}.{out}', f'{MLP}/Dense_1'),
    layers.joined(f'{theirs}.{packed}', vit.GATED),
  )


def _unmasked(heads: int) -> t.Transform:
  """[3 D], the bias of q, k and v, -> those of q and v: the mask hides that of k.

  The masked third of a file may hold anything, NaN included.
  """
  joined = t.joined(t.heads_bias(heads), 3)
  return t.Transform(
    lambda x: joined.load(x)[::2],
    lambda xs: joined.save([xs[0], np.zeros_like(xs[0]), xs[1]]),
  )


def dino(heads: int, masked: bool) -> Table:
  """DINOv2 and DINOv3, also with blocks in chunks, as they are in training.

  `masked`: whether a mask hides the biases of keys.
  """
  bias = (f'{ATTENTION}/query/bias', f'{ATTENTION}/value/bias')
  qkv = 'blocks.{i}.attn.qkv'
  rules = table(
    Rule(f'{qkv}.bias', bias, _unmasked(heads)) if masked else (),
    Rule(f'{qkv}.bias_mask', (), t.dropped),
    Rule('rope_embed.periods', (), t.dropped),
    Rule('storage_tokens', 'registers'),
    Rule('register_tokens', 'registers'),
    layers.norm('cls_norm', 'Transformer/cls_norm'),
    _gated('blocks.{i}.mlp'),
    vit.timm(heads),
  )
  return table(rules, respelled(rules, (r'^blocks\.', 'blocks.{c}.')))


def _dino_rules(arrays: Arrays, facts: Facts) -> Table:
  masked = any(name.endswith('.bias_mask') for name in arrays)
  return dino(facts.fields['num_heads'], masked)


def clip(heads: int) -> Table:
  """The image tower of CLIP and of open_clip; it has no bias in patches and projection."""
  return table(
    Rule('class_embedding', 'cls', t.vector),
    Rule('positional_embedding', POSITIONS, t.rows),
    layers.conv('conv1', 'embedding'),
    layers.norm('ln_pre', 'Transformer/pre_norm'),
    layers.norm('ln_post', 'Transformer/encoder_norm'),
    Rule('proj', 'head/kernel'),
    layers.openai_block('transformer.resblocks.{i}', BLOCK, heads),
  )


def perception(heads: int, map_heads: int) -> Table:
  """The Perception Encoder: CLIP's names, and attention pooling."""
  pool = layers.attention_pool('attn_pool', MAP, map_heads)
  names = (r'attention', 'attn'), (r'fc1', 'c_fc'), (r'fc2', 'c_proj')
  return table(clip(heads), respelled(pool, *names), pool)


def eva(heads: int) -> Table:
  """EVA-01, EVA-02 and the image towers of EVA-CLIP."""
  return table(
    Rule('rope.freqs_{rest}', (), t.dropped),
    Rule('blocks.{i}.attn.rope.freqs_{rest}', (), t.dropped),
    layers.norm('blocks.{i}.attn.inner_attn_ln', f'{ATTENTION}/norm'),
    layers.norm('blocks.{i}.mlp.ffn_ln', f'{MLP}/norm'),
    _gated('blocks.{i}.mlp'),
    vit.timm(heads),
  )


def aim(heads: int) -> Table:
  """AIMv2."""
  names = (
    (r'^patch_embed', 'preprocessor.patchifier'),
    (r'^pos_embed', 'preprocessor.pos_embed'),
    (r'^norm', 'trunk.post_trunk_norm'),
    (r'^blocks', 'trunk.blocks'),
    (r'\.norm(\d)', r'.norm_\1'),
  )
  gated = _gated('trunk.blocks.{i}.mlp', 'fc1', 'fc3', 'fc2')
  return table(gated, respelled(vit.timm(heads), *names))


def plain(heads: int) -> Table:
  """DeiT, DeiT III, MAE and I-JEPA: the names that timm took over."""
  return vit.timm(heads, fields={'classifier': 'distilled'})


def trunk(heads: int) -> Table:
  """A model of timm as the image tower of open_clip."""
  return table(below(vit.timm(heads), 'trunk.'), layers.dense('head.proj', 'head'))


# -- fields ---------------------------------------------------------------------------


def _infer(flat: Arrays) -> Fields:
  """Returns the fields that arrays tell of a model by these authors."""
  fields = vit.infer(flat)
  fields['act'] = 'silu' if fields.get('mlp') == 'swiglu' else 'gelu_erf'
  if 'registers' in flat and POSITIONS in flat and 'head_dist/kernel' not in flat:
    fields['posemb_tokens'] = 'cls'
  if fields.get('final_norm') == 'pooled' and 'cls' in flat:
    fields |= {'classifier': 'gap', 'cls_token': True}
  return fields


def _dino_tells(arrays: Arrays) -> Fields:
  """Returns DINOv3's heads, and the base of its periods if it is not the formula's.

  Raises:
    ValueError: for a mask that hides other biases than those of the keys.
  """
  for name, x in arrays.items():
    if name.endswith('.qkv.bias_mask'):
      parts = np.asarray(x).reshape(3, -1)
      if not (parts == [[1], [0], [1]]).all():
        raise ValueError(f'{name} hides other biases than those of the keys')
  if 'rope_embed.periods' not in arrays:
    return {}
  periods = np.asarray(arrays['rope_embed.periods'], np.float32)
  fields = {'num_heads': arrays['cls_token'].shape[-1] // (4 * len(periods))}
  if not np.allclose(periods, _periods(len(periods)), rtol=1e-6):
    fields['rope_base'] = tuple(map(float, periods))
  return fields


def _periods(number: int) -> np.ndarray:
  return 100.0 ** (np.arange(number, dtype=np.float32) / number)


def _eva_tells(arrays: Arrays) -> Fields:
  """Returns the rotary positions: the files hold tables of them."""
  if (table := arrays.get('rope.freqs_cos')) is None:
    return {}
  table = np.asarray(table, np.float32)
  side = math.isqrt(len(table))
  if abs(table[side, 0] - math.cos(16 / side)) > 1e-3:  # the second row
    raise ValueError('its rotary positions are not scaled to a grid of 16 x 16')
  return {'rope': 'eva', 'rope_reference': (16, 16), 'block': 'pre'}


_OPEN_CLIP_KEYS = {'image_size', 'layers', 'width', 'head_width', 'patch_size'}
_OPEN_CLIP_KEYS |= {'mlp_ratio', 'patch_dropout', 'ls_init_value'}
_OPEN_CLIP_KEYS |= {'norm_kwargs', 'act_kwargs'}


def _open_clip(config: dict, source: str) -> Facts:
  """Reads the image tower's part of an open_clip_config.json."""
  whole = config['open_clip']
  model = configs.section(whole, 'model_cfg')
  vision = configs.section(model, 'vision_cfg')
  size = configs.pair(vision.get('image_size', 224))
  images = _open_clip_images(configs.section(whole, 'preprocess_cfg'))
  if name := vision.get('timm_model_name'):
    args = {'global_pool': vision.get('timm_pool', 'avg')}
    timm = {'architecture': name, 'model_args': args}
    facts = _TIMM.facts(timm, source)
    return facts._replace(image_size=size, images=images, config=config)
  if odd := vision.keys() - _OPEN_CLIP_KEYS:
    raise ValueError(
      f'vision_cfg.{min(odd)} is not read: it may compute something else'
    )
  fields = {
    'act': configs.open_clip_act(model, vision),
    'norm_eps': configs.section(vision, 'norm_kwargs').get('eps', 1e-5),
    'num_heads': vision['width'] // vision.get('head_width', 64),
  }
  pp = configs.section(config, 'vit_jax').get('pp')
  return Facts(fields, size, pp=pp, config=config, images=images)


def _open_clip_images(cfg: dict) -> dict:
  mode = cfg.get('resize_mode', 'shortest')
  if mode not in ('shortest', 'squash'):
    raise ValueError(f"resize_mode {mode!r} is not read: 'shortest' and 'squash' are")
  levels = {k: cfg.get(k, _CLIP_LEVELS[k]) for k in ('mean', 'std')}
  method = cfg.get('interpolation', 'bicubic')
  modes = {'shortest': 'center', 'squash': 'squash'}
  return levels | _WHOLE | {'interpolation': method, 'crop_mode': modes[mode]}


# -- written --------------------------------------------------------------------------


def _config(fields, image_size, class_names) -> dict:
  """Returns our own config: the fields that these authors' files do not tell."""
  one = dict(classifier=('token',), posemb_where=('stem',), attention=('full',))
  one |= dict(representation_size=(None,), stem_blocks=(None,), relpos=('none',))
  one |= dict(block=('pre',), kv_heads=(None,), norm=('layer',), dense_bias=(True,))
  one |= dict(layer_scale_where=('both',), projection=(None,), unit=(False,))
  one |= dict(posemb=('learn', 'none'), rope=('none', 'dinov3'))
  one |= dict(extra_norms=((), ('tokens',)))
  if fields['rope'] != 'dinov3':
    one |= dict(qkv_bias=('qkv', 'none'), final_norm=('tokens',))
  configs.need(fields, 'authors', **one)
  ours = {'fields': {'num_heads': fields['num_heads']}}
  if fields['extra_norms']:
    ours['fields']['act'] = fields['act']
  elif fields['layer_scale'] is None:
    raise ValueError('authors cannot express layer_scale=None but in CLIP')
  else:
    configs.need(fields, 'authors', num_classes=(None,), patch_bias=(True,))
  if image_size[0] != image_size[1]:
    ours['image_size'] = list(image_size)
  return {'vit_jax': ours | ({'class_names': class_names} if class_names else {})}


def _open_clip_config(fields, image_size, class_names) -> dict:
  """Returns the image tower's part of an open_clip_config.json."""
  one = dict(extra_norms=(('tokens',),), patch_bias=(False,), head_bias=(False,))
  one |= dict(act=('quick_gelu', 'gelu_erf'), posemb_tokens=('prefix', 'cls'))
  configs.need(fields, 'open_clip', **one)
  told = {*one, 'width', 'depth', 'num_heads', 'patch_size', 'mlp_dim', 'norm_eps'}
  told |= {'layer_scale', 'num_classes'}
  configs.need_defaults(fields, 'open_clip', 'vit', told | TRAINING)
  width = fields['width']
  vision = {
    'image_size': configs.one(image_size),
    'layers': fields['depth'],
    'width': width,
    'head_width': width // fields['num_heads'],
    'patch_size': configs.one(fields['patch_size']),
    'mlp_ratio': configs.timm_ratio(fields['mlp_dim'], width),
    'norm_kwargs': {'eps': fields['norm_eps']},
    'ls_init_value': fields['layer_scale'],
  }
  model = {'embed_dim': fields['num_classes'], 'vision_cfg': vision}
  model['quick_gelu'] = fields['act'] == 'quick_gelu'
  return {'open_clip': {'model_cfg': model}}


def _write_rules(flat: Arrays, fields: Fields) -> Table:
  heads, third = fields['num_heads'], fields['rope'] == 'dinov3'
  if 'tokens' in fields['extra_norms']:
    return below(clip(heads), 'visual.')
  absent = r'register_tokens|\.w12\.' if third else r'storage_tokens|\.w[12]\.'
  absent += r'|\.fc\d\.' if fields['mlp'] == 'swiglu' else r'|\.w\d+\.'
  rules = dino(heads, third and fields['qkv_bias'] == 'qv')
  return tuple(rule for rule in rules if not re.search(absent, rule.theirs))


def _buffers(flat: Arrays, fields: Fields) -> Arrays:
  """Returns DINO's mask token, and of DINOv3 the periods and the masks of biases."""
  if 'tokens' in fields['extra_norms']:
    return {}
  width = fields['width']
  arrays = {'mask_token': np.zeros((1, width), np.float32)}
  if fields['rope'] == 'dinov3':
    periods = fields['rope_base'] or _periods(width // fields['num_heads'] // 4)
    arrays['rope_embed.periods'] = np.float32(periods).reshape(-1)
    if fields['qkv_bias'] == 'qv':
      mask = np.repeat(np.float32([1, 0, 1]), width)
      for i in range(fields['depth']):
        arrays[f'blocks.{i}.attn.qkv.bias_mask'] = mask
  return arrays


# -- formats --------------------------------------------------------------------------

_TIMM = next(format for format in vit.FORMATS if format.name == 'timm')
_RESBLOCKS = r'(visual\.)?transformer\.resblocks\.0\.ln_1\.weight'


def _with_heads(rules: Callable[[int], Table]):
  return lambda arrays, facts: rules(facts.fields['num_heads'])


_format = functools.partial(
  Format,
  name='authors',
  family='vit',
  infer=_infer,
  grid=vit.grid,
  needs=('num_heads',),
  resize=lambda fields: 'bicubic_plain',
)
_perception = functools.partial(
  _format,
  within=r'visual\.',
  resize=lambda fields: 'bilinear_plain',
  rules=lambda arrays, facts: perception(
    facts.fields['num_heads'], facts.fields.get('map_heads', 8)
  ),
)
_open_clip_format = functools.partial(
  _format,
  name='open_clip',
  when=lambda config, name: 'open_clip' in config,
  resize=lambda fields: 'bicubic',
  within=r'visual\.',
  facts=_open_clip,
)
_pe_facts = functools.partial(
  _facts, _HALF_LEVELS | _SQUASHED, norm_eps=1e-5, rope='pe'
)
FORMATS = (
  _format(  # DINOv3
    marker=r'(backbone\.)?rope_embed\.periods',
    within=r'backbone\.',
    ignored=r'mask_token|(local_cls_norm|projectors)\..*',
    rules=_dino_rules,
    tells=_dino_tells,
    facts=_facts(_SQUASHED, (256, 256), norm_eps=1e-5, rope='dinov3'),
  ),
  _format(  # DINOv2; writes DINOv3 and CLIP too
    marker=(r'(backbone\.)?blocks\.(\d+\.)?0\.ls1\.gamma', r'(backbone\.)?mask_token'),
    within=r'backbone\.',
    ignored='mask_token',
    rules=_dino_rules,
    tells=_dino_tells,
    facts=_facts(_CROPPED),
    resize=lambda fields: 'bicubic' if fields.get('registers') else 'bicubic_offset',
    writer=Writer(config=_config, rules=_write_rules, buffers=_buffers),
  ),
  _perception(  # core models, with attention pooling
    marker=r'visual\.attn_pool\.probe',
    facts=_pe_facts(map_heads=8, map_prefix=True),
    needs=('num_heads', 'map_heads'),
  ),
  _perception(
    marker=_RESBLOCKS,
    when=lambda config, name: bool(re.match('PE-(Lang|Spatial)-', name)),
    facts=_pe_facts(),
  ),
  _open_clip_format(
    marker=_RESBLOCKS,
    rules=_with_heads(clip),
    writer=Writer(config=_open_clip_config, rules=_write_rules),
  ),
  _open_clip_format(
    marker=r'visual\.trunk\.blocks\.0\.attn\.qkv\.weight',
    rules=_with_heads(trunk),
    infer=vit.infer,
  ),
  _format(  # OpenAI
    marker=_RESBLOCKS,
    within=r'visual\.',
    rules=_with_heads(clip),
    facts=_facts(_CLIP_LEVELS | _WHOLE, norm_eps=1e-5),
    needs=('num_heads', 'act'),
  ),
  _format(  # EVA
    marker=r'(visual\.)?blocks\.0\.(mlp\.(w1|w12)|attn\.inner_attn_ln)\.weight'
    r'|visual\.blocks\.0\.attn\..*',
    within=r'visual\.',
    ignored=r'mask_token|lm_head\..*',
    rules=_with_heads(eva),
    tells=_eva_tells,
    facts=_facts(_CLIP_LEVELS | _WHOLE),
    needs=('num_heads', 'block'),
  ),
  _format(  # AIMv2
    marker=r'preprocessor\.patchifier\.proj\.weight',
    rules=_with_heads(aim),
    facts=_facts(_CLIP_LEVELS | _WHOLE, norm_eps=1e-5),
  ),
  _format(  # MAE with its decoder
    marker=r'decoder_embed\.weight',
    ignored=r'decoder_.*|mask_token',
    rules=_with_heads(plain),
    facts=_facts(_CROPPED),
  ),
  _format(  # timm's names, told apart by the name of the file
    marker=r'blocks\.0\.attn\.qkv\.weight',
    when=lambda config, name: 'architecture' not in config and bool(published(name)[0]),
    rules=_with_heads(plain),
    facts=_facts(_CROPPED),
  ),
  Format(  # the image tower of big_vision's two
    name='big_vision',
    family='vit',
    marker=r'img/Transformer/.*',
    within='img/',
    rules=vit.BIG_VISION,
    infer=vit.infer_google,
    grid=vit.grid,
    facts=configs.google(act='gelu_tanh'),
  ),
)
