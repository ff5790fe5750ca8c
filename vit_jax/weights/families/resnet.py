"""ResNet with BatchNorm, in the formats of timm, torchvision and transformers, and CLIP's."""

import functools
import re
from collections.abc import Callable

import numpy as np

from vit_jax.models.resnet import CLIP, HEAD_WIDTH, clip_widths
from vit_jax.weights import configs, rename
from vit_jax.weights.families.vit import columns, square
from vit_jax.weights.formats import Format, Writer
from vit_jax.weights.rename import Rule, Table, add_bare_names, nest_rules, table

_BLOCK, _TIMM = 'stage{s+1}_block_{i}', 'layer{s+1}.{i}'
# The numbers that a block's convolutions have in our names.
_PARTS = {'bottleneck': (1, 2, 3), 'basic': (1, 3)}


def timm(block: str, deep_stem: bool, avg_down: bool) -> Table:
  """Makes the rules of timm's ResNet.

  torchvision's ResNet is the one without a deep stem and without `avg_down`.
  """
  stem = 'conv1.6' if deep_stem else 'conv1'
  return table(
    rename.conv('conv1.0', 'stem/conv1'),
    rename.batch_norm('conv1.1', 'stem/norm1'),
    rename.conv('conv1.3', 'stem/conv2'),
    rename.batch_norm('conv1.4', 'stem/norm2'),
    rename.conv(stem, 'stem/conv'),
    rename.batch_norm('bn1', 'stem/norm'),
    _blocks(block, avg_down),
    rename.dense('fc', 'head'),
  )


def _blocks(block: str, avg_down: bool) -> Table:
  return table(
    [
      (
        rename.conv(f'{_TIMM}.conv{k + 1}', f'{_BLOCK}/conv{part}'),
        rename.batch_norm(f'{_TIMM}.bn{k + 1}', f'{_BLOCK}/norm{part}'),
      )
      for k, part in enumerate(_PARTS[block])
    ],
    rename.conv(f'{_TIMM}.downsample.{int(avg_down)}', f'{_BLOCK}/conv_proj'),
    rename.batch_norm(f'{_TIMM}.downsample.{1 + avg_down}', f'{_BLOCK}/norm_proj'),
  )


TIMM = timm('bottleneck', deep_stem=False, avg_down=False)


def _timm_rules(arrays, facts) -> Table:
  has = lambda regex: any(re.fullmatch(regex, name) for name in arrays)
  block = 'bottleneck' if has(r'layer1\.0\.conv3\.weight') else 'basic'
  return timm(block, has(r'conv1\.0\.weight'), has(_AVERAGES))


# Only files with `avg_down` have this name. Their shortcuts begin with an average pooling, so
# layer 0 is the pooling, layer 1 the convolution and layer 2 its norm.
_AVERAGES = r'layer\d+\.0\.downsample\.2\.weight'


def _timm_write_rules(flat, fields) -> Table:
  if fields['anti_alias']:
    return _timm_clip(flat)
  return timm(fields['block'], fields['deep_stem'] is not None, fields['avg_down'])


# {number of a convolution in CLIP's stem: what follows 'conv' and 'norm' in our names}.
_CLIP_STEM = {1: '1', 2: '2', 3: ''}
# The same for the layers of a block in timm's files of CLIP.
_CLIP_BLOCK = {'conv1_1x1': '1', 'conv2_kxk': '2', 'conv3_1x1': '3'}
_CLIP_BLOCK |= {'shortcut.conv': '_proj'}
# Tables of positions under our, OpenAI's and timm's names.
_POSITIONS = ('attention_pool/pos_embedding', 'attnpool.positional_embedding')
_POSITIONS += ('head.pos_embed',)


def _openai_clip(arrays: dict, facts=None) -> Table:
  """Makes the rules of CLIP's ResNet in OpenAI's and open_clip's files."""
  return table(
    [rename.conv(f'conv{k}', f'stem/conv{ours}') for k, ours in _CLIP_STEM.items()],
    [rename.batch_norm(f'bn{k}', f'stem/norm{ours}') for k, ours in _CLIP_STEM.items()],
    _blocks('bottleneck', avg_down=False),
    Rule('attnpool.positional_embedding', _POSITIONS[0], rename.rows),
    _projections('attnpool.{}_proj', _width(arrays)),
    rename.dense('attnpool.c_proj', 'head'),
  )


