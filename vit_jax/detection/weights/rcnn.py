"""Two-stage detectors in the formats of detectron2, torchvision and mmdetection 2.

detectron2's files are read and written. Two others are only read: torchvision's Faster and
Mask R-CNN on R50-FPN, version 1, and the Mask R-CNN of Swin's authors, Cascade or not.

Files have no config. Fields that no array shows are those of the published configs, unless
a config.json beside the arrays has our section and overrides them.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax.detection.coco import names
from vit_jax.detection.models.rcnn import DC5, MSRA_RESNET, STAGES, TORCHVISION
from vit_jax.detection.weights import fpn
from vit_jax.detection.weights.fpn import backbone_of, find_norm
from vit_jax.weights import configs, pipelines, rename
from vit_jax.weights.families import mvit, resnet, swin
from vit_jax.weights.formats import TRAINING, Format, Writer
from vit_jax.weights.rename import Rule, Table, nest_rules, table

# Side of a box's pooled features.
_BINS = 7

# -- transforms -----------------------------------------------------------------------


def _both(load: Callable, save: Callable) -> rename.Transform:
  return rename.Transform(lambda x: (load(x),), lambda xs: save(xs[0]))


# Our models take RGB, so the channels of a stem for BGR are reversed.
_bgr = _both(
  lambda x: rename.conv_kernel.load(x[:, ::-1])[0],
  lambda x: rename.conv_kernel.save([x])[:, ::-1],
)
# PyTorch flattens a box's features as [C, 7, 7], but we flatten them as [7, 7, C].
_flat = _both(
  lambda x: x.reshape(len(x), -1, _BINS**2).swapaxes(1, 2).reshape(len(x), -1).T,
  lambda x: x.T.reshape(x.shape[1], _BINS**2, -1).swapaxes(1, 2).reshape(x.shape[::-1]),
)
# The last layer of a mask head, which files hold as a 1x1 convolution.
_mask = _both(lambda x: x.reshape(x.shape[:2]).T, lambda x: x.T[:, :, None, None])


def _drop_rows(rows: int, transform: rename.Transform) -> rename.Transform:
  """Drops the first rows, which belong to torchvision's background."""
  return rename.Transform(lambda x: transform.load(x[rows:]), transform.save)


def _roll_background(transform: rename.Transform) -> rename.Transform:
  """Moves the first row, torchvision's background, to the end."""
  return rename.Transform(lambda x: transform.load(np.roll(x, -1, 0)), transform.save)


# -- rename tables --------------------------------------------------------------------


def _has(arrays, regex: str) -> bool:
  return any(re.fullmatch(regex, name) for name in arrays)


def _count(arrays, regex: str) -> int:
  """Counts heads or layers by their names; the group of `regex` is an index."""
  matches = (re.fullmatch(regex, name) for name in arrays)
  return len({match[1] for match in matches if match})


def _convs(theirs: str, norm: str, ours: str) -> Table:
  """Makes the rules of a head's convolutions; {i} is the index of one."""
  return table(
    rename.conv(theirs, f'{ours}/convs/conv{{i}}'),
    rename.batch_norm(norm, f'{ours}/convs/norm{{i}}'),
  )


def _resnet(prefix: str, bgr: bool) -> Table:
  """Makes the rules of detectron2's ResNet; `bgr` says whether its stem takes BGR."""
  block, ours = f'{prefix}res{{s+1}}.{{i}}', 'stage{s}_block_{i}'
  parts = [(f'conv{k}', f'{k}') for k in (1, 2, 3)] + [('shortcut', '_proj')]
  stem = f'{prefix}stem.conv1'
  return table(
    Rule(f'{stem}.weight', 'stem/conv/kernel', _bgr if bgr else rename.conv_kernel),
    rename.batch_norm(f'{stem}.norm', 'stem/norm'),
    [rename.conv(f'{block}.{x}', f'{ours}/conv{k}') for x, k in parts],
    [rename.batch_norm(f'{block}.{x}.norm', f'{ours}/norm{k}') for x, k in parts],
  )


