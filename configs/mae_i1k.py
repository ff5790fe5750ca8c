"""MAE: pre-training without labels on ImageNet-1k (arXiv 2111.06377).

  vit_jax train --config=mae_i1k                           # B/16, TPU v3-64
  vit_jax train --config=mae_i1k:variant=L/16,epochs=1600
  vit_jax train --config=mae_i1k:data=photos,variant=S/16,batch=256,epochs=400
  vit_jax train --config=mae_i1k:data=digits,seed=0 --workdir=runs/mae    # bundled
  vit_jax train --config=mae_i1k:debug
  vit_jax figures reconstruction runs/mae

The encoder sees a quarter of the patches of each image; a decoder of 8 blocks, 512 wide,
predicts the normalised pixels of the others. AdamW with momenta 0.9 and 0.95, rate 1.5e-4 x
batch / 256, 40 epochs of warmup, cosine to 0, weight decay 0.05 of all kernels, the class
token and the mask token, batch 4096, 800 epochs. Images are cropped to 20 % or more of their
area, and flipped. Each value is from PRETRAIN.md and main_pretrain.py in the authors'
repository, facebookresearch/mae. Crops are TensorFlow's.

weights=SOURCE continues from a run, or from a file of the authors or of transformers, with
its decoder if it has one. A folder of your own holds `train` and `val`. Labels are not used,
except by the few-shot evaluation fewshot=tfds:NAME. --config=mae_finetune_i1k:weights=RUN,
--config=finetune:weights=RUN and --config=rcnn_coco:variant=vitdet:B,weights=RUN start from
the encoder.

Hardware: as vit_i1k; an epoch has 0.56 (B/16), 0.34 (L/16) or 0.29 (H/14) of the products of
one of supervised training. Expected after fine-tuning: 83.6 % (B/16, 1600 epochs), 85.9
(L/16), 86.9 (H/14). Not run here, because the data is not available.

Smallest slices: v5e:4x4 (B/16; smaller ones were not compiled).
"""

import common
import ml_collections

from vit_jax.config import parse_arg

# ImageNet's mean and standard deviation, as black and white.
LEVELS = '(-2.1179, -2.0357, -1.8044), (2.2489, 2.4286, 2.64)'
DEBUG = dict(
  data='digits', train='train[:320]', val='test', batch=32, epochs=1.0, warmup=0.2
)
DIGITS = dict(width=96, depth=4, mlp_dim=192, num_heads=6, patch_size=(2, 2))


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    weights='',
    data='tfds:imagenet2012',
    train='train',
    val='',
    variant='B/16',
    res=0,
    rate=0.75,
    batch=0,
    epochs=0.0,
    # A share of the run; 0: 40 epochs.
    warmup=0.0,
    lr=0.0,
    fewshot='',
    dtype='bfloat16',
    seed=0,
  )
  digits = arg.data == 'digits'
  batch = arg.batch or (128 if digits else 4096)
  epochs = arg.epochs or (200.0 if digits else 800.0)
  res = arg.res or (16 if digits else 224)
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  c.epochs = epochs

  c.model = dict(name='vit', act='gelu_erf')
  c.task = dict(name='mae', rate=arg.rate)
  if digits:
    c.model.update(DIGITS)
    c.task.update(decoder_width=64, decoder_depth=2, decoder_heads=4)
  elif arg.weights:
    c.model = dict(dtype=arg.dtype)
  else:
    c.model.update(variant=arg.variant, dtype=arg.dtype)
  if arg.weights:
    c.weights = dict(source=arg.weights, skip=['head/.*'])

  lr = arg.lr or (2e-3 if digits else 1.5e-4 * batch / 256)
  c.optim = dict(name='adamw', lr=lr, b2=0.95, wd=0.05)
  c.optim.wd_rules = [('.*/kernel|cls|mae/mask', 1.0), ('.*', 0.0)]
  warmup = arg.warmup or min(40 / epochs, 0.1)
  c.optim.schedule = dict(decay='cosine', warmup=warmup)

  how = "method='bicubic', rounding='nearest'"
  levels = 'value_range(-1, 1)' if digits else f'value_range({LEVELS})'
  train_pp = f'decode|inception_crop({res}, 20, {how})|flip_lr|{levels}'
  val_pp = (
    f'decode|resize_small({round(res * 256 / 224)}, {how})|central_crop({res})|{levels}'
  )
  if digits:
    val_pp = f'resize({res}, {how})|{levels}'
    train_pp = f'resize({res}, {how})|random_affine(8, 0.05, (0.95, 1.05))|{levels}'
  c.data = dict(source=arg.data, split=arg.train, batch_size=batch, pp=train_pp)

  val = dict(source=arg.data, batch_size=360 if digits else batch, pp=val_pp)
  tests = {'digits': 'test', 'tfds:imagenet2012': 'validation'}
  val['split'] = arg.val or tests.get(arg.data, 'val')
  # A fraction of the run.
  every = 0.2 if digits else 0.05
  c.evals = dict(val=dict(type='masked_patches', data=val, every=every))
  if fewshot := arg.fewshot or (digits and 'digits'):
    c.evals.fewshot = common.fewshot(fewshot, val_pp, val['batch_size'], every)
    if digits:
      c.evals.fewshot.shots = [10]
  c.checkpoint = dict(every=every, best='val/loss')
  c.log = dict(every=every / 10)
  return c
