"""ViTs and hybrids, in the formats of Google and timm."""

import functools
import math
import operator
import re
from collections.abc import Mapping
from types import MappingProxyType

from vit_jax.models import timm as timm_names
from vit_jax.models import vit_later
from vit_jax.weights import configs, rename, timm_options
from vit_jax.weights.formats import TRAINING, Format, Writer
from vit_jax.weights.rename import Rule, Table, table

POSITIONS = 'Transformer/posembed_input/pos_embedding'
BLOCK = 'Transformer/encoderblock_{i}'
ATTENTION = f'{BLOCK}/MultiHeadDotProductAttention_0'
MLP = f'{BLOCK}/MlpBlock_0'
GATED = (f'{MLP}/gate', f'{MLP}/Dense_0')  # the first two layers of a SwiGLU
MAP = 'MAPHead_0'
QUERY = 'QueryHead_0'


def _keep_names(*names: str) -> tuple[Rule, ...]:
  return tuple(Rule(name, name) for name in names)


# Google's ResNet with GroupNorm: the stem of a hybrid, and a model of its own.
RESNET = table(
  Rule('conv_root/kernel', 'conv_root/kernel'),
  [
    Rule(name, name, rename.group_norm_vector)
    for name in (
      'gn_root/{rest}',
      'block{i}/unit{j}/gn{k}/{rest}',
      'block{i}/unit{j}/gn_proj/{rest}',
    )
  ],
  _keep_names('block{i}/unit{j}/{rest}', 'head/{rest}'),
)

# Before Linen, Flax numbered the modules of a block in one sequence. All files of the paper,
# AugReg and SAM have such names. Newer files have our names.
GOOGLE = table(
  Rule(f'{BLOCK}/MultiHeadDotProductAttention_1/{{rest}}', f'{ATTENTION}/{{rest}}'),
  Rule(f'{BLOCK}/LayerNorm_2/{{rest}}', f'{BLOCK}/LayerNorm_1/{{rest}}'),
  Rule(f'{BLOCK}/MlpBlock_3/{{rest}}', f'{MLP}/{{rest}}'),
  _keep_names(
    f'{BLOCK}/{{rest}}',
    'Transformer/encoder_norm/{rest}',
    'Transformer/posembed_input/{rest}',
    'cls',
    'embedding/{rest}',
    'embedding_norm/{rest}',
    'registers',
    'Transformer/pre_norm/{rest}',
    'Transformer/relpos/{rest}',
    'Transformer/cls_norm/{rest}',
    'pooled_norm/{rest}',
    'head_dist/{rest}',
    'pre_logits/{rest}',
    'projection/{rest}',
    f'{MAP}/{{rest}}',
    f'{QUERY}/{{rest}}',
  ),
  Rule('Transformer/pos_embedding', POSITIONS, only_load=True),
  # Until 2022, big_vision stored the modules of the MAP head at the top level.
  Rule('probe', f'{MAP}/probe', only_load=True),
  [
    Rule(f'{module}/{{rest}}', f'{MAP}/{module}/{{rest}}', only_load=True)
    for module in ('LayerNorm_0', 'MlpBlock_0', 'MultiHeadDotProductAttention_0')
  ],
  RESNET,
)


# Google's names, but positions are at the top level, and the class token has no position.
BIG_VISION = table(Rule('pos_embedding', POSITIONS), GOOGLE)


