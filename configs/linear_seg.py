"""Semantic segmentation by a linear layer on the patches of a frozen backbone.

  vit_jax train --config=linear_seg:weights=SOURCE,data=masks:ROOT
  vit_jax train --config=linear_seg:weights=SOURCE,data=masks:ROOT,res=512,layers=4
  vit_jax train --config=vitdet_digits:head=classify --workdir=runs/vit
  vit_jax train --config=linear_seg:weights=runs/vit
  vit_jax train --config=linear_seg:debug

The protocol of DINOv2 (arXiv 2304.07193, section 7.4): a batch norm and one linear layer on
the patch tokens of the last layer, or of the last `layers` layers concatenated, resized
bilinearly to the image. AdamW, rate 1e-3, weight decay 1e-4, linear decay after a warmup,
batch 16. The weights name the backbone, which has no optimizer state. Without weights a small
ViT is trained as a whole.

ROOT holds `train` and `val` with folders `images` and `masks`, see the guide on detection.
If it holds only `images` and `masks`, add train=train[:90%],val=train[90%:]. Without
classes.txt add classes=K. `res` is a multiple of the patch size. The default data are the
bundled canvases of digits, gray and 64 pixels large. For weights trained on photographs add
channels=3 and a larger res.

Hardware: any. From the ViT of single digits in runs/vit (seed 0), the mean IoU on canvases of
other digits is 16.1 % after 80 s on 2 CPU cores, and 25.4 % with layers=4,lr=1e-2.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import ml_collections

from vit_jax.config import parse_arg

DEBUG = dict(
  steps=4, warmup=1, batch=8, train='train[:64]', val='test[:8]', eval_every=4
)


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    weights='',
    data='digits_canvas',
    train='train',
    val='',
    classes=0,
    res=0,
    channels=0,
    layers=1,
    batch=16,
    steps=1_000,
    warmup=50,
    lr=1e-3,
    eval_every=250,
    seed=0,
  )
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  c.steps = arg.steps

  c.model = dict(name='linear_seg', layers=arg.layers)
  if arg.classes:
    c.model.num_classes = arg.classes
  if arg.weights:
    c.weights = dict(source=arg.weights)
    c.tune = dict(method='rules', train=['(norm|head)/.*'])
  else:
    vit = dict(patch_size=(8, 8), width=96, depth=4, mlp_dim=192, num_heads=6)
    c.model.backbone = dict(name='vit', classifier='gap', **vit)

  # Digits are gray, and a mirrored 2 is not a 2.
  canvases = arg.data == 'digits_canvas'
  res = arg.res or (64 if canvases else 448)
  decode = f'decode({arg.channels or (1 if canvases else 3)})'
  resize = f"resize({res}, rounding='nearest')|value_range"
  crop = f"inception_crop({res}, 25, rounding='nearest')|flip_lr|value_range"
  data = dict(source=arg.data)
  if canvases:
    data['source_options'] = dict(segments=True)
    # The task does not read the boxes, but a batch needs them at one length.
    crop = resize = f'{resize}|pad_to(boxes=4, label=4)'
  c.data = dict(split=arg.train, batch_size=arg.batch, pp=f'{decode}|{crop}', **data)
  c.task = dict(name='segment')
  c.optim = dict(name='adamw', lr=arg.lr, wd=1e-4, clip=1.0)
  c.optim.schedule = dict(decay='linear', warmup=arg.warmup)

  name, val = ('test', 'test[:200]') if canvases else ('val', 'val')
  held_out = dict(split=arg.val or val, batch_size=arg.batch, **data)
  held_out['pp'] = f'{decode}|{resize}'
  c.evals = {name: dict(type='segmentation', every=arg.eval_every, data=held_out)}
  # The test split must not choose a checkpoint.
  best = None if canvases else 'val/mean_iou'
  c.checkpoint = dict(every=arg.eval_every, best=best)
  c.log = dict(every=min(50, arg.eval_every))
  return c
