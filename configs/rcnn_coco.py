"""Faster, Mask and Cascade R-CNN on COCO, by the recipes of detectron2, DETR, Swin and ViTDet.

  vit_jax train --config=rcnn_coco                               # Mask R-CNN, R50-FPN, 3x
  vit_jax train --config=rcnn_coco:variant=R101-FPN,masks=False  # Faster R-CNN
  vit_jax train --config=rcnn_coco:variant=R50-DC5,masks=False,times=9
  vit_jax train --config=rcnn_coco:variant=swin:T                # Cascade, Swin's recipe
  vit_jax train --config=rcnn_coco:variant=vitdet:B              # ViTDet
  vit_jax train --config=rcnn_coco:variant=vitdet:L,cascade=True
  vit_jax train --config=rcnn_coco:variant=swin:B,lsj=True       # beside ViTDet
  vit_jax train --config=rcnn_coco:debug,variant=vitdet:B

R50-FPN, R101-FPN, R50-DC5, R101-DC5: detectron2's, batch 16, SGD at 0.02 with momentum 0.9,
weight decay 1e-4, 270,000 steps, divided by 10 after 210,000 and 250,000; times=1: 90,000.
Frozen norms, stem and first stage; the shorter side is 640 to 800 pixels. times=9: the rows
with "+" of the DETR paper (arXiv 2005.12872, A.4), with DETR's crops and GIoU losses.
swin:T, S, B (arXiv 2103.14030, A2.2): Cascade Mask R-CNN as in mmdetection, 36 epochs with
batch 16, AdamW at 1e-4, weight decay 0.05, DETR's crops, GIoU, stochastic depth of 0.2 (T, S)
and 0.3 (B). vitdet:B, L, H (arXiv 2203.16527, A.2): 100 epochs (H: 75) of batch 64, AdamW at
1e-4, weight decay 0.1, layer decay of 0.7, 0.8 and 0.9, stochastic depth of 0.1, 0.4 and 0.5,
large-scale jitter on canvases of 1024 pixels, from MAE. lsj=True: Swin-B and L of its
Table 5, 50 epochs from ImageNet-21k. Each value is that of the authors' configs.
cascade=True makes a Cascade R-CNN of any variant.

Differences: weight decay is decoupled (1e-3 with SGD); ResNets start from torchvision's
weights, not from Microsoft's; images are on canvases of 1344 pixels, not padded to the
largest of a batch, and images without objects stay; warmup starts at 0; the body computes
in bfloat16; mask targets are stored in 112 x 112 cells per box.
Expected: box AP near 39.0 and 41.0 (Faster and Mask R-CNN, R50-FPN, 3x; mask AP 37.2), 42.0
(Faster, R50-FPN, times=9), 50.4, 51.8 and 51.9 (swin:T, S, B; mask 43.7, 44.7, 45.0), 51.6,
55.6 and 56.7 (vitdet:B, L, H; mask 45.9, 49.2, 50.1). Not run here, because the data is not
available.

Data: the unpacked archives of COCO, data=coco:PATH.

Smallest slices: v3:2x2 or v5e:2x2; ViTDet-B v5e:4x4.
"""

from typing import NamedTuple

import ml_collections

from vit_jax.config import parse_arg
from vit_jax.errors import choose

DEBUG = dict(
  small=True,
  steps=2,
  batch=2,
  data='digits_canvas',
  train='train[:16]',
  val='test[:8]',
  classes=10,
  boxes=4,
  eval_every=2,
)

# (0 - mean) / std and (1 - mean) / std of ImageNet's pixels.
LEVELS = '(-2.1179, -2.0357, -1.8044), (2.2489, 2.4286, 2.64)'
# {size: (rate of stochastic depth, layer decay, weights)}.
VITDET = {
  'B': (0.1, 0.7, 'vit_base_patch16_224.mae'),
  'L': (0.4, 0.8, 'vit_large_patch16_224.mae'),
  'H': (0.5, 0.9, 'vit_huge_patch14_224.mae'),
}
# {size: (rate of stochastic depth, weights)}.
SWIN = {
  'T': (0.2, 'swin_tiny_patch4_window7_224.ms_in1k'),
  'S': (0.2, 'swin_small_patch4_window7_224.ms_in1k'),
  'B': (0.3, 'swin_base_patch4_window7_224.ms_in1k'),
}
SWIN_LSJ = {
  'B': (0.4, 'swin_base_patch4_window7_224.ms_in22k'),
  'L': (0.4, 'swin_large_patch4_window7_224.ms_in22k'),
}
CASCADE = (0.5, 0.6, 0.7)
# Narrow backbones, for small=True.
SMALL = {
  'resnet': dict(depths=(1,) * 4, widths=(16, 32, 32, 32), stem_width=8),
  'swin': dict(width=16, depths=(1,) * 4, num_heads=(2,) * 4, windows=(2,) * 4),
  'vitdet': dict(width=16, depth=2, mlp_dim=32, num_heads=2, global_blocks=(1,)),
}