def infer(flat: dict) -> dict:
  """Infers the model's fields from parameters that are not stacked."""
  axial = any(name.startswith(f'{BLOCK.format(i=0)}/rows/') for name in flat)

  def in_first_block(template: str) -> str:
    """Returns a name in the first block, along the rows if attention is axial."""
    name = template.format(i=0)
    return name.replace('_0/', '_0/rows/', 1) if axial else name

  *patch_size, _, width = flat['embedding/kernel'].shape
  _, heads, _ = flat[f'{in_first_block(ATTENTION)}/query/kernel'].shape
  fields = dict(
    patch_size=tuple(patch_size),
    width=width,
    depth=len({name.split('/')[1] for name in flat if '/encoderblock_' in name}),
    mlp_dim=flat[f'{in_first_block(MLP)}/Dense_0/kernel'].shape[1],
    num_heads=heads,
    classifier='map' if f'{MAP}/probe' in flat else 'token' if 'cls' in flat else 'gap',
    num_classes=columns(flat, 'head/kernel'),
    representation_size=columns(flat, 'pre_logits/kernel'),
    projection=columns(flat, 'projection/kernel'),
    **_positions(flat),
  )
  fields |= _variations(flat, heads, lambda template: in_first_block(template) in flat)
  if fields['classifier'] == 'map':
    pool = flat[f'{MAP}/MultiHeadDotProductAttention_0/query/kernel'].shape[1]
    hidden = flat[f'{MAP}/MlpBlock_0/Dense_0/kernel'].shape[1]
    fields |= {'map_heads': pool} if pool != heads else {}
    fields |= {'map_mlp_dim': hidden} if hidden != fields['mlp_dim'] else {}
  if axial:
    fields['attention'] = 'axial'
  if 'conv_root/kernel' in flat:
    fields['stem_width'] = columns(flat, 'conv_root/kernel')
    fields['stem_blocks'] = resnet_blocks(flat)
  return fields


def _variations(flat: dict, heads: int, has) -> dict:
  """Infers the fields in which a model differs from the paper's ViT.

  Args:
    flat: the parameters.
    heads: the number of attention heads.
    has: a function of a name's template that returns whether the first block has that
      parameter.
  """
  query, key, _ = (has(f'{ATTENTION}/{name}/bias') for name in rename.QKV)
  final = '' if has('Transformer/encoder_norm/scale') else 'none'
  final = 'pooled' if final and has('pooled_norm/scale') else final
  scale = has(f'{BLOCK}/LayerScale_0/gamma')
  second = has(f'{BLOCK}/LayerNorm_1/scale')
  only_first = scale and second and not has(f'{BLOCK}/LayerScale_1/gamma')
  kernels = (flat.get(f'{ATTENTION.format(i=i)}/key/kernel') for i in range(len(flat)))
  keys = tuple(kernel.shape[1] for kernel in kernels if kernel is not None)
  relpos, relpos_dim = '', None
  for kind, at in (('layer', BLOCK.format(i=0)), ('shared', 'Transformer')):
    hidden = columns(flat, f'{at}/relpos/mlp/Dense_0/kernel')
    if hidden or f'{at}/relpos/table' in flat:
      relpos, relpos_dim = kind, hidden
  branches = has(f'{BLOCK}/MlpBlock_1/Dense_0/kernel')
  heads_of = (('distilled', 'head_dist/kernel'), ('query', f'{QUERY}/query'))
  fields = {
    'cls_token': f'{MAP}/probe' in flat and 'cls' in flat,
    'registers': flat['registers'].shape[1] if 'registers' in flat else 0,
    'layer_scale': 1e-5 if scale else None,
    'layer_scale_where': 'attention' if only_first else '',
    'qkv_bias': ('' if key else 'qv') if query else 'none',
    'norm': '' if has(f'{BLOCK}/LayerNorm_0/bias') else 'rms',
    'extra_norms': tuple(k for k, norm in _EXTRA_NORMS.items() if has(f'{norm}/scale')),
    'mlp': 'swiglu' if has(f'{MLP}/gate/kernel') else '',
    'rope': 'mixed' if has(f'{BLOCK}/rope/frequencies') else '',
    'relpos': relpos,
    'relpos_dim': relpos_dim,
    'block': 'branches' if branches else '' if second else 'parallel',
    'kv_heads': keys if {*keys} - {heads} else (),
    'final_norm': 'untied' if has('Transformer/cls_norm/scale') else final,
    'classifier': next((pool for pool, name in heads_of if name in flat), ''),
  }
  biases = {
    'dense_bias': has(f'{ATTENTION}/out/bias'),
    'patch_bias': 'embedding/bias' in flat,
    'head_bias': 'head/bias' in flat or 'head/kernel' not in flat,
  }
  fields = {key: value for key, value in fields.items() if value}
  return fields | {key: False for key, there in biases.items() if not there}


_EXTRA_NORMS = {
  'patches': 'embedding_norm',
  'tokens': 'Transformer/pre_norm',
  'qk': f'{ATTENTION}/query_norm',
  'attention': f'{ATTENTION}/norm',
  'mlp': f'{MLP}/norm',
}


