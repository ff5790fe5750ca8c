"""Masked patch prediction, without labels: section 4.6 and B.1.2 of the ViT paper.

  vit_jax train --config=masked_patches:data=records:/data/jft300m
  vit_jax train --config=masked_patches:data=digits,seed=0 --workdir=RUN   # bundled
  vit_jax train --config=masked_patches:debug

Half of the patch embeddings are corrupted: 80 % of them are replaced by a learned mask
embedding, 10 % by the embedding of another patch, and 10 % are kept. From the encoded tokens
of these patches, the model predicts the mean colour of each patch, in 3 bits per channel.
target=downsized predicts the colours of the patch resized to 4 x 4, and target=pixels predicts
all pixels by regression. In the paper all three work, the last one slightly worse. rate=0.15
corrupts as few patches as BERT does tokens, which is slightly worse too.

ViT-B/16 on JFT, Adam, rate 2e-4, warmup of 10,000 steps, cosine, batch 4096, 1M steps, about
14 epochs. 100,000 steps, or ImageNet instead of JFT, gain similarly. Section B.1.2 names no
weight decay, so it is 0.1, as for all models in section 4.1. Crops and flips are as in
configs/vit_jft.py. The model averages its tokens, because the loss does not train the class
token of the last block. Only the few-shot evaluation fewshot=tfds:NAME uses labels; `classes`
is the number of classes in the data. The run trains the encoder without a head;
--config=finetune:weights=RUN trains a head on it.

Hardware: as configs/vit_jft.py for B/16. Expected: 79.9 % on ImageNet after fine-tuning, 2
points above training from scratch and 4 below supervised pre-training (section 4.6). Not run
here, because JFT is not public.

On digits, 1,000 steps take 95 s of processor time. Training then with the first 100 labels,

  vit_jax train --config=digits:epochs=500,batch=50,seed=0 '--config.data.split=train[:100]' --config.weights.source=RUN

gives 84.72, 86.94 and 82.50 % of the 360 test images (seeds 0, 1 and 2 of both runs), mean
84.7. From scratch, without weights, it gives 76.67, 79.17 and 80.83, mean 78.9. With seed 0
target=downsized gives 85.56 and target=pixels 80.56.

Smallest slices: v3:2x2 or v5e:2x4.
"""

import common
import ml_collections

from vit_jax.config import parse_arg

DEBUG = dict(data='digits', train='train[:320]', batch=32, steps=8, warmup=2)

# (batch, steps, warmup, rate, resolution) for each data set.
JFT = (4096, 1_000_000, 10_000, 2e-4, 224)
DIGITS = (128, 1_000, 50, 2e-3, 16)


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    data='records:jft300m',
    train='train',
    val='',
    classes=18_291,
    variant='B/16',
    target='mean_color',
    rate=0.5,
    batch=0,
    steps=0,
    warmup=-1,
    lr=0.0,
    wd=0.1,
    res=0,
    fewshot='',
    dtype='bfloat16',
    seed=0,
  )
  digits = arg.data == 'digits'
  batch, steps, warmup, lr, res = DIGITS if digits else JFT
  batch, res = arg.batch or batch, arg.res or res
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  c.steps = arg.steps or steps

  # Average the tokens, because the loss does not train the class token of the last block.
  c.model = dict(name='vit', classifier='gap')
  # Digits: as in configs/digits.py.
  if digits:
    c.model.update(patch_size=(4, 4), width=96, depth=3, mlp_dim=192, num_heads=6)
  else:
    c.model.update(variant=arg.variant, dtype=arg.dtype)
  c.task = dict(name='masked_patches', target=arg.target, rate=arg.rate)
  c.optim = dict(name='adamw', lr=arg.lr or lr, wd=arg.wd)
  warmup = warmup if arg.warmup < 0 else arg.warmup
  c.optim.schedule = dict(decay='cosine', warmup=warmup)

  train_pp, val_pp = common.inception(res), common.central(res)
  fewshot_pp = common.squashed(res)
  if digits:
    double = f"resize({res}, method='bicubic', rounding='nearest')"
    train_pp = f'{double}|random_affine(8, 0.05, (0.95, 1.05))|value_range(-1, 1)'
    val_pp = fewshot_pp = f'{double}|value_range(-1, 1)'
  c.data = dict(source=arg.data, split=arg.train, pp=train_pp, batch_size=batch)
  if not digits:
    c.data.num_classes = arg.classes

  val = dict(source=arg.data, pp=val_pp, batch_size=360 if digits else batch)
  val['split'] = arg.val or ('test' if digits else 'val')
  every = max(c.steps // (5 if digits else 200), 1)
  c.evals = dict(val=dict(type='masked_patches', data=val, every=every))
  if fewshot := arg.fewshot or (digits and 'digits'):
    c.evals.fewshot = common.fewshot(fewshot, fewshot_pp, val['batch_size'], every)
    if digits:
      c.evals.fewshot.shots = [10]
  c.checkpoint = dict(every=every, best='val/loss')
  c.log = dict(every=max(every // 10, 1))
  return c
