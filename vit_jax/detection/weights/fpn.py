"""Feature pyramids in detectron2's format: its FPN, and its pyramid on a ViTDet."""

import re

import numpy as np

from vit_jax.detection.weights import vitdet
from vit_jax.errors import UserError
from vit_jax.weights import export, hints, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

_BACKBONE = 'backbone/'
_D2 = vitdet.rules('net.patch_embed.proj', 'net.pos_embed', 'net.blocks.{i}', 'attn')


def _conv(theirs: str, ours: str) -> tuple[Rule, ...]:
  return (
    *layers.pair(theirs, f'{ours}/conv', t.conv),
    *layers.norm(f'{theirs}.norm', f'{ours}/norm'),
  )


_FPN = (
  *_conv('fpn_lateral{i}', 'p{i}_lateral'),
  *_conv('fpn_output{i}', 'p{i}_output'),
)


def _sfp(finest: int, heads: int) -> tuple[Rule, ...]:
  """detectron2's SimpleFeaturePyramid: layers in sequence, numbered with those between.

  Args:
    finest: its first level, of four times the scale of the backbone's last map.
    heads: of attention.
  """
  a, b, c, d = (f'simfp_{finest + i}' for i in range(4))
  A, B, C, D = (f'p{finest + i}' for i in range(4))
  backbone = (
    r._replace(
      ours=tuple(_BACKBONE + name for name in r.targets),
      transform=t.with_heads(r.transform, heads),
    )
    for r in _D2
  )
  return (
    *backbone,
    *layers.pair(f'{a}.0', f'{A}_scale/deconv1', t.deconv),
    *layers.norm(f'{a}.1', f'{A}_scale/norm1'),
    *layers.pair(f'{a}.3', f'{A}_scale/deconv2', t.deconv),
    *layers.pair(f'{b}.0', f'{B}_scale/deconv1', t.deconv),
    *(
      rule
      for theirs, ours, first in ((a, A, 4), (b, B, 1), (c, C, 0), (d, D, 1))
      for i, part in enumerate(('lateral', 'output'))
      for rule in _conv(f'{theirs}.{first + i}', f'{ours}_{part}')
    ),
  )


def _sfp_rules(arrays: dict[str, np.ndarray], config: dict) -> tuple[Rule, ...]:
  levels = (re.match(r'simfp_(\d+)\.', name) for name in arrays)
  heads = config.get('model_args', {}).get('num_attention_heads')
  if (table := arrays.get('net.blocks.0.attn.rel_pos_h')) is not None:
    heads = arrays['net.patch_embed.proj.weight'].shape[0] // table.shape[1]
  if heads is None:
    raise ValueError('the number of heads is unknown: num_attention_heads is missing')
  return _sfp(min(int(match[1]) for match in levels if match), heads)


def _sfp_write_rules(flat: dict[str, np.ndarray]) -> tuple[Rule, ...]:
  query = 'Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel'
  return _sfp(_levels(flat)[0], flat[_BACKBONE + query].shape[1])


def _levels(flat: dict[str, np.ndarray]) -> list[int]:
  found = (re.match(r'p(\d+)_lateral/conv/kernel', name) for name in flat)
  return sorted(int(match[1]) for match in found if match)


