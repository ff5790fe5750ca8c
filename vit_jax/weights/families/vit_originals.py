"""Reads ViTs from their authors' files: DINOv2, DINOv3, CLIP, MAE, EVA-02 and others.

Widths, depth, registers, norms, gates and biases follow from the arrays. The number of heads,
the activation and rotary positions do not. They are constants of the authors' code, follow
from the name of a published file, or must be passed by the user.
"""

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax import models
from vit_jax.models import hub
from vit_jax.weights import configs, pipelines, rename
from vit_jax.weights.configs import Facts, Reader
from vit_jax.weights.families import vit
from vit_jax.weights.families.vit import ATTENTION, BLOCK, MAP, MLP, POSITIONS
from vit_jax.weights.formats import TRAINING, Fields, Format, Writer
from vit_jax.weights.rename import Arrays, Rule, Table, nest_rules, respell, table

# -- facts from the names of published files ----------------------------------------------

_CLIP_LEVELS = dict(zip(('mean', 'std'), pipelines.CLIP, strict=True))
_HALF_LEVELS = {'mean': (0.5,) * 3, 'std': (0.5,) * 3}
# Preprocessing in timm's keys. Mean and std are ImageNet's unless stated. DINOv2, MAE and
# DeiT crop the centre, CLIP keeps the largest square, and DINOv3 and PE squash the image.
_CROPPED = {'interpolation': 'bicubic', 'crop_pct': 0.875}
_WHOLE = {'interpolation': 'bicubic', 'crop_pct': 1.0}
_SQUASHED = {'interpolation': 'bilinear', 'crop_pct': 1.0, 'crop_mode': 'squash'}


def look_up(name: str) -> tuple[Fields, dict]:
  """Returns (fields, preprocessing) for the name of a published file. Both may be empty.

  vit_originals.json holds regexes of names. The group of a regex selects the number of heads.
  """
  rows = json.loads(Path(__file__).with_suffix('.json').read_text('utf-8'))
  for regex, row in rows.items():
    if match := re.fullmatch(regex, name):
      heads = row['heads'][match[1]] if 'heads' in row else None
      fields = {'num_heads': heads} if heads else {}
      return fields | row.get('fields', {}), row.get('images', {})
  return {}, {}


def _facts(images: dict, image_size=None, **usual) -> Reader:
  """Makes a Reader of facts. The file's name overrides `usual`, and our config overrides both.

  Args:
    images: preprocessing, in the keys of `pipelines.read_timm`.
    image_size: (H, W), used if our config has none.
    **usual: fields that are constants of the authors' code.
  """

  def read(config, source):
    fields, special = look_up(Path(source).name)
    facts = configs.ours(config, usual | fields)
    size = facts.image_size or image_size
    return facts._replace(image_size=size, images=images | special)

  return read


# -- rename tables --------------------------------------------------------------------


def _swiglu(theirs: str, gate='w1', value='w2', out='w3') -> Table:
  """Makes the rules of a SwiGLU. Its first two layers may be one array, gate first."""
  return table(
    rename.dense(f'{theirs}.{gate}', f'{MLP}/gate'),
    rename.dense(f'{theirs}.{value}', f'{MLP}/Dense_0'),
    rename.dense(f'{theirs}.{out}', f'{MLP}/Dense_1'),
    rename.join(f'{theirs}.w12', vit.GATED),
  )


def _hide_key_bias(heads: int) -> rename.Transform:
  """Splits the biases [3 D] of q, k and v, and drops the bias of k, which a mask hides.

  The hidden third of a file's array may have any values, even NaN.
  """
  joined = rename.join_arrays(rename.heads_bias(heads), 3)
  return rename.Transform(
    lambda x: joined.load(x)[::2],
    lambda xs: joined.save([xs[0], np.zeros_like(xs[0]), xs[1]]),
  )


def dino(heads: int, masked: bool) -> Table:
  """Makes the rules of DINOv2 and DINOv3.

  Files of a training run, which store blocks in chunks, can be read too.

  Args:
    heads: the number of attention heads.
    masked: whether a mask hides the biases of keys.
  """
  bias = (f'{ATTENTION}/query/bias', f'{ATTENTION}/value/bias')
  qkv = 'blocks.{i}.attn.qkv'
  rules = table(
    Rule(f'{qkv}.bias', bias, _hide_key_bias(heads)) if masked else (),
    Rule(f'{qkv}.bias_mask', (), rename.drop),
    Rule('rope_embed.periods', (), rename.drop),
    Rule('storage_tokens', 'registers'),
    Rule('register_tokens', 'registers'),
    rename.norm('cls_norm', 'Transformer/cls_norm'),
    _swiglu('blocks.{i}.mlp'),
    vit.timm(heads),
  )
  return table(rules, respell(rules, (r'^blocks\.', 'blocks.{c}.')))