def _swin(arrays, prefix: str) -> Table:
  """Makes the rules of Swin in a detector, where each map has a norm.

  Args:
    arrays: arrays of a file, or our parameters.
    prefix: the file's name of the Swin, under 'backbone.'.
  """
  whole = f'backbone.{prefix}'
  inside = {n.removeprefix(whole): x for n, x in arrays.items() if n.startswith(whole)}
  if inside:
    name = r'layers\.(\d+)\.blocks\.0\.attn\.relative_position_bias_table'
    stages = swin.find_stages(inside, name, '(?!)', swin.square_window)
  else:
    stages = swin.infer_stages(backbone_of(backbone_of(arrays)))
  return table(
    nest_rules(swin.timm(stages, merge_at_end=True), prefix),
    [rename.norm(f'{prefix}norm{s}', f'stage{s + 1}_norm') for s in range(len(stages))],
  )


def _detectron2(backbone: Callable) -> Callable:
  """Makes `Format.rules` of detectron2's GeneralizedRCNN.

  The rules take arrays of a file, or our parameters, which are to be written.

  Args:
    backbone: a function of (arrays, facts) that returns the rules of the part under
      'backbone.'.
  """

  def rules(arrays, facts) -> Table:
    number = _count(arrays, r'roi_heads\.box_predictor\.(\d+)\.cls_score\.bias')
    number = number or _count(arrays, r'box_head(\d+)/classes/bias')
    rpn, roi = 'proposal_generator.rpn_head', 'roi_heads'
    several = _has(arrays, r'proposal.*\.conv\.conv1\.bias|rpn/conv1/bias')
    heads = []
    for i in range(max(number, 1)):
      dot, ours = (f'.{i}' if number > 1 else ''), f'box_head{i}'
      box, guess = f'{roi}.box_head{dot}', f'{roi}.box_predictor{dot}'
      heads += [
        _convs(f'{box}.conv{{i+1}}', f'{box}.conv{{i+1}}.norm', ours),
        rename.dense(f'{box}.fc1', f'{ours}/dense0', _flat),
        rename.dense(f'{box}.fc{{i+1}}', f'{ours}/dense{{i}}'),
        rename.dense(f'{guess}.cls_score', f'{ours}/classes'),
        rename.dense(f'{guess}.bbox_pred', f'{ours}/deltas'),
      ]
    mask = f'{roi}.mask_head'
    conv = ('conv.conv{i}', 'conv{i}') if several else ('conv', 'conv0')
    return table(
      nest_rules(backbone(arrays, facts), 'backbone.', 'backbone/'),
      rename.conv(f'{rpn}.{conv[0]}', f'rpn/{conv[1]}'),
      rename.conv(f'{rpn}.objectness_logits', 'rpn/objectness'),
      rename.conv(f'{rpn}.anchor_deltas', 'rpn/deltas'),
      heads,
      _convs(f'{mask}.mask_fcn{{i+1}}', f'{mask}.mask_fcn{{i+1}}.norm', 'mask_head0'),
      rename.dense(f'{mask}.deconv', 'mask_head0/deconv', rename.deconv_kernel),
      rename.dense(f'{mask}.predictor', 'mask_head0', _mask),
    )

  return rules


def _fpn(inside: Table) -> Table:
  return table(fpn.RULES, nest_rules(inside, ours='backbone/'))


def _d2_resnet(arrays, facts) -> Table:
  # MSRA's ResNets take BGR, and have the stride of a block in its first convolution.
  body = facts.fields['backbone']
  if 'backbone' not in body:
    return _resnet('', body['stride_first'])
  return _fpn(_resnet('bottom_up.', body['backbone']['stride_first']))


def _d2_vitdet(arrays, facts) -> Table:
  theirs = {n.removeprefix('backbone.'): x for n, x in arrays.items()}
  if 'net.pos_embed' in theirs:
    return fpn.sfp_rules(theirs, facts)
  return fpn.sfp(2, facts.fields['backbone']['backbone']['num_heads'])


def _d2_swin(arrays, facts) -> Table:
  return _fpn(_swin(arrays, 'bottom_up.'))


def _d2_mvit(arrays, facts) -> Table:
  heads = mvit.count_heads(arrays, 'backbone.bottom_up.blocks.{}.attn')
  if not heads:
    heads = mvit.heads_of_blocks(facts.fields['backbone']['backbone'])
  norms = [rename.norm(f'scale{s + 2}_norm', f'stage{s + 1}_norm') for s in range(4)]
  return _fpn(nest_rules(table(mvit.authors(heads), norms), 'bottom_up.'))