def _infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns what the parameters of a pyramid tell of it."""
  levels = _levels(flat)
  kernel = lambda level: flat[f'p{level}_lateral/conv/kernel'].shape
  return dict(
    backbone=None,
    channels=kernel(levels[0])[3],
    norm='layer' if f'p{levels[0]}_lateral/norm/scale' in flat else 'none',
    stride=2 ** levels[0],
    in_channels=tuple(kernel(level)[2] for level in levels),
  )


def _infer_sfp(flat: dict[str, np.ndarray]) -> dict:
  inside = {
    name.removeprefix(_BACKBONE): x
    for name, x in flat.items()
    if name.startswith(_BACKBONE)
  }
  fields = _infer(flat)
  fields['stride'] = 2 ** (_levels(flat)[0] + 2)
  fields['in_channels'] = ()
  fields['backbone'] = {'name': 'vitdet', **vitdet.infer(inside)}
  return fields


def _sfp_hints(config: dict, where: str) -> hints.Hints:
  args = config.get('model_args', {})
  factors = args.get('scale_factors', [4.0, 2.0, 1.0, 0.5])
  if factors != [4.0, 2.0, 1.0, 0.5]:
    raise UserError(
      f'{where}: scale_factors is {factors}: a pyramid of [4.0, 2.0, 1.0, 0.5] is read.'
    )
  size = hints.pair(args.get('image_size'))
  fields = vitdet.read_config(args, size, where)
  return hints.Hints({'backbone': fields, **_extra(args, where)}, None, size)


def _extra(args: dict, where: str) -> dict:
  """Returns the field `extra_level` of what detectron2 calls the top block."""
  found = args.get('top_block', False)
  if found not in (True, False, 'LastLevelMaxPool'):
    raise UserError(
      f"{where}: top_block is {found!r}: 'LastLevelMaxPool' is read, or none."
    )
  return {'extra_level': bool(found)}


def _fpn_hints(config: dict, where: str) -> hints.Hints:
  args = config.get('model_args', {})
  if args.get('fuse_type', 'sum') != 'sum':
    raise UserError(f'{where}: fuse_type is {args["fuse_type"]!r}: only sum is read.')
  return hints.Hints(_extra(args, where))


# -- writing ----------------------------------------------------------------------------


def _args(fields: dict) -> dict:
  return {
    'out_channels': fields['channels'],
    'norm': {'layer': 'LN', 'none': ''}[fields['norm']],
    'fuse_type': 'sum',
  }


def _fpn_config(fields, image_size, class_names) -> dict:
  export.need(
    fields, 'backbone', (None,), 'detectron2', 'its pyramid is written by itself'
  )
  args = {'in_channels': list(fields['in_channels']), **_args(fields)}
  args['top_block'] = fields['extra_level']
  return {'architecture': 'FPN', 'model_args': args}


def _sfp_config(fields, image_size, class_names) -> dict:
  export.need(fields, 'pyramid', ('simple',), 'detectron2', 'it has no other')
  export.need(fields, 'norm', ('layer',), 'detectron2', 'its pyramid has norms')
  inside = fields['backbone'] or {}
  if inside.get('name') != 'vitdet':
    raise UserError(
      'detectron2 has this pyramid on a vitdet alone, not on '
      f'{inside.get("name") or "maps"}.'
    )
  vitdet.check_plain(inside, 'detectron2')
  args = {
    'hidden_size': inside['width'],
    'num_hidden_layers': inside['depth'],
    'num_attention_heads': inside['num_heads'],
    'mlp_ratio': inside['mlp_dim'] / inside['width'],
    'image_size': image_size[0] if len({*image_size}) == 1 else list(image_size),
    'pretrain_image_size': inside['pretrained_size'][0],
    'patch_size': inside['patch_size'][0],
    'window_size': inside['window'],
    'window_block_indices': vitdet.depth_of_windows(inside),
    'pretrain_use_cls_token': inside['class_row'],
    **_args(fields),
    'scale_factors': [4.0, 2.0, 1.0, 0.5],
    'norm_eps': 1e-6,
  }
  del args['fuse_type']
  if fields['extra_level']:
    args['top_block'] = 'LastLevelMaxPool'
  return {'architecture': 'SimpleFeaturePyramid', 'model_args': args}


FORMATS = (
  Format(
    'detectron2',
    'fpn',
    r'fpn_lateral\d+\.weight',
    lambda arrays, config: _FPN,
    _infer,
    _fpn_hints,
    to='detectron2',
    write_config=_fpn_config,
  ),
  Format(
    'detectron2',
    'sfp',
    r'simfp_\d+\.0\.weight',
    _sfp_rules,
    _infer_sfp,
    _sfp_hints,
    grid=lambda flat, fields: vitdet.grid(
      {n.removeprefix(_BACKBONE): x for n, x in flat.items()}, fields['backbone']
    ),
    to='detectron2',
    write_config=_sfp_config,
    write_rules=_sfp_write_rules,
  ),
)