def _dino_rules(arrays: Arrays, facts: Facts) -> Table:
  masked = any(name.endswith('.bias_mask') for name in arrays)
  return dino(facts.fields['num_heads'], masked)


def clip(heads: int) -> Table:
  """Makes the rules of CLIP's and open_clip's image tower."""
  return table(
    Rule('class_embedding', 'cls', rename.vector),
    Rule('positional_embedding', POSITIONS, rename.rows),
    rename.conv('conv1', 'embedding'),
    rename.norm('ln_pre', 'Transformer/pre_norm'),
    rename.norm('ln_post', 'Transformer/encoder_norm'),
    Rule('proj', 'head/kernel'),
    rename.openai_block('transformer.resblocks.{i}', BLOCK, heads),
  )


def perception(heads: int, map_heads: int) -> Table:
  """Makes the rules of the Perception Encoder: CLIP's names, and attention pooling."""
  pool = rename.attention_pool('attn_pool', MAP, map_heads)
  names = (r'attention', 'attn'), (r'fc1', 'c_fc'), (r'fc2', 'c_proj')
  return table(clip(heads), respell(pool, *names), pool)


def eva(heads: int) -> Table:
  """Makes the rules of EVA-01, EVA-02 and the image towers of EVA-CLIP."""
  return table(
    Rule('rope.freqs_{rest}', (), rename.drop),
    Rule('blocks.{i}.attn.rope.freqs_{rest}', (), rename.drop),
    rename.norm('blocks.{i}.attn.inner_attn_ln', f'{ATTENTION}/norm'),
    rename.norm('blocks.{i}.mlp.ffn_ln', f'{MLP}/norm'),
    _swiglu('blocks.{i}.mlp'),
    vit.timm(heads),
  )


def aim(heads: int) -> Table:
  """Makes the rules of AIMv2."""
  names = (
    (r'^patch_embed', 'preprocessor.patchifier'),
    (r'^pos_embed', 'preprocessor.pos_embed'),
    (r'^norm', 'trunk.post_trunk_norm'),
    (r'^blocks', 'trunk.blocks'),
    (r'\.norm(\d)', r'.norm_\1'),
  )
  gated = _swiglu('trunk.blocks.{i}.mlp', 'fc1', 'fc3', 'fc2')
  pool = vit.query_head('head', heads, ('k', 'v', 'linear'))
  head = rename.dense('projector', 'head')
  return table(gated, pool, head, respell(vit.timm(heads), *names))


def plain(heads: int) -> Table:
  """Makes the rules of DeiT, DeiT III, MAE and I-JEPA, whose names timm adopted."""
  return vit.timm(heads, fields={'classifier': 'distilled'})


def trunk(heads: int) -> Table:
  """Makes the rules of a timm model that is the image tower of open_clip."""
  return table(nest_rules(vit.timm(heads), 'trunk.'), rename.dense('head.proj', 'head'))


# -- fields ---------------------------------------------------------------------------


def _infer(flat: Arrays) -> Fields:
  """Infers the fields of these authors' models from the parameters."""
  fields = vit.infer(flat)
  fields['act'] = 'silu' if fields.get('mlp') == 'swiglu' else 'gelu_erf'
  if 'registers' in flat and POSITIONS in flat and 'head_dist/kernel' not in flat:
    fields['posemb_tokens'] = 'cls'
  if fields.get('final_norm') == 'pooled' and 'cls' in flat:
    fields |= {'classifier': 'gap', 'cls_token': True}
  return fields


def _infer_aim(flat: Arrays) -> Fields:
  """Infers the fields of AIMv2. Without a table, its positions are sine-cosine."""
  return _infer(flat) | ({} if POSITIONS in flat else {'posemb': 'sincos2d_mae'})