def columns(flat: dict, kernel: str) -> int | None:
  """Returns the number of a kernel's outputs, or None if the kernel is absent."""
  return flat[kernel].shape[-1] if kernel in flat else None


def _positions(flat) -> dict:
  for name in flat:
    if re.fullmatch(r'.*/posembed_relative/pos_embedding', name):
      return dict(posemb='relative')
    if match := re.fullmatch(r'(.*)/posembed_input/pos_embedding(_x)?', name):
      kind = dict(posemb='learn2d' if match[2] else 'learn')
      return kind | (dict(posemb_where='every') if '/' in match[1] else {})
  return dict(posemb='none')


def resnet_blocks(flat) -> tuple[int, ...]:
  """Counts the units in each block of a ResNet."""
  units = {m.groups() for x in flat if (m := re.match(r'block(\d+)/unit(\d+)/', x))}
  numbers = [int(block) for block, _ in units]
  return tuple(numbers.count(i + 1) for i in range(max(numbers, default=0)))


def grid(flat: dict, fields: dict) -> tuple[int, int] | None:
  """Returns the grid (h, w) of the position embeddings, or None if it is not square."""
  if POSITIONS not in flat:
    return None
  prefix = vit_later.has_cls(fields) + fields['registers']
  before = {'prefix': prefix, 'cls': 1, 'patches': 0}[fields['posemb_tokens']]
  return square(flat[POSITIONS].shape[1] - before)


def square(rows: int) -> tuple[int, int] | None:
  """Returns the grid (h, w) of a table of positions, or None if it is not square."""
  side = math.isqrt(rows)
  return (side, side) if side * side == rows else None


def infer_google(flat: dict) -> dict:
  """Infers the fields of Google's models. Without a table, their positions are sine-cosine."""
  fields = infer(flat)
  if fields['posemb'] == 'none':
    fields['posemb'] = 'sincos2d'
  return fields


def _google_config(fields, image_size, class_names) -> dict:
  published = {
    'act': 'gelu_tanh',
    'norm_eps': 1e-6,
    'posemb': 'learn',
    'posemb_where': 'stem',
    'posemb_tokens': 'prefix',
    'attention': 'full',
    'rope': 'none',
    'rope_base': None,
    'rope_reference': None,
    'block': 'pre',
    'map_prefix': False,
    'cls_token': None,
    'unit': False,
  }
  # These two kinds of blocks can be recognised from the arrays, so they are not written.
  if fields['block'] in ('parallel', 'branches'):
    published['block'] = fields['block']
  # Other classifiers have the same arrays, so they are written unless they are the default.
  if fields['classifier'] not in ('distilled', 'map', 'query'):
    published['classifier'] = 'token' if vit_later.has_cls(fields) else 'gap'
  return configs.google_config(**published)(fields, image_size, class_names)


def _google_write_rules(flat: dict, fields: dict) -> Table:
  return BIG_VISION if fields['posemb_tokens'] == 'patches' else GOOGLE


_RESNET = 'patch_embed.backbone'


