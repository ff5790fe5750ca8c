"""DETR on COCO (arXiv 2005.12872, section 4 and appendix A.4).

  vit_jax train --config=detr_coco                         # TPU v3-32
  vit_jax train --config=detr_coco:variant=R50-DC5
  vit_jax train --config=detr_coco:data=coco:PATH,train=train2017,val=val2017
  vit_jax train --config=detr_coco:debug

300 epochs, batch 64, AdamW at 1e-4 (backbone 1e-5), divided by 10 after 200 epochs; weight
decay 1e-4 on all parameters, gradients clipped at norm 0.1, dropout of 0.1. The backbone
starts from torchvision's ImageNet weights; its norms, stem and first stage are frozen. Images
are flipped and, half of the time, cropped at random. Then the shorter side is resized to 480
to 800 pixels, and the longer one to at most 1333. Each value is the paper's, or a default of
main.py in facebookresearch/detr, which also drops attention weights. There the images of a
batch are padded to the largest; here all are on canvases of 1344 pixels with a mask of the
padding, and the body computes in bfloat16.

Expected: near the published AP of 40.6 on val2017 (R50, 300 epochs). After 500 epochs with
the drop after 400 (epochs=500,drop=400) near 42.0 (R50), 43.3 (R50-DC5), 43.5 (R101), 44.9
(R101-DC5). Not run here, because the data is not available.

Data: TFDS `coco/2017`, or the unpacked archives of COCO.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import ml_collections

from vit_jax.config import parse_arg

DEBUG = dict(
  variant='R50',
  small=True,
  batch=8,
  epochs=1.0,
  drop=0.5,
  data='digits_canvas',
  train='train[:64]',
  val='test[:16]',
  classes=10,
  boxes=4,
  eval_every=4,
)

# (0 - mean) / std and (1 - mean) / std of ImageNet's pixels.
LEVELS = '(-2.1179, -2.0357, -1.8044), (2.2489, 2.4286, 2.64)'


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    variant='R50',
    # For debugging: a narrow model, canvases of 64 pixels.
    small=False,
    # Weights of the ResNet; '' means torchvision's from Hugging Face.
    weights='',
    batch=64,
    epochs=300.0,
    # Number of epochs after which the rates are divided by 10.
    drop=200.0,
    data='tfds:coco/2017',
    train='train',
    val='validation',
    classes=80,
    # Maximum number of boxes per image; in COCO there are up to 93.
    boxes=100,
    eval_every=10_000,
    dtype='bfloat16',
  )
  c = ml_collections.ConfigDict()
  c.epochs = arg.epochs

  c.model = dict(name='detr', variant=arg.variant, num_classes=arg.classes)
  c.model.update(dropout=0.1, attention_dropout=0.1, dtype=arg.dtype)
  sizes, longest, canvas, crop = '800', 1333, 1344, 'detr_crop'
  if arg.small:
    c.model.update(num_queries=10, width=32, mlp_dim=64, num_heads=2)
    c.model.update(encoder_depth=1, decoder_depth=2)
    c.model.backbone = dict(name='resnet', depths=(1, 1), widths=(32, 64))
    c.model.backbone.update(stem_width=16, frozen_norm=True)
    sizes, longest, canvas = '64', 64, 64
    crop = 'detr_crop((48, 64), 64, (48, 56), (32, 56))'
  else:
    layers = arg.variant.removeprefix('R').removesuffix('-DC5')
    c.weights = dict(source=arg.weights or f'hf:timm/resnet{layers}.tv_in1k')
    # The stem and the first stage are not trained.
    c.tune = dict(method='rules', train=[r'(?!backbone/(stem|stage1_)).*'])

  pad = f'canvas({canvas})|value_range({LEVELS})|pad_to(boxes={arg.boxes}, label={arg.boxes})'
  c.data = dict(source=arg.data, split=arg.train, batch_size=arg.batch)
  c.data.pp = f'decode|flip_lr|{crop}|{pad}'
  c.task = dict(name='detect', l1=5.0, giou=2.0, no_object=0.1)

  c.optim = dict(name='adamw', lr=1e-4, wd=1e-4, clip=0.1)
  # Norms and biases decay too.
  c.optim.wd_rules = [('.*', 1.0)]
  c.optim.lr_rules = [('backbone/.*', 0.1), ('.*', 1.0)]
  c.optim.schedule = dict(decay='multistep', at=(arg.drop / arg.epochs,))

  val = dict(source=arg.data, split=arg.val, batch_size=arg.batch)
  val['pp'] = f'decode|detr_resize({sizes}, {longest})|{pad}'
  c.evals = dict(val=dict(type='coco', data=val, every=arg.eval_every))
  c.checkpoint = dict(every=arg.eval_every, best='val/ap')
  c.log = dict(every=min(100, arg.eval_every))
  return c