def _dino_tells(arrays: Arrays) -> Fields:
  """Returns DINOv3's number of heads, and its rotary periods if they are not the usual ones.

  Raises:
    ValueError: if a mask hides other biases than those of the keys.
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
  """Infers rotary positions from the tables of cosines in the file."""
  if (table := arrays.get('rope.freqs_cos')) is None:
    return {}
  table = np.asarray(table, np.float32)
  side = math.isqrt(len(table))
  # The first entry of the grid's second row is the cosine of one step.
  if abs(table[side, 0] - math.cos(16 / side)) > 1e-3:
    raise ValueError('its rotary positions are not scaled to a grid of 16 x 16')
  return {'rope': 'eva', 'rope_reference': (16, 16), 'block': 'pre'}


# Keys of open_clip's vision_cfg that are read here, or that change no output.
_OPEN_CLIP_KEYS = {'layers', 'width', 'head_width', 'patch_size'}
_OPEN_CLIP_KEYS |= {'mlp_ratio', 'patch_dropout', 'ls_init_value'}
_OPEN_CLIP_KEYS |= {'norm_kwargs', 'act_kwargs'}


def name_open_clip(arrays: Arrays, source: str, variant: str | None) -> dict:
  """Returns the facts of an open_clip_config.json that is missing, by the model's name.

  open_clip calls every file open_clip_pytorch_model.bin, so the name is that of a folder, or
  `variant`. OpenAI's files have names of their own.
  """
  path = Path(source)
  is_clip = any(re.fullmatch(_RESBLOCKS, name) for name in arrays)
  if not is_clip or look_up(path.name)[0]:
    return {}
  for part in filter(None, [variant, *reversed(path.parts)]):
    # The cache of the hub has models--OWNER--NAME.
    name = re.sub('^CLIP-', 'laion/CLIP-', part.rpartition('--')[2])
    if re.match('(laion/CLIP-)?ViT-', name) and hub.published(name):
      _, fields = models.resolve(name)
      width, quick = fields['width'], fields['act'] == 'quick_gelu'
      # The table of positions tells the size of images.
      vision = dict(
        width=width, head_width=width // fields['num_heads'], image_size=None
      )
      return {'open_clip': {'model_cfg': {'quick_gelu': quick, 'vision_cfg': vision}}}
  return {}


def _read_tower(model: dict, vision: dict) -> Facts:
  """Reads the fields of the image tower from an open_clip_config.json."""
  head_width = configs.side(vision.get('head_width', 64), 'head_width')
  eps = configs.section(vision, 'norm_kwargs').get('eps', 1e-5)
  fields = {
    'act': configs.open_clip_act(model, vision),
    'norm_eps': configs.epsilon(eps),
    'width': vision['width'],
    'num_heads': vision['width'] // head_width,
  }
  return Facts(fields)


# -- writing --------------------------------------------------------------------------


def _config(fields, image_size, class_names) -> dict:
  """Writes our own config: the fields that the arrays of these authors do not show."""
  allowed = {
    'classifier': ('token',),
    'posemb_where': ('stem',),
    'attention': ('full',),
    'representation_size': (None,),
    'stem_blocks': (None,),
    'relpos': ('none',),
    'block': ('pre',),
    'kv_heads': (None,),
    'norm': ('layer',),
    'dense_bias': (True,),
    'layer_scale_where': ('both',),
    'projection': (None,),
    'unit': (False,),
    'posemb': ('learn', 'none'),
    'rope': ('none', 'dinov3'),
    'extra_norms': ((), ('tokens',)),
  }
  if fields['rope'] != 'dinov3':
    allowed |= {'qkv_bias': ('qkv', 'none'), 'final_norm': ('tokens',)}
  configs.need(fields, 'authors', **allowed)
  ours = {'fields': {'num_heads': fields['num_heads']}}
  if fields['extra_norms']:
    ours['fields']['act'] = fields['act']
  elif fields['layer_scale'] is None:
    raise ValueError('authors cannot express layer_scale=None, except in CLIP')
  else:
    configs.need(fields, 'authors', num_classes=(None,), patch_bias=(True,))
  if image_size[0] != image_size[1]:
    ours['image_size'] = list(image_size)
  return {'vit_jax': ours | ({'class_names': class_names} if class_names else {})}


def _open_clip_config(fields, image_size, class_names) -> dict:
  """Writes the image tower's part of an open_clip_config.json."""
  allowed = {
    'extra_norms': (('tokens',),),
    'patch_bias': (False,),
    'head_bias': (False,),
    'act': ('quick_gelu', 'gelu_erf'),
    'posemb_tokens': ('prefix', 'cls'),
  }
  configs.need(fields, 'open_clip', **allowed)
  # Fields that the config below, or the arrays, can express with any value.
  free = {'width', 'depth', 'num_heads', 'patch_size', 'mlp_dim', 'norm_eps'}
  free |= {'layer_scale', 'num_classes'}
  configs.need_defaults(fields, 'open_clip', 'vit', {*allowed} | free | TRAINING)
  width = fields['width']
  vision = {
    'image_size': configs.int_or_pair(image_size),
    'layers': fields['depth'],
    'width': width,
    'head_width': width // fields['num_heads'],
    'patch_size': configs.int_or_pair(fields['patch_size']),
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
    return nest_rules(clip(heads), 'visual.')
  absent = r'register_tokens|\.w12\.' if third else r'storage_tokens|\.w[12]\.'
  absent += r'|\.fc\d\.' if fields['mlp'] == 'swiglu' else r'|\.w\d+\.'
  rules = dino(heads, third and fields['qkv_bias'] == 'qv')
  return tuple(rule for rule in rules if not re.search(absent, rule.theirs))


def _buffers(flat: Arrays, fields: Fields) -> Arrays:
  """Returns DINO's mask token, and for DINOv3 the periods and the masks of biases too."""
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


def _pass_heads(rules: Callable[[int], Table]):
  """Turns a function of the number of heads into a `Format.rules`."""
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
)
_pe_facts = functools.partial(
  _facts, _HALF_LEVELS | _SQUASHED, norm_eps=1e-5, rope='pe'
)
# MAE. With its decoder, the ring `learn` reads and writes it.
MAE = _format(
  marker=r'decoder_embed\.weight',
  ignored=r'decoder_.*|mask_token',
  rules=_pass_heads(plain),
  facts=_facts(_CROPPED),
)
# DINOv2. This format also writes DINOv3 and CLIP. The ring `learn` reads its heads.
DINOV2 = _format(
  marker=(r'(backbone\.)?blocks\.(\d+\.)?0\.ls1\.gamma', r'(backbone\.)?mask_token'),
  within=r'backbone\.',
  ignored='mask_token',
  rules=_dino_rules,
  tells=_dino_tells,
  facts=_facts(_CROPPED),
  resize=lambda fields: 'bicubic' if fields.get('registers') else 'bicubic_offset',
  writer=Writer(config=_config, rules=_write_rules, buffers=_buffers),
)
FORMATS = (
  # DINOv3.
  _format(
    marker=r'(backbone\.)?rope_embed\.periods',
    within=r'backbone\.',
    ignored=r'mask_token|(local_cls_norm|projectors)\..*',
    rules=_dino_rules,
    tells=_dino_tells,
    facts=_facts(_SQUASHED, (256, 256), norm_eps=1e-5, rope='dinov3'),
  ),
  DINOV2,
  # The core models of the Perception Encoder, which have attention pooling.
  _perception(
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
    rules=_pass_heads(clip),
    facts=configs.open_clip(_read_tower, _OPEN_CLIP_KEYS),
    writer=Writer(config=_open_clip_config, rules=_write_rules),
  ),
  _open_clip_format(
    marker=r'visual\.trunk\.blocks\.0\.attn\.qkv\.weight',
    rules=_pass_heads(trunk),
    facts=configs.open_clip_trunk(_TIMM.facts),
    infer=vit.infer,
  ),
  # OpenAI's CLIP.
  _format(
    marker=_RESBLOCKS,
    within=r'visual\.',
    rules=_pass_heads(clip),
    facts=_facts(_CLIP_LEVELS | _WHOLE, norm_eps=1e-5),
    needs=('num_heads', 'act'),
  ),
  # EVA.
  _format(
    marker=r'(visual\.)?blocks\.0\.(mlp\.(w1|w12)|attn\.inner_attn_ln)\.weight'
    r'|visual\.blocks\.0\.attn\..*',
    within=r'visual\.',
    ignored=r'mask_token|lm_head\..*',
    rules=_pass_heads(eva),
    tells=_eva_tells,
    facts=_facts(_CLIP_LEVELS | _WHOLE),
    needs=('num_heads', 'block'),
  ),
  # AIMv2.
  _format(
    marker=r'(image_encoder\.)?preprocessor\.patchifier\.proj\.weight',
    within=r'image_encoder\.|image_(?=projector)',
    rules=_pass_heads(aim),
    infer=_infer_aim,
    facts=_facts(_CLIP_LEVELS | _WHOLE, norm_eps=1e-5),
  ),
  MAE,
  # Files with timm's names, recognised by the name of the file.
  _format(
    marker=r'blocks\.0\.attn\.qkv\.weight',
    when=lambda config, name: 'architecture' not in config and bool(look_up(name)[0]),
    rules=_pass_heads(plain),
    facts=_facts(_CROPPED),
  ),
  # The image tower of big_vision's models of image and text.
  Format(
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