def timm(heads: int, has_stages: bool = True, fields: Mapping = MappingProxyType({})):
  """Makes the rules of timm's VisionTransformer, Eva, Beit and hybrids.

  Args:
    heads: the number of attention heads.
    has_stages: whether a hybrid's ResNet has stages. Otherwise it is only a root.
    fields: those fields of the model on which names of arrays depend.
  """
  pool, unit = f'{MAP}/MultiHeadDotProductAttention_0', 'block{s+1}/unit{u+1}'
  pool_heads = fields.get('map_heads') or heads
  stage = f'{_RESNET}.stages.{{s}}.blocks.{{u}}'
  root = f'{_RESNET}.stem' if has_stages else _RESNET
  return table(
    Rule('cls_token', 'cls'),
    Rule(
      'dist_token' if fields.get('classifier') == 'distilled' else 'reg_token',
      'registers',
    ),
    Rule('pos_embed', POSITIONS),
    rename.conv('patch_embed.proj', 'embedding'),
    rename.norm('patch_embed.norm', 'embedding_norm'),
    rename.norm('norm_pre', 'Transformer/pre_norm'),
    _timm_block(heads, fields),
    rename.norm('norm', 'Transformer/encoder_norm'),
    rename.norm('fc_norm', 'pooled_norm'),
    rename.dense('head', 'head'),
    rename.dense('head_dist', 'head_dist'),
    Rule('attn_pool.latent', f'{MAP}/probe'),
    rename.split_heads('attn_pool.q', f'{pool}/query', pool_heads),
    rename.fuse_heads('attn_pool.kv', pool, pool_heads, ('key', 'value')),
    rename.merge_heads('attn_pool.proj', f'{pool}/out', pool_heads),
    rename.norm('attn_pool.norm', f'{MAP}/LayerNorm_0'),
    rename.dense('attn_pool.mlp.fc1', f'{MAP}/MlpBlock_0/Dense_0'),
    rename.dense('attn_pool.mlp.fc2', f'{MAP}/MlpBlock_0/Dense_1'),
    rename.conv(f'{root}.conv', 'conv_root'),
    rename.norm(f'{root}.norm', 'gn_root'),
    rename.conv(f'{stage}.conv{{k}}', f'{unit}/conv{{k}}'),
    rename.norm(f'{stage}.norm{{k}}', f'{unit}/gn{{k}}'),
    rename.conv(f'{stage}.downsample.conv', f'{unit}/conv_proj'),
    rename.norm(f'{stage}.downsample.norm', f'{unit}/gn_proj'),
  )


def query_head(theirs: str, heads: int, names: tuple[str, str, str]) -> Table:
  """Makes the rules of AIMv2's attention pooling, given the names of its three layers."""
  key, value, out = names
  query = rename.Transform(
    lambda x: (x.reshape(heads, -1),), lambda xs: xs[0].reshape(1, 1, -1)
  )
  return table(
    Rule(f'{theirs}.cls_token', f'{QUERY}/query', query),
    rename.split_heads(f'{theirs}.{key}', f'{QUERY}/key', heads),
    rename.split_heads(f'{theirs}.{value}', f'{QUERY}/value', heads),
    rename.dense(f'{theirs}.{out}', f'{QUERY}/out'),
  )