def _timm_clip(arrays: dict, facts=None) -> Table:
  """Makes the rules of CLIP's ResNet in timm's files."""
  width = _width(arrays)
  layers = [(f'stem.conv{k}', 'stem', ours) for k, ours in _CLIP_STEM.items()]
  layers += [(f'stages.{{s}}.{{i}}.{k}', _BLOCK, x) for k, x in _CLIP_BLOCK.items()]
  return table(
    [rename.conv(f'{layer}.conv', f'{ours}/conv{x}') for layer, ours, x in layers],
    [rename.batch_norm(f'{layer}.bn', f'{ours}/norm{x}') for layer, ours, x in layers],
    Rule('head.pos_embed', _POSITIONS[0], rename.rows),
    _projections('head.{}', width),
    rename.dense('head.proj' if width else 'head.fc', 'head'),
  )


def _projections(theirs: str, width: int) -> Table:
  """Makes the rules of the attention that pools; {} stands for q, k or v."""
  heads = max(width // HEAD_WIDTH, 1)
  names = [(theirs.format(x[0]), f'attention_pool/{x}') for x in rename.QKV]
  return table([rename.split_heads(name, ours, heads) for name, ours in names])


def _width(arrays: dict) -> int:
  """Returns the channels of the attention that pools; 0 if the model pools by a mean."""
  return next((arrays[name].shape[-1] for name in _POSITIONS if name in arrays), 0)


_STEM, _LAYER = 'embedder.embedder', 'encoder.stages.{s}.layers.{i}'


def hf_bare(block: str) -> Table:
  """Makes the rules of transformers' ResNet without a head, which is also DETR's backbone."""
  parts = [(f'layer.{k}', part) for k, part in enumerate(_PARTS[block])]
  parts.append(('shortcut', '_proj'))
  return table(
    rename.conv(f'{_STEM}.convolution', 'stem/conv'),
    rename.batch_norm(f'{_STEM}.normalization', 'stem/norm'),
    [rename.conv(f'{_LAYER}.{x}.convolution', f'{_BLOCK}/conv{k}') for x, k in parts],
    [
      rename.batch_norm(f'{_LAYER}.{x}.normalization', f'{_BLOCK}/norm{k}')
      for x, k in parts
    ],
  )


HF_BARE = hf_bare('bottleneck')


def _hf(block: str) -> Table:
  return table(
    nest_rules(hf_bare(block), 'resnet.'), rename.dense('classifier.1', 'head')
  )


def _hf_write_rules(flat, fields) -> Table:
  return _hf(fields['block'])


def _hf_rules(arrays, facts) -> Table:
  block = 'bottleneck' if any('.layer.2.' in name for name in arrays) else 'basic'
  configs.require(facts.fields, {'block': block}, 'layer_type')
  return add_bare_names(_hf(block), 'resnet.')


def infer(flat: dict) -> dict:
  """Infers the model's fields from its parameters, which do not show dilation."""
  depths = rename.count_blocks(flat, 'conv3/kernel')
  numbers = range(1, len(depths) + 1)
  widths = tuple(flat[f'stage{s}_block_0/conv3/kernel'].shape[3] for s in numbers)
  bottleneck = 'stage1_block_0/conv2/kernel' in flat
  narrow = tuple(columns(flat, f'stage{s}_block_0/conv1/kernel') for s in numbers)
  usual = not bottleneck or narrow == tuple(width // 4 for width in widths)
  deep = [columns(flat, f'stem/conv{k}/kernel') for k in (1, 2)]
  return dict(
    depths=depths,
    widths=widths,
    block='bottleneck' if bottleneck else 'basic',
    narrow=None if usual else narrow,
    stem_width=flat['stem/conv/kernel'].shape[3],
    deep_stem=tuple(deep) if all(deep) else None,
    output_stride=max(32, 2 << len(numbers)),
    num_classes=columns(flat, 'head/kernel'),
  )


def _count_batches(
  rules: Callable[[dict, dict], Table],
) -> Callable[[dict, dict], dict]:
  """Returns a function that makes the `num_batches_tracked` of PyTorch's batch norms."""

  def buffers(flat, fields):
    means = {n: x for n, x in flat.items() if n.endswith('/mean')}
    names = rename.to_theirs(means, rules(flat, fields))
    zero = np.zeros((), np.int64)
    return {n.replace('running_mean', 'num_batches_tracked'): zero for n in names}

  return buffers


def _timm_fields(args: dict, name: str) -> dict:
  # Ignored, because they follow from the names and shapes of the arrays.
  for key in ('stem_type', 'avg_down', 'base_width'):
    args.pop(key, None)
  return {k: args.pop(k) for k in ('output_stride',) if k in args}


# In all formats, a block's stride and dilation belong to its second convolution.
_FIXED = dict(stride_first=(False,), dilate_first=(False,), norm_eps=(1e-5,))
_FIXED |= dict(projection=(None,), unit=(False,), head_bias=(True,))


def _check_clip(fields: dict, format: str) -> None:
  """Raises ValueError unless a model has the stem and the widths of CLIP's ResNets."""
  own = {key: (value,) for key, value in clip_widths(fields['stem_width']).items()}
  own |= dict(block=('bottleneck',), narrow=(None,), avg_down=(False,))
  configs.need(fields, format, output_stride=(32,), **own, **_FIXED)


def _clip_config(fields, image_size, class_names) -> dict:
  """Writes timm's config of CLIP's ResNets."""
  _check_clip(fields, 'timm')
  sizes = {depths: size for size, (depths, *_) in CLIP.items()}
  # timm rounds other numbers of channels.
  widths = range(8, 2**12, 8)
  configs.need(fields, 'timm', depths=tuple(sizes), stem_width=widths)
  name, pool = f'resnet{sizes[fields["depths"]]}_clip', 'token'
  args = {'width_factor': fields['stem_width'] / 64, 'img_size': list(image_size)}
  if fields['pool'] == 'mean':
    name, pool = f'{name}_gap', 'avg'
  return configs.timm_config(name, pool, args, fields, image_size, class_names)


def _open_clip_config(fields, image_size, class_names) -> dict:
  """Writes the image tower's part of an open_clip_config.json."""
  _check_clip(fields, 'open_clip')
  configs.need(fields, 'open_clip', pool=('attention',))
  vision = {'image_size': configs.int_or_pair(image_size)}
  vision |= {'layers': list(fields['depths']), 'width': fields['stem_width']}
  model = {'embed_dim': fields['num_classes'], 'vision_cfg': vision}
  return {'open_clip': {'model_cfg': model}}


def _timm_config(fields, image_size, class_names) -> dict:
  if fields['anti_alias']:
    return _clip_config(fields, image_size, class_names)
  configs.need(fields, 'timm', pool=('mean',), **_FIXED)
  if len(fields['depths']) != 4:
    raise ValueError(f'a ResNet of timm has 4 stages, not depths={fields["depths"]}')
  basic, args = fields['block'] == 'basic', {'layers': list(fields['depths'])}
  args['channels'] = [width // (1 if basic else 4) for width in fields['widths']]
  narrow = fields['narrow']
  if not basic and narrow:
    ratio = {n / m for n, m in zip(narrow, args['channels'], strict=True)}
    if len(ratio) > 1 or 64 * min(ratio) % 1:
      raise ValueError(f'timm cannot express narrow={narrow}')
    args['base_width'] = int(64 * min(ratio))
  if fields['deep_stem']:
    half = fields['stem_width'] // 2
    stems = {(half, half): 'deep', (3 * (half // 4), half): 'deep_tiered'}
    configs.need(fields, 'timm', stem_width=(2 * half,), deep_stem=tuple(stems))
    args |= {'stem_width': half, 'stem_type': stems[tuple(fields['deep_stem'])]}
  else:
    configs.need(fields, 'timm', stem_width=(64,))
  if fields['avg_down']:
    args['avg_down'] = True
  if fields['output_stride'] < 32:
    args['output_stride'] = fields['output_stride']
  name = 'resnet18' if basic else 'resnet50'
  return configs.timm_config(name, 'avg', args, fields, image_size, class_names)


def _infer_clip(flat: dict) -> dict:
  pool = 'attention' if _width(flat) else 'mean'
  return infer(flat) | dict(anti_alias=True, pool=pool)


def _clip_grid(flat: dict, fields: dict) -> tuple[int, int] | None:
  """Returns the grid (h, w) of the positions, or None if it is absent or not square."""
  return square(flat[_POSITIONS[0]].shape[1] - 1) if _width(flat) else None


def _clip_fields(args: dict, name: str) -> dict:
  if (pool := args.pop('global_pool', 'avg')) not in ('token', 'avg'):
    raise ValueError(f"global_pool={pool!r}, expected 'token' or 'avg'")
  return {}


def _clip_tower(model: dict, vision: dict) -> configs.Facts:
  configs.require(vision, {'head_width': HEAD_WIDTH}, 'a ResNet of CLIP')
  return configs.Facts({})


def _open_clip_rules(flat, fields) -> Table:
  return nest_rules(_openai_clip(flat), 'visual.')


# Keys of transformers' config for which only one value is supported.
_HF = {'hidden_act': 'relu', 'downsample_in_first_stage': False}
_HF |= {'downsample_in_bottleneck': False}


def _hf_facts(config: dict, source: str) -> configs.Facts:
  configs.require(config, _HF, 'a ResNet')
  other = {key: value for key, value in config.items() if key not in _HF}
  fields = {'block': other.pop('layer_type')} if 'layer_type' in config else {}
  return configs.hf('resnet')(other, source)._replace(fields=fields)


def _hf_config(fields, image_size, class_names) -> dict:
  strides = tuple(4 << s for s in range(len(fields['depths']) - 1, 6))
  plain = dict(deep_stem=(None,), avg_down=(False,), narrow=(None,), **_FIXED)
  plain |= dict(anti_alias=(False,), pool=('mean',))
  configs.need(fields, 'transformers', output_stride=strides, **plain)
  args = {
    'embedding_size': fields['stem_width'],
    'hidden_sizes': list(fields['widths']),
    'depths': list(fields['depths']),
    'layer_type': fields['block'],
    **_HF,
    'image_size': list(image_size),
  }
  return configs.hf_config('ResNet', 'resnet', args, fields, image_size, class_names)


_format = functools.partial(Format, family='resnet', infer=infer)
_clip_format = functools.partial(
  _format, infer=_infer_clip, grid=_clip_grid, resize=lambda fields: 'bicubic'
)
_writer = functools.partial(Writer, alike=('output_stride',))
FORMATS = (
  _format(
    name='timm',
    marker=r'layer1\.0\.conv2\.weight',
    rules=_timm_rules,
    facts=configs.timm(_timm_fields, global_pool='avg', act_layer='relu'),
    tells=lambda arrays: {'avg_down': any(re.fullmatch(_AVERAGES, n) for n in arrays)},
    writer=_writer(
      config=_timm_config,
      rules=_timm_write_rules,
      buffers=_count_batches(_timm_write_rules),
    ),
  ),
  # CLIP's ResNets; the format `timm` above writes them. timm has other models of such names.
  _clip_format(
    name='timm',
    marker=r'stages\.0\.0\.conv2_kxk\.conv\.weight',
    when=lambda config, name: bool(
      re.match(r'resnet[\dx]+_clip', str(config.get('architecture', name)))
    ),
    rules=_timm_clip,
    facts=configs.timm(_clip_fields, output_stride=32),
  ),
  # OpenAI's files have the same arrays, but no config.
  _clip_format(
    name='open_clip',
    marker=r'visual\.attnpool\.positional_embedding',
    within=r'visual\.',
    rules=_openai_clip,
    facts=configs.open_clip(_clip_tower, known=('layers', 'width', 'head_width')),
    writer=_writer(
      config=_open_clip_config,
      rules=_open_clip_rules,
      buffers=_count_batches(_open_clip_rules),
    ),
  ),
  _format(
    name='hf',
    marker=r'(resnet\.)?encoder\.stages\.0\.layers\.0\.layer\.1\.convolution\.weight',
    rules=_hf_rules,
    facts=_hf_facts,
    writer=_writer(
      config=_hf_config, rules=_hf_write_rules, buffers=_count_batches(_hf_write_rules)
    ),
  ),
)
