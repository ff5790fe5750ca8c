"""A small ViTDet on canvases of handwritten digits, from a ViT trained on single digits.

  vit_jax train --config=vitdet_digits:head=classify --workdir=runs/vit
  vit_jax train --config=vitdet_digits:head=detr,weights=runs/vit
  vit_jax train --config=vitdet_digits:head=segment,weights=runs/vit
  vit_jax train --config=vitdet_digits:head=detr            # from scratch
  vit_jax train --config=vitdet_digits:head=segment
  vit_jax train --config=vitdet_digits:head=rcnn

The ViT classifies digits on images of 32 pixels, with 4 x 4 tokens. The ViTDet sees canvases
of 64 pixels with 1 to 4 digits, in windows of 4 x 4 tokens; every second block attends to the
whole canvas. head=detr puts a small DETR on its last map. head=segment adds a simple pyramid
and the head of semantic FPN, which classifies every pixel as a digit or background. head=rcnn
adds a simple pyramid and Mask R-CNN (for its numbers: `vit_jax sweep --ablation pyramid`).
When starting from a ViT, rates decay by a factor of 0.7 per layer, as in the paper for B.

Hardware: any. CPU seconds and results on 200 canvases of other digits (seed 0):

  classify                   125 s   top-1 93.6 % of the 360 test digits
  detr, from the ViT         366 s   AP50 11.8 %, AP 3.3 %
  detr, from scratch         415 s   AP50  1.2 %, AP 0.4 %
  segment, from the ViT      262 s   mean IoU 78.5 %
  segment, from scratch      291 s   mean IoU 77.8 %

Calling every pixel background gives a mean IoU of 8.1 %. Starting from the ViT helps the
detector. Segmentation, with ten thousand canvases and a class at every pixel, needs no help.
A ResNet learns to detect faster, see configs/detr_digits.py.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import ml_collections
import rcnn_digits

from vit_jax.config import parse_arg
from vit_jax.errors import choose

DEBUG = dict(
  steps=4, warmup=1, batch=8, train='train[:64]', test='test[:8]', eval_every=4
)

# {head: (steps, batch, rate, test split)}.
HEADS = {
  'classify': (1_000, 128, 2e-3, 'test'),
  'detr': (1_500, 32, 1e-3, 'test[:200]'),
  'segment': (1_500, 16, 3e-3, 'test[:200]'),
  'rcnn': (600, 16, 2e-3, 'test[:200]'),
}


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    head='detr',
    # Weights of the ViT; '' means from scratch.
    weights='',
    steps=0,
    batch=0,
    lr=0.0,
    train='train',
    test='',
    eval_every=500,
    warmup=100,
    seed=0,
  )
  steps, batch, lr, test = choose('config argument head', arg.head, HEADS)
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  c.steps = arg.steps or steps

  vit = dict(patch_size=(8, 8), width=96, depth=4, mlp_dim=192, num_heads=6)
  if arg.head == 'classify':
    # A digit is as large as on a canvas, and covers as many tokens as a window has below.
    affine = 'random_affine(8, 0.25, (0.4, 1.0))'
    pp = f"resize(32, method='bicubic', rounding='nearest')|{affine}|value_range"
    data = dict(source='digits', pp=pp)
    c.model = dict(name='vit', classifier='gap', act='gelu_tanh', **vit)
    c.task = dict(name='classify', loss='softmax', label_smoothing=0.1)
    evaluation = 'classification'
  else:
    data = dict(source='digits_canvas')
    data['pp'] = 'value_range|pad_to(boxes=4, label=4)'
    vitdet = dict(name='vitdet', act='gelu_tanh', **vit)
    vitdet.update(window=4, global_blocks=(1, 3))
    vitdet.update(pretrained_size=(32, 32), class_row=False)
  if arg.head == 'detr':
    c.model = dict(name='detr', backbone=vitdet, num_queries=10, width=64, num_heads=4)
    c.model.update(mlp_dim=128, encoder_depth=1, decoder_depth=2)
    # As in configs/detr_digits.py.
    c.task = dict(name='detect', l1=2.0, giou=1.0)
    evaluation = 'coco'
  elif arg.head == 'segment':
    data['source_options'] = dict(segments=True)
    pyramid = dict(name='sfp', backbone=vitdet, channels=32, extra_level=False)
    # The groups of GroupNorm have 4 channels, as published; with 1 or 2 the model hardly
    # learns. The finest map, p1, costs as much as all other maps and adds nothing here.
    c.model = dict(name='semantic_fpn', backbone=pyramid, channels=128)
    c.model.levels = ('p2', 'p3', 'p4')
    c.task = dict(name='segment')
    evaluation = 'segmentation'
  elif arg.head == 'rcnn':
    data['source_options'] = dict(masks=True)
    data['pp'] = 'value_range|pad_to(boxes=4, label=4, masks=4, extents=4)'
    pyramid = dict(name='sfp', backbone=vitdet, channels=32, extra_level=False)
    anchors = ((8,), (12,), (18,), (26,))
    c.model = dict(
      name='rcnn', backbone=pyramid, anchor_sizes=anchors, **rcnn_digits.HEADS
    )
    c.task = dict(name='rcnn')
    evaluation = 'coco'

  c.data = dict(split=arg.train, batch_size=arg.batch or batch, **data)
  c.optim = dict(name='adamw', lr=arg.lr or lr, wd=1e-4, clip=1.0)
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup)
  if arg.weights:
    c.weights = dict(source=arg.weights)
    # The paper's value for B.
    c.optim.layer_decay = 0.7

  c.evals = dict(test=dict(type=evaluation, every=arg.eval_every))
  if arg.head == 'rcnn':
    c.evals.test.masks = True
  c.evals.test.data = dict(split=arg.test or test, batch_size=40, **data)
  c.checkpoint = dict(every=arg.eval_every)
  c.log = dict(every=min(100, arg.eval_every))
  return c