def _timm_block(heads: int, fields: Mapping) -> Table:
  """Makes one table for all kinds of blocks in timm: their arrays have different names."""
  depth, block = fields.get('depth', 0), 'blocks.{i}'
  attention, mlp = f'{block}.attn', f'{block}.mlp'
  kv_heads = fields.get('kv_heads') or ()
  frequencies = tuple(f'{BLOCK.format(i=i)}/rope/frequencies' for i in range(depth))
  number = lambda name, j: name.replace('_0', f'_{j}')
  relpos = (f'{attention}.rel_pos', BLOCK), ('shared_rel_pos', 'Transformer')
  return table(
    [
      (
        rename.norm(f'{block}.norm{j + 1}', f'{BLOCK}/LayerNorm_{j}'),
        Rule(f'{block}.ls{j + 1}.gamma', f'{BLOCK}/LayerScale_{j}/gamma'),
        Rule(f'{block}.gamma_{j + 1}', f'{BLOCK}/LayerScale_{j}/gamma'),
      )
      for j in (0, 1)
    ],
    rename.fuse_heads(f'{attention}.qkv', ATTENTION, heads),
    # If query heads share keys and values, each block has its own number of key heads.
    [
      rename.split_heads(
        f'blocks.{i}.attn.{x[0]}_proj', f'{ATTENTION.format(i=i)}/{x}', n
      )
      for i, n in enumerate(kv_heads)
      for x in ('key', 'value')
    ],
    [
      (
        rename.split_heads(f'{attention}.{x[0]}_proj', f'{ATTENTION}/{x}', heads),
        Rule(
          f'{attention}.{x[0]}_bias', f'{ATTENTION}/{x}/bias', rename.heads_bias(heads)
        ),
        rename.norm(f'{attention}.{x[0]}_norm', f'{ATTENTION}/{x}_norm'),
      )
      for x in rename.QKV
    ],
    rename.norm(f'{attention}.norm', f'{ATTENTION}/norm'),
    rename.merge_heads(f'{attention}.proj', f'{ATTENTION}/out', heads),
    Rule(f'{attention}.relative_position_bias_table', f'{BLOCK}/relpos/table'),
    Rule('rel_pos_bias.relative_position_bias_table', 'Transformer/relpos/table'),
    [
      (
        Rule(f'{theirs}.relative_position_bias_table', f'{ours}/relpos/table'),
        rename.dense(f'{theirs}.mlp.fc1', f'{ours}/relpos/mlp/Dense_0'),
        rename.dense(f'{theirs}.mlp.fc2', f'{ours}/relpos/mlp/Dense_1'),
      )
      for theirs, ours in relpos
    ],
    Rule('rope.freqs', frequencies, rename.split_layers(heads)) if depth else (),
    rename.join(f'{mlp}.fc1', GATED)
    if fields.get('mlp') == 'swiglu'
    else rename.dense(f'{mlp}.fc1', f'{MLP}/Dense_0'),
    rename.dense(f'{mlp}.fc1_g', f'{MLP}/gate'),
    rename.dense(f'{mlp}.fc1_x', f'{MLP}/Dense_0'),
    rename.dense(f'{mlp}.fc2', f'{MLP}/Dense_1'),
    rename.norm(f'{mlp}.norm', f'{MLP}/norm'),
    # Blocks with two parallel attentions, then two parallel MLPs.
    [
      (
        rename.norm(f'{block}.attns.{j}.norm', f'{BLOCK}/LayerNorm_{j}'),
        rename.norm(f'{block}.ffns.{j}.norm', f'{BLOCK}/LayerNorm_{j + 2}'),
        Rule(f'{block}.attns.{j}.ls.gamma', f'{BLOCK}/LayerScale_{j}/gamma'),
        Rule(f'{block}.ffns.{j}.ls.gamma', f'{BLOCK}/LayerScale_{j + 2}/gamma'),
        rename.fuse_heads(f'{block}.attns.{j}.attn.qkv', number(ATTENTION, j), heads),
        rename.merge_heads(
          f'{block}.attns.{j}.attn.proj', f'{number(ATTENTION, j)}/out', heads
        ),
        rename.dense(f'{block}.ffns.{j}.mlp.fc1', f'{number(MLP, j)}/Dense_0'),
        rename.dense(f'{block}.ffns.{j}.mlp.fc2', f'{number(MLP, j)}/Dense_1'),
      )
      for j in (0, 1)
    ],
    # Parallel blocks: one projection makes the MLP's input, queries, keys and values.
    rename.norm(f'{block}.in_norm', f'{BLOCK}/LayerNorm_0'),
    [
      Rule(
        f'{block}.in_proj.{theirs}',
        (f'{MLP}/Dense_0/{leaf}', *(f'{ATTENTION}/{x}/{leaf}' for x in rename.QKV)),
        rename.join_mlp_and_qkv(part, heads_part(heads), fields.get('width', 0)),
      )
      for theirs, leaf, part, heads_part in (
        ('weight', 'kernel', rename.dense_kernel, rename.heads_kernel),
        ('bias', 'bias', rename.same, rename.heads_bias),
      )
    ],
    Rule(f'{block}.mlp_bias', f'{MLP}/Dense_0/bias'),
    rename.norm(f'{block}.q_norm', f'{ATTENTION}/query_norm'),
    rename.norm(f'{block}.k_norm', f'{ATTENTION}/key_norm'),
    rename.merge_heads(f'{block}.attn_out_proj', f'{ATTENTION}/out', heads),
    rename.dense(f'{block}.mlp_out_proj', f'{MLP}/Dense_1'),
    Rule(f'{block}.ls.gamma', f'{BLOCK}/LayerScale_0/gamma'),
  )


def _timm_rules(arrays, facts) -> Table:
  has_stages = any(name.startswith(f'{_RESNET}.stages') for name in arrays)
  fields = {**facts.fields, 'width': len(arrays['patch_embed.proj.weight'])}
  fields['depth'] = 1 + max(
    int(m[1]) for name in arrays if (m := re.match(r'blocks\.(\d+)\.', name))
  )
  return timm(fields['num_heads'], has_stages, fields)