def _write_rules(flat, fields) -> Table:
  """Makes the rules with which detectron2's files are written, given the model's backbone."""
  bodies = {'resnet': _d2_resnet, 'vitdet': _d2_vitdet, 'swin': _d2_swin}
  bodies['mvit'] = _d2_mvit
  body = fields['backbone'].get('backbone', fields['backbone'])
  configs.need(body, 'detectron2', name=tuple(bodies))
  return _detectron2(bodies[body['name']])(flat, configs.Facts(fields))


def _torchvision(arrays, facts) -> Table:
  levels = [
    (
      # torchvision has '.0' since version 0.13.
      rename.conv(f'fpn.{x}_blocks.{{i}}.0', f'p{{i+2}}_{y}/conv'),
      rename.conv(f'fpn.{x}_blocks.{{i}}', f'p{{i+2}}_{y}/conv'),
      rename.batch_norm(f'fpn.{x}_blocks.{{i}}.1', f'p{{i+2}}_{y}/norm'),
    )
    for x, y in (('inner', 'lateral'), ('layer', 'output'))
  ]
  box, mask = 'roi_heads.box_', 'roi_heads.mask_'
  # Version 2 numbers the layers of its box head: `convs` convolutions, a flattening, a dense one.
  convs = _count(arrays, r'roi_heads\.box_head\.(\d+)\.0\.weight')
  return table(
    nest_rules(resnet.TIMM, 'backbone.body.', 'backbone/backbone/'),
    nest_rules(_number_levels(levels), 'backbone.', 'backbone/'),
    rename.conv('rpn.head.conv', 'rpn/conv0'),
    rename.conv('rpn.head.conv.{i}.0', 'rpn/conv{i}'),
    rename.conv('rpn.head.cls_logits', 'rpn/objectness'),
    rename.conv('rpn.head.bbox_pred', 'rpn/deltas'),
    rename.dense(f'{box}head.fc6', 'box_head0/dense0', _flat),
    rename.dense(f'{box}head.fc7', 'box_head0/dense1'),
    _convs(f'{box}head.{{i}}.0', f'{box}head.{{i}}.1', 'box_head0'),
    rename.dense(f'{box}head.{convs + 1}', 'box_head0/dense0', _flat),
    rename.dense(
      f'{box}predictor.cls_score',
      'box_head0/classes',
      _roll_background(rename.dense_kernel),
      _roll_background(rename.same),
    ),
    rename.dense(
      f'{box}predictor.bbox_pred',
      'box_head0/deltas',
      _drop_rows(4, rename.dense_kernel),
      _drop_rows(4, rename.same),
    ),
    _convs(f'{mask}head.{{i}}.0', f'{mask}head.{{i}}.1', 'mask_head0'),
    rename.conv(f'{mask}head.mask_fcn{{i+1}}', 'mask_head0/convs/conv{i}'),
    rename.dense(
      f'{mask}predictor.conv5_mask', 'mask_head0/deconv', rename.deconv_kernel
    ),
    rename.dense(
      f'{mask}predictor.mask_fcn_logits',
      'mask_head0',
      _drop_rows(1, _mask),
      _drop_rows(1, rename.same),
    ),
  )


def _number_levels(rules) -> Table:
  """Writes out the rules of each level: 'fpn.inner_blocks.0' is our 'p2_lateral'."""
  return tuple(
    rule._replace(
      theirs=rule.theirs.replace('{i}', str(level - 2)),
      ours=rule.ours.replace('{i+2}', str(level)),
    )
    for rule in table(rules)
    for level in range(2, 6)
  )