class Recipe(NamedTuple):
  """The values of a recipe that are used in several sections of the config."""

  batch: int
  steps: int
  # The steps after which the rate is divided by 10.
  drops: tuple[int, int]
  warmup: int
  weights: str
  # Whether to use large-scale jitter on canvases of 1024 pixels.
  jitter: bool = False
  # Whether to use DETR's crops; otherwise images are only resized to 640 to 800 pixels.
  crops: bool = True


# Steps of mmdetection's epochs, which have the 117,266 images with objects.
EPOCH = 7330


def resnet(c, arg) -> Recipe:
  c.model.variant = arg.variant
  layers, _, kind = arg.variant.partition('-')
  inside = dict(name='resnet', variant=layers[1:], frozen_norm=True)
  if kind == 'DC5':
    c.model.backbone = inside | dict(output_stride=16, dilate_first=True)
    c.model.update(before=(12_000, 6_000), after=(2_000, 1_000))
  elif arg.small:
    c.model.backbone = dict(name='fpn', backbone=inside)
  plus = arg.times == 9
  losses = dict(box_loss='giou', proposal_loss='giou', box_weight=20.0)
  c.task = dict(name='rcnn', **(losses if plus else {}))
  c.optim = dict(name='sgd', lr=0.02, momentum=0.9, wd=1e-3, wd_rules=[('.*', 1.0)])
  if not arg.small:
    c.tune = dict(method='rules', train=[r'(?!backbone/(backbone/)?(stem|stage1_)).*'])
  steps = 90_000 * arg.times
  drops = choose(
    'config argument times',
    arg.times,
    {1: (60_000, 80_000), **{n: (steps - 60_000, steps - 20_000) for n in (3, 9)}},
  )
  return Recipe(16, steps, drops, 1000, f'resnet{layers[1:]}.tv_in1k', crops=plus)


def swin(c, arg, size: str) -> Recipe:
  depth, weights = choose('size in the config argument variant', size, SWIN)
  c.model.update(origin='mmdetection', overlaps=CASCADE, after=(2_000, 1_000))
  c.model.update(head='4conv1fc', head_norm='batch')
  c.model.backbone = dict(name='fpn', backbone=swin_backbone(size, depth))
  c.task = dict(name='rcnn', box_loss='giou', box_weight=10.0)
  c.optim = dict(name='adamw', lr=1e-4, wd=0.05)
  c.optim.wd_rules = [
    (r'backbone/.*norm\d?/.*|.*/relative_positions/.*', 0.0),
    ('.*', 1.0),
  ]
  return Recipe(16, 36 * EPOCH, (27 * EPOCH, 33 * EPOCH), 500, weights)


def swin_backbone(size: str, depth: float) -> dict:
  fields = dict(stochastic_depth=depth, map_norms=True, borders='pad_always')
  return dict(name='swin', variant=size, **fields)