def _timm_positions(flat: dict, fields: dict, facts: configs.Facts) -> dict:
  """Returns posemb_tokens='patches' if the table has no row for the class token.

  Raises:
    ValueError: if the model is not the paper's and timm does not know the file's name. Its
      activation, epsilon, pooling and rotary positions do not follow from the arrays.
  """
  if 'classifier' not in facts.fields:  # timm does not know the name
    later = _variations(flat, fields['num_heads'], lambda x: x.format(i=0) in flat)
    later |= {'posemb': 'none'} if fields['posemb'] == 'none' else {}
    if later:
      raise ValueError(
        f'the arrays (with {[*later]}) do not determine the model: keep config.json beside '
        "the file, or name the file after timm's name of the model"
      )
  _check_shapes(fields, facts.config or {})
  in_config = 'posemb_tokens' in facts.fields
  if in_config or fields['classifier'] != 'token' or POSITIONS not in flat:
    return {}
  rows = flat[POSITIONS].shape[1]
  # Without an image size, the grid is assumed to be square.
  has_row = math.isqrt(rows) ** 2 != rows
  if size := facts.image_size:
    stride = vit_later.FAMILY.stride(timm_options.USUAL | fields)
    patches = math.prod(map(operator.floordiv, size, stride))
    has_row = rows == patches + 1 or (has_row and rows != patches)
  return {} if has_row else {'posemb_tokens': 'patches'}


def _check_shapes(fields: dict, config: dict) -> None:
  """Raises ValueError if timm's config contradicts the shapes of the arrays."""
  args, classes = configs.section(config, 'model_args'), fields['num_classes'] or 0
  patch = configs.pair(args.get('patch_size'), 'patch_size')
  sizes = {
    'depth': (args.get('depth'), fields['depth']),
    'embed_dim': (args.get('embed_dim'), fields['width']),
    'patch_size': (fields.get('stem_blocks') is None and patch, fields['patch_size']),
    'num_classes': (config.get('num_classes'), classes),
  }
  for key, (theirs, arrays) in sizes.items():
    if theirs not in (None, False, arrays):
      raise ValueError(
        f'its config says {key}={theirs!r}, but its arrays say {arrays!r}'
      )


def _big_vision_positions(flat: dict, fields: dict, facts: configs.Facts) -> dict:
  return {'posemb_tokens': 'patches'} if fields['classifier'] == 'token' else {}


def _timm_fields(args: dict, name: str) -> dict:
  """Returns the fields of a timm model: options of its name, overridden by `args`.

  All of `args` are read, so the dict is emptied.
  """
  usual, own = timm_names.options(name), dict(args)
  args.clear()
  fields = timm_names.fields_of({**(usual or {}), **own})
  if usual is not None:
    shapes = ('num_classes', 'width', 'depth', 'mlp_dim', 'map_mlp_dim', 'patch_size')
    return {key: value for key, value in fields.items() if key not in shapes}
  # For hybrids and unknown names, all fields but these follow from the arrays.
  hidden = {'act', *(('num_heads',) if 'num_heads' in own else ())}
  hidden |= {'posemb_tokens'} if 'no_embed_class' in own else set()
  return {key: fields[key] for key in hidden}


# `stem_blocks` -> timm's name of the hybrid. timm has one function per ResNet.
_HYBRIDS = {
  (): 'vit_tiny_r_s16_p8_224',
  (2, 2, 2, 2): 'vit_small_r26_s32_224',
  (3, 4, 9): 'vit_base_r50_s16_224',
  (3, 4, 6, 3): 'vit_large_r50_s32_224',
}


def _timm_config(fields, image_size, class_names) -> dict:
  if fields['stem_blocks'] is not None:
    name, pool, args = _timm_hybrid(fields)
  else:
    name, _, args, options = timm_options.find(fields)
    # timm has no pooling for our other classifiers: it would classify every token.
    configs.need(fields, 'timm', classifier=('token', 'gap', 'map', 'distilled'))
    pool = options['global_pool']
  size = {'img_size': configs.int_or_pair(image_size)}
  return configs.timm_config(name, pool, size | args, fields, image_size, class_names)


