"""Feature pyramids in detectron2's format: FPN, and the simple pyramid on a ViTDet."""

import re

import numpy as np

from vit_jax import trees
from vit_jax.detection.weights import vitdet
from vit_jax.weights import configs, rename
from vit_jax.weights.formats import Format, Writer
from vit_jax.weights.rename import Table, nest_rules, table

_SCALES = [4.0, 2.0, 1.0, 0.5]


def _conv(theirs: str, ours: str) -> Table:
  norm = rename.batch_norm(f'{theirs}.norm', f'{ours}/norm')
  return table(rename.conv(theirs, f'{ours}/conv'), norm)


RULES = table(
  _conv(f'fpn_{part}{{i}}', f'p{{i}}_{part}') for part in ('lateral', 'output')
)


def sfp(finest: int, heads: int) -> Table:
  """Makes the rules of detectron2's SimpleFeaturePyramid, which numbers a level's layers.

  Args:
    finest: the first level, which has four times the scale of the backbone's last map.
  """
  theirs = [f'simfp_{finest + i}' for i in range(4)]
  ours = [f'p{finest + i}' for i in range(4)]
  deconv = lambda i, k: rename.dense(
    f'{theirs[i]}.{3 * k}', f'{ours[i]}_scale/deconv{k + 1}', rename.deconv_kernel
  )
  backbone = vitdet.rules(
    'net.patch_embed.proj', 'net.pos_embed', 'net.blocks.{i}', 'attn', heads
  )
  return table(
    nest_rules(backbone, ours='backbone/'),
    deconv(0, 0),
    rename.norm(f'{theirs[0]}.1', f'{ours[0]}_scale/norm1'),
    deconv(0, 1),
    deconv(1, 0),
    [
      _conv(f'{theirs[i]}.{first + k}', f'{ours[i]}_{part}')
      for i, first in enumerate((4, 1, 0, 1))
      for k, part in enumerate(('lateral', 'output'))
    ],
  )


def sfp_rules(arrays: dict[str, np.ndarray], facts: configs.Facts) -> Table:
  """Makes the rules for a file of detectron2's pyramid on a ViTDet."""
  heads = facts.config.get('model_args', {}).get('num_attention_heads')
  if (positions := arrays.get('net.blocks.0.attn.rel_pos_h')) is not None:
    heads = arrays['net.patch_embed.proj.weight'].shape[0] // positions.shape[1]
  if heads is None:
    raise ValueError('the number of heads is unknown: set num_attention_heads')
  return sfp(_levels(arrays, r'simfp_(\d+)\..*')[0], heads)


def _levels(names, pattern: str = r'p(\d+)_lateral/conv/kernel') -> list[int]:
  """Finds the levels of a pyramid by names, the finest first."""
  matches = (re.fullmatch(pattern, name) for name in names)
  return sorted({int(match[1]) for match in matches if match})


def find_norm(flat: dict[str, np.ndarray], name: str) -> str:
  """Returns which of `pyramid.NORMS` the parameters have under this name."""
  if f'{trees.STATS}/{name}/mean' in flat:
    return 'batch'
  return 'layer' if f'{name}/scale' in flat else 'none'


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Infers the fields of a pyramid, except its backbone, from the parameters."""
  levels = _levels(flat)
  kernel = lambda level: flat[f'p{level}_lateral/conv/kernel'].shape
  return dict(
    backbone=None,
    channels=kernel(levels[0])[3],
    norm=find_norm(flat, f'p{levels[0]}_lateral/norm'),
    stride=2 ** levels[0],
    in_channels=tuple(kernel(level)[2] for level in levels),
  )


def backbone_of(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the variables under 'backbone/', without that prefix."""
  inside = re.compile(f'({trees.STATS}/)?backbone/')
  return {inside.sub(r'\1', n, 1): x for n, x in flat.items() if inside.match(n)}


def infer_sfp(flat: dict[str, np.ndarray]) -> dict:
  """Infers the fields of a pyramid on a ViTDet from the parameters."""
  backbone = {'name': 'vitdet', **vitdet.infer(backbone_of(flat))}
  stride = 2 ** (_levels(flat)[0] + 2)
  return infer(flat) | dict(stride=stride, in_channels=(), backbone=backbone)


def _facts(config: dict, source: str) -> configs.Facts:
  args = configs.section(config, 'model_args')
  configs.require(args, {'scale_factors': _SCALES, 'fuse_type': 'sum'}, 'a pyramid')
  if (top := args.get('top_block', False)) not in (True, False, 'LastLevelMaxPool'):
    raise ValueError(f"top_block is {top!r}, expected 'LastLevelMaxPool' or none")
  return configs.Facts({'extra_level': bool(top)}, config=config)


def _sfp_facts(config: dict, source: str) -> configs.Facts:
  facts, args = _facts(config, source), configs.section(config, 'model_args')
  fields = {**facts.fields, 'backbone': vitdet.read_config(args)}
  size = configs.pair(args.get('image_size'))
  return facts._replace(fields=fields, image_size=size)


# -- writing --------------------------------------------------------------------------


def _args(fields: dict) -> dict:
  norm = {'layer': 'LN', 'batch': 'BN', 'none': ''}[fields['norm']]
  return {'out_channels': fields['channels'], 'norm': norm}


def _fpn_config(fields, image_size, class_names) -> dict:
  configs.need(fields, 'detectron2', backbone=(None,), stride=(4,))
  args = {'in_channels': list(fields['in_channels']), **_args(fields)}
  args |= {'fuse_type': 'sum', 'top_block': fields['extra_level']}
  return {'architecture': 'FPN', 'model_args': args}


def _sfp_config(fields, image_size, class_names) -> dict:
  configs.need(
    fields, 'detectron2', pyramid=('simple',), norm=('layer',), in_channels=((),)
  )
  inside = fields['backbone'] or {'name': None}
  configs.need(inside, 'detectron2', name=('vitdet',))
  vitdet.check_plain(inside, 'detectron2')
  args = {
    'hidden_size': inside['width'],
    'num_hidden_layers': inside['depth'],
    'num_attention_heads': inside['num_heads'],
    'mlp_ratio': inside['mlp_dim'] / inside['width'],
    'image_size': configs.int_or_pair(image_size),
    'pretrain_image_size': inside['pretrained_size'][0],
    'patch_size': inside['patch_size'][0],
    'window_size': inside['window'],
    'window_block_indices': vitdet.window_blocks(inside),
    'pretrain_use_cls_token': inside['class_row'],
    **_args(fields),
    'scale_factors': _SCALES,
    'norm_eps': 1e-6,
  }
  if fields['extra_level']:
    args['top_block'] = 'LastLevelMaxPool'
  return {'architecture': 'SimpleFeaturePyramid', 'model_args': args}


def _sfp_write_rules(flat: dict, fields: dict) -> Table:
  return sfp(_levels(flat)[0], fields['backbone']['num_heads'])


FORMATS = (
  Format(
    name='detectron2',
    family='fpn',
    marker=r'fpn_lateral\d+\.weight',
    facts=_facts,
    rules=RULES,
    infer=infer,
    writer=Writer(config=_fpn_config),
  ),
  Format(
    name='detectron2',
    family='sfp',
    marker=r'simfp_\d+\.0\.weight',
    facts=_sfp_facts,
    rules=sfp_rules,
    infer=infer_sfp,
    grid=lambda flat, fields: vitdet.grid(backbone_of(flat), fields['backbone']),
    writer=Writer(
      config=_sfp_config, rules=_sfp_write_rules, alike=('stride', 'pretrained_size')
    ),
  ),
)