def _mmdetection(arrays, facts) -> Table:
  number = _count(arrays, r'roi_head\.bbox_head\.(\d+)\.fc_cls\.bias')
  neck = [
    rename.conv(f'neck.{x}_convs.{{i}}.conv', f'p{{i+2}}_{y}/conv')
    for x, y in (('lateral', 'lateral'), ('fpn', 'output'))
  ]
  heads = []
  for i in range(max(number, 1)):
    # Heads are numbered in a cascade.
    dot = f'.{i}' if number else ''
    box, mask = f'roi_head.bbox_head{dot}', f'roi_head.mask_head{dot}'
    convs = f'{box}.shared_convs.{{i}}'
    heads += [
      _convs(f'{convs}.conv', f'{convs}.bn', f'box_head{i}'),
      rename.dense(f'{box}.shared_fcs.0', f'box_head{i}/dense0', _flat),
      rename.dense(f'{box}.shared_fcs.{{i}}', f'box_head{i}/dense{{i}}'),
      rename.dense(f'{box}.fc_cls', f'box_head{i}/classes'),
      rename.dense(f'{box}.fc_reg', f'box_head{i}/deltas'),
      rename.conv(f'{mask}.convs.{{i}}.conv', f'mask_head{i}/convs/conv{{i}}'),
      rename.dense(f'{mask}.upsample', f'mask_head{i}/deconv', rename.deconv_kernel),
      rename.dense(f'{mask}.conv_logits', f'mask_head{i}', _mask),
    ]
  return table(
    nest_rules(_swin(arrays, ''), 'backbone.', 'backbone/backbone/'),
    nest_rules(_number_levels(neck), ours='backbone/'),
    rename.conv('rpn_head.rpn_conv', 'rpn/conv0'),
    rename.conv('rpn_head.rpn_cls', 'rpn/objectness'),
    rename.conv('rpn_head.rpn_reg', 'rpn/deltas'),
    heads,
  )


# -- the model's fields ---------------------------------------------------------------


def _infer(flat: dict[str, np.ndarray]) -> dict:
  """Infers the model's fields from its parameters."""
  stages = _count(flat, r'box_head(\d+)/classes/bias')
  classes = flat['box_head0/classes/bias'].size - 1
  convs = _count(flat, r'box_head0/convs/conv(\d+)/kernel')
  dense = _count(flat, r'box_head0/dense(\d+)/kernel')
  first, masks = 'box_head0/convs/conv0/kernel', 'mask_head0/deconv/kernel'
  widths = [flat[n].shape[3] for n in (first, masks) if n in flat] or [256]
  fields = dict(
    backbone=_backbone(backbone_of(flat)),
    num_classes=classes,
    rpn_convs=1 + ('rpn/conv1/kernel' in flat),
    head=f'{convs}conv{dense}fc' if convs else f'{dense}fc',
    head_norm=find_norm(flat, 'box_head0/convs/norm0'),
    mask_norm=find_norm(flat, 'mask_head0/convs/norm0'),
    conv_width=widths[0],
    mask_width=widths[-1] if widths[-1] != widths[0] else None,
    fc_width=flat['box_head0/dense0/bias'].size,
    masks=masks in flat,
    overlaps=(0.5, 0.6, 0.7)[:stages],
    class_agnostic=flat['box_head0/deltas/bias'].size == 4 < 4 * classes,
  )
  if masks in flat:
    fields['mask_convs'] = _count(flat, r'mask_head0/convs/conv(\d+)/kernel')
    fields['class_agnostic_masks'] = flat['mask_head0/bias'].size == 1 < classes
  return fields


def _backbone(flat: dict[str, np.ndarray]) -> dict:
  inside = backbone_of(flat)
  if not inside:
    return {'name': 'resnet', **resnet.infer(flat), 'frozen_norm': True}
  if 'embedding/kernel' in inside:
    return {'name': 'sfp', **fpn.infer_sfp(flat)}
  pyramid = fpn.infer(flat) | dict(stride=4, in_channels=())
  if 'stem/norm/scale' in inside and 'stem/embedding/kernel' in inside:
    body = {'name': 'swin', **swin.infer(inside), 'map_norms': True, **STAGES['swin']}
  elif 'stage1_norm/scale' in inside:
    body = {'name': 'mvit', **mvit.infer(inside), 'map_norms': True}
  else:
    # Detectors whose pyramids have batch norms train those of the backbone, too.
    frozen = pyramid['norm'] != 'batch'
    body = {'name': 'resnet', **resnet.infer(inside), 'frozen_norm': frozen}
  return {'name': 'fpn', **pyramid, 'backbone': body}