# Fields of a hybrid that options of timm express.
_HYBRID = ('patch_size', 'width', 'num_heads', 'mlp_dim', 'classifier', 'posemb_tokens')


def _timm_hybrid(fields) -> tuple[str, str, dict]:
  allowed = {'posemb': ('learn', 'none'), 'classifier': ('token', 'gap', 'map')}
  configs.need(fields, 'timm', **allowed, layer_scale=(None,))
  # Fields that options, or the arrays, can express.
  free = {*_HYBRID, 'act', 'depth', 'num_classes', 'stem_blocks', 'stem_width'}
  configs.need_defaults(fields, 'timm', 'vit', {*allowed} | free | TRAINING)
  architecture = _HYBRIDS.get(tuple(fields['stem_blocks']))
  if architecture is None or fields['stem_width'] != 64:
    shape = f'stem_blocks={fields["stem_blocks"]}, stem_width={fields["stem_width"]}'
    raise ValueError(f'timm has hybrids {list(_HYBRIDS)} of width 64, not {shape}')
  args = timm_options.write_vit(
    {key: fields[key] for key in (*_HYBRID, 'act', 'depth', 'posemb')}
  )
  # The norm comes before the mean, unlike timm's default.
  args['fc_norm'] = False
  return architecture, args['global_pool'], args


# Regexes of names that occur in only one kind of timm's blocks.
_TIMM_BLOCKS = {
  'parallel': r'\}\.(in_|mlp_|attn_out|[qk]_norm|ls\.)',
  'branches': r'\}\.(attns|ffns)\.',
  'pre': r'\}\.(norm\d|ls\d|gamma_\d|attn\.|mlp\.)',
}
_TIMM_BLOCKS['post'] = _TIMM_BLOCKS['pre']


def _timm_write_rules(flat: dict, fields: dict) -> Table:
  """Returns only the rules of arrays that timm's model with these fields has."""
  kind, options = 'vit', {}
  if fields['stem_blocks'] is None:
    _, kind, _, options = timm_options.find(fields)
  own_block = _TIMM_BLOCKS[fields['block']]
  other = [regex for regex in _TIMM_BLOCKS.values() if regex != own_block]
  fused, biases = options.get('qkv_fused', True), fields['qkv_bias'] == 'qkv'
  other.append(r'\.ls\d' if kind in ('eva', 'beit') else 'gamma_')
  other.append(r'(attn|bias)\.relative' if kind == 'relpos' else r'rel_pos\.')
  other.append(r'\.attn\.[qkv]_proj' if fused else r'\.attn\.(qkv\.|[qkv]_bias)')
  other.append(r'attn\.[qkv]_bias|mlp_bias' if biases else r'(qkv|in_proj)\.bias')
  if fields['mlp'] == 'swiglu':
    packed = str(options.get('mlp_layer')).startswith('GluMlp')
    if kind == 'eva':
      packed = not options.get('scale_mlp') and not options.get('swiglu_align_to')
    other.append('fc1_' if packed else r'mlp\.fc1\.')
  absent = re.compile('|'.join(other))
  rules = timm(fields['num_heads'], bool(resnet_blocks(flat)), fields)
  return tuple(rule for rule in rules if not absent.search(rule.theirs))


_format = functools.partial(Format, family='vit', grid=grid)
FORMATS = (
  _format(
    name='big_vision',
    marker=r'pos_embedding',
    rules=BIG_VISION,
    infer=infer_google,
    facts=configs.google(act='gelu_tanh'),
    conclude=_big_vision_positions,
  ),
  _format(
    name='google',
    marker=r'Transformer/.+',
    rules=GOOGLE,
    infer=infer_google,
    facts=configs.google(act='gelu_tanh'),
    writer=Writer(config=_google_config, rules=_google_write_rules),
  ),
  _format(
    name='timm',
    marker=r'blocks\.0\.(attn\.(qkv|q_proj)|attns\.0\.attn\.qkv|in_proj)\.weight',
    rules=_timm_rules,
    infer=infer,
    facts=configs.timm(_timm_fields),
    conclude=_timm_positions,
    resize=lambda fields: 'bicubic',
    needs=('num_heads',),
    writer=Writer(config=_timm_config, rules=_timm_write_rules),
  ),
)
