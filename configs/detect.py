"""A detector of your own classes, from images with boxes and perhaps masks.

  vit_jax train --config=detect:data=yolo:FOLDER                # a small R-CNN from scratch
  vit_jax train --config=detect:data=yolo:FOLDER,weights=maskrcnn_resnet50_fpn
  vit_jax train --config=detect:data=coco:FOLDER,weights=RUN,freeze=backbone,epochs=20
  vit_jax train --config=detect:data=voc:FOLDER,variant=R50-FPN,weights=hf:timm/resnet50.tv_in1k
  vit_jax train --config=detect:debug

`data` is coco:, yolo: or voc: with the path of your data, see the guide on detection.
FOLDER holds the splits `train` and `val`, or add train=NAME,val=NAME. Of a single split add
train=train[:90%],val=train[90%:].

`weights` is a detector: a name of the zoo, a file of torchvision, detectron2 or mmdetection, or a
run of this or another recipe. It names the model and the preparation of pixels, and its heads
start afresh if it has other classes. For a DETR add task=detect. With variant=R50-FPN,
R101-FPN, sfp:B, ..., see the recipe rcnn_coco, the weights are those of the backbone. Without
weights a small R-CNN of 1.4 million parameters is trained, which finds simple objects.

`res` is the longer side of the canvas in pixels, and `aspect` its width divided by its
height. By default the canvas has the shape of most training images, by the headers of up to
1,000; it is a square where landscapes and portraits are both common, and for other data than
coco:, yolo: and voc:. Images are resized to fit on it, in training to 0.5 to 1.5 times that
size, and cropped. masks=True trains masks too, if the data has them. freeze=stem keeps the
parameters of a ResNet's stem and first stage, as detectron2 does, and freeze=backbone those
of the whole network below the pyramid.

AdamW with gradients clipped at norm 1 and a cosine after a warmup of a twentieth of the run.
The rate is 1e-4 with weights, and 1e-3 without. `epochs` counts passes through the data;
steps=N replaces it.

Hardware: any; on a CPU take a small canvas.
The tutorial "A detector of your own" reaches an AP50 of 100 % and an AP of 88 % on generated
images of 160 x 120 pixels in 300 CPU seconds.
Smallest slices: v3:2x2 or v5e:2x2.
"""

import contextlib
from pathlib import Path

import ml_collections
import numpy as np

from vit_jax.config import parse_arg
from vit_jax.data import sources
from vit_jax.errors import UserError, choose

DEBUG = dict(
  data='digits_canvas',
  channels=1,
  train='train[:16]',
  val='test[:8]',
  res=64,
  steps=4,
  batch=4,
)
# The model without weights: narrow, with few proposals.
SMALL = dict(conv_width=64, fc_width=256, before=(200, 200), after=(100, 50))
SMALL |= dict(anchor_sample=64, box_sample=64, most=50)
BODY = dict(depths=(2, 2, 2, 2), widths=(64, 128, 192, 256), stem_width=32)
# Regexes of the parameters that are trained.
FREEZE = {
  'stem': r'(?!backbone/(backbone/)?(stem|stage1_)).*',
  'backbone': r'(?!backbone/(backbone/|stem|stage|embedding|Transformer)).*',
}


def usual_aspect(data: str, split: str) -> float:
  """Returns width / height of the canvas that follows the images of a split.

  Images are scaled until their longer sides are equal. Along each side, the canvas then
  holds nine tenths of them.
  """
  scheme, _, target = data.partition(':')
  if scheme in ('coco', 'yolo', 'voc'):
    with contextlib.suppress(UserError, ValueError):  # The run reports it.
      sizes = sources.SOURCES[scheme].sample_sizes(target, split, 1000)
      if len(sizes):
        height, width = np.quantile(sizes / sizes.max(1, keepdims=True), 0.9, axis=0)
        return width / height
  return 1.0


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    data='',
    train='train',
    val='val',
    weights='',
    variant='',
    task='rcnn',
    masks=False,
    freeze='',
    res=512,
    # 0: that of most training images.
    aspect=0.0,
    channels=3,
    # The most boxes of an image.
    boxes=100,
    batch=8,
    epochs=30.0,
    # 0: as many as `epochs` needs.
    steps=0,
    warmup=0.05,
    # 0: 1e-4 with weights, 1e-3 without.
    lr=0.0,
    dtype='float32',
    seed=0,
  )
  path = arg.data.removeprefix('folder:')
  if path and Path(path).is_dir():
    raise UserError(
      f'data={arg.data} does not say how boxes are stored: write coco:{path}, yolo:{path} '
      f'or voc:{path}.'
    )
  if arg.aspect < 0:
    raise UserError(f'aspect={arg.aspect}: expected the width divided by the height.')
  if arg.masks and arg.task != 'rcnn':
    raise UserError(
      f'masks=True is for task=rcnn; {arg.task} has no masks: leave it out.'
    )
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  if arg.steps:
    c.steps = arg.steps
  else:
    c.epochs = arg.epochs

  c.model = dict(dtype=arg.dtype)
  if arg.task == 'rcnn':
    c.model.masks = arg.masks
  if arg.variant:
    c.model.update(name='rcnn', variant=arg.variant)
  if arg.weights:
    c.weights = dict(source=arg.weights)
    # A Mask R-CNN may be trained on boxes alone.
    if not arg.variant and not arg.masks:
      c.weights.skip = [r'mask_head\d/.*']
  elif not arg.variant:
    # Squares of a thirty-second to a half of the canvas.
    sizes = tuple((arg.res * 2**k / 32,) for k in range(5))
    c.model.update(name='rcnn', anchor_sizes=sizes, **SMALL)
    c.model.backbone = dict(
      name='fpn', channels=64, backbone=dict(name='resnet', **BODY)
    )
  if arg.freeze:
    c.tune = dict(method='rules', train=[choose('freeze', arg.freeze, FREEZE)])

  # The canvas is a multiple of the coarsest map's stride.
  aspect = arg.aspect or usual_aspect(arg.data, arg.train)
  sides = arg.res / max(aspect, 1), arg.res * min(aspect, 1)
  canvas = tuple(max(round(side / 32), 1) * 32 for side in sides)
  # A mirrored 2 is not a 2.
  flip = '' if arg.data == 'digits_canvas' else '|flip_lr'
  ends = f'canvas({canvas})|value_range|pad_to'
  names = ['boxes', 'label', *(['masks', 'extents'] if arg.masks else [])]
  lengths = ', '.join(f'{name}={arg.boxes}' for name in names)
  decode = f'decode({arg.channels})'
  data = dict(source=arg.data, batch_size=arg.batch)
  c.data = dict(**data, split=arg.train)
  if arg.masks:
    c.data.source_options = dict(masks=True)
  c.data.pp = f'{decode}{flip}|lsj({canvas}, (0.5, 1.5))|{ends}({lengths})'
  c.task = dict(name=arg.task)
  c.optim = dict(name='adamw', lr=arg.lr or (1e-4 if arg.weights else 1e-3), wd=1e-4)
  c.optim.clip = 1.0
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup)

  held_out = dict(**data, split=arg.val)
  held_out['pp'] = (
    f'{decode}|fit({canvas})|{ends}(boxes={arg.boxes}, label={arg.boxes})'
  )
  every = 0.1
  c.evals = dict(val=dict(type='coco', masks=arg.masks, data=held_out, every=every))
  c.checkpoint = dict(every=every, best='val/ap')
  c.log = dict(every=every / 10)
  return c