# Mean and standard deviation of pixels in [0, 1]: those of Caffe, which does not divide by a
# deviation, and those of ImageNet.
_CAFFE = [x / 255 for x in (123.675, 116.28, 103.53)], [1 / 255] * 3
_USUAL = list(pipelines.MEAN), list(pipelines.STD)


def _facts(pixels, shorter: int, longest: int, canvas: int, **defaults):
  """Makes a Reader: fields of the published files, overridden by our own config.

  Args:
    pixels: mean and standard deviation of pixels in [0, 1].
    shorter, longest: sides of images in evaluation, see the op `detr_resize`.
  """

  def read(config: dict, source: str) -> configs.Facts:
    facts = configs.ours(config, defaults)
    size = facts.image_size or (canvas, canvas)
    resize = f'decode|detr_resize({shorter}, {longest})|canvas({canvas})'
    pp = facts.pp or f'{resize}|{pipelines.value_range(*pixels)}'
    return facts._replace(pp=pp, image_size=size)

  return read


def _torchvision_facts(config: dict, source: str) -> configs.Facts:
  fields = dict(TORCHVISION)
  # The norms in the files that torchvision published first have no epsilon (`overwrite_eps`).
  if re.fullmatch(r'(faster|mask)rcnn_resnet50_fpn_coco-\w{8}', Path(source).stem):
    fields['backbone'] = {'backbone': {'norm_eps': 0.0}}
  return _facts(_USUAL, *_COCO, **fields)(config, source)


def _drop_training(fields: dict) -> dict:
  """Drops training-only fields, also within backbones."""
  return {
    key: _drop_training(x) if isinstance(x, dict) else x
    for key, x in fields.items()
    if key not in TRAINING
  }


def _config(fields, image_size, class_names) -> dict:
  """Writes our own section only, because detectron2's files have no config."""
  configs.need(fields, 'detectron2', origin=('detectron2',))
  own = {'fields': _drop_training(fields), 'image_size': list(image_size)}
  return {'vit_jax': own | ({'class_names': class_names} if class_names else {})}


# Shorter side, longest side and canvas of COCO's images.
_COCO = 800, 1333, 1344


def _format(marker: str, backbone: Callable, facts) -> Format:
  return Format(
    name='detectron2',
    family='rcnn',
    marker=(r'proposal_generator\.rpn_head\.anchor_deltas\.bias', marker),
    facts=facts,
    rules=_detectron2(backbone),
    infer=_infer,
    class_names=names.USED,
    writer=Writer(
      config=_config, rules=_write_rules, alike=('conv_width', 'mask_width')
    ),
  )


FORMATS = (
  _format(
    r'backbone\.bottom_up\.stem\.conv1\.weight',
    _d2_resnet,
    _facts(_CAFFE, *_COCO, backbone={'backbone': MSRA_RESNET}),
  ),
  _format(r'backbone\.stem\.conv1\.weight', _d2_resnet, _facts(_CAFFE, *_COCO, **DC5)),
  _format(
    r'backbone\.simfp_\d+\.0\.weight', _d2_vitdet, _facts(_USUAL, 1024, 1024, 1024)
  ),
  _format(
    r'backbone\.bottom_up\.layers\.0\.blocks\.0\.attn\.qkv\.weight',
    _d2_swin,
    _facts(_USUAL, 1024, 1024, 1024),
  ),
  _format(
    r'backbone\.bottom_up\.blocks\.0\.attn\.pool_q\.weight',
    _d2_mvit,
    _facts(_USUAL, 1024, 1024, 1024, backbone={'backbone': STAGES['mvitv2']}),
  ),
  Format(
    name='torchvision',
    family='rcnn',
    marker=(r'rpn\.head\.cls_logits\.bias', r'backbone\.body\.conv1\.weight'),
    facts=_torchvision_facts,
    rules=_torchvision,
    infer=_infer,
    class_names=names.FROM_1,
  ),
  Format(
    name='mmdetection',
    family='rcnn',
    marker=(r'rpn_head\.rpn_cls\.bias', r'roi_head\.bbox_head\.(?:0\.)?fc_cls\.bias'),
    facts=_facts(_USUAL, *_COCO, origin='mmdetection', after=(2_000, 1_000)),
    rules=_mmdetection,
    infer=_infer,
    class_names=names.USED,
  ),
)