def vitdet(c, arg, kind: str, size: str) -> Recipe:
  table = {'vitdet': VITDET, 'swin': SWIN_LSJ}
  table = choose('config argument variant with lsj=True', kind, table)
  depth, *decay, weights = choose('size in the config argument variant', size, table)
  c.model.update(rpn_convs=2, head='4conv1fc', head_norm='layer', mask_norm='layer')
  c.task = dict(name='rcnn')
  exempt = r'.*/(\w*norm\d?|LayerNorm_\d)/.*'
  if kind == 'vitdet':
    inside = dict(name='vitdet', variant=size, stochastic_depth=depth)
    c.model.backbone = dict(name='sfp', backbone=inside)
    c.optim = dict(name='adamw', lr=1e-4, wd=0.1, layer_decay=decay[0])
    exempt = '(?!)' if size == 'H' else rf'{exempt}|.*/pos_embedding'
  else:
    inside = swin_backbone(size, depth)
    c.model.backbone = dict(name='fpn', norm='layer', backbone=inside)
    c.optim = dict(name='adamw', lr=4e-5, wd=0.05)
    exempt = rf'{exempt}|.*/relative_positions/.*'
  c.optim.wd_rules = [(exempt, 0.0), ('.*', 1.0)]
  part = 0.5 if kind == 'swin' else 0.75 if size == 'H' else 1.0
  # 100 epochs of the 118 thousand images.
  steps, *drops = (int(part * n) for n in (184_375, 163_889, 177_546))
  return Recipe(64, steps, tuple(drops), 250, weights, jitter=True)


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    variant='R50-FPN',
    masks=True,
    # ResNets: number of steps, in multiples of 90,000: 1, 3, or 9 for "+".
    times=3,
    # Whether to use Cascade R-CNN. Swin's recipe always does.
    cascade=False,
    # Whether to train a Swin by ViTDet's recipe.
    lsj=False,
    # For debugging: a narrow model, canvases of 64 pixels.
    small=False,
    # Weights of the backbone; '' means those from Hugging Face.
    weights='',
    # 0 means the value of the recipe.
    steps=0,
    batch=0,
    data='coco:data/coco',
    train='train2017',
    val='val2017',
    classes=80,
    # Maximum number of boxes per image; in COCO there are up to 93.
    boxes=100,
    eval_every=10_000,
    dtype='bfloat16',
  )
  c = ml_collections.ConfigDict()
  c.model = dict(name='rcnn', num_classes=arg.classes, masks=arg.masks, dtype=arg.dtype)
  kind, _, size = arg.variant.partition(':')
  if kind == 'vitdet' or arg.lsj:
    recipe = vitdet(c, arg, kind, size)
  elif kind == 'swin':
    recipe = swin(c, arg, size)
  else:
    recipe = resnet(c, arg)
  if arg.cascade and 'overlaps' not in c.model:
    c.model.update(overlaps=CASCADE, class_agnostic=True)
  c.steps = arg.steps or recipe.steps

  canvas, warmup = (1024 if recipe.jitter else 1344), recipe.warmup
  augment = (
    'detr_crop' if recipe.crops else f'detr_resize({(*range(640, 801, 32),)}, 1333)'
  )
  augment = 'lsj(1024)' if recipe.jitter else augment
  resize = 'detr_resize(1024, 1024)' if recipe.jitter else 'detr_resize(800, 1333)'
  if arg.small:
    augment, resize = ('lsj(64)' if recipe.jitter else 'detr_resize(64, 64)',) * 2
    resize, canvas, warmup = 'detr_resize(64, 64)', 64, 0
    c.model.update(conv_width=8, fc_width=16, before=(50, 50), after=(20, 20))
    inside = c.model.backbone
    if 'backbone' in inside:
      inside.channels = 8
      inside = inside.backbone
    inside.update(SMALL[inside.name])
  else:
    c.weights = dict(source=arg.weights or f'hf:timm/{recipe.weights}')
  at = [(step - warmup) / (recipe.steps - warmup) for step in recipe.drops]
  c.optim.schedule = dict(decay='multistep', at=at, warmup=warmup)

  ends = f'canvas({canvas})|value_range({LEVELS})|pad_to'
  lengths = ('boxes', 'label', *(('masks', 'extents') if arg.masks else ()))
  lengths = ', '.join(f'{name}={arg.boxes}' for name in lengths)
  batch = arg.batch or recipe.batch
  c.data = dict(source=arg.data, split=arg.train, batch_size=batch)
  c.data.source_options = dict(masks=arg.masks)
  c.data.pp = f'decode|flip_lr|{augment}|{ends}({lengths})'

  val = dict(source=arg.data, split=arg.val, batch_size=batch)
  val['pp'] = f'decode|{resize}|{ends}(boxes={arg.boxes}, label={arg.boxes})'
  c.evals = dict(val=dict(type='coco', masks=arg.masks, data=val, every=arg.eval_every))
  c.checkpoint = dict(every=arg.eval_every, best='val/ap')
  c.log = dict(every=min(100, arg.eval_every))
  return c
