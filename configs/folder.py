"""A ViT from scratch on your own folder of images, one sub-folder per class.

  vit_jax train --config=folder:data=FOLDER
  vit_jax train --config=folder:data=FOLDER,variant=S/16,res=224
  vit_jax train --config=folder:debug

FOLDER holds `train` and `val` (or `test`: add val=test). If it holds only the classes, add
train=train[:90%],val=train[90%:] to keep a random tenth for evaluation. That tenth is not
drawn class by class, so a run warns if it has few images, or none of a class. Images that
cannot be read are left out and listed in the run's bad_images.jsonl.

The run has 2,000 steps of 64 images; steps=N or epochs=N sets another length. The learning
rate warms up over 100 steps, or a tenth of the run if that is less or its length is in epochs;
warmup=N sets another number. Average pooling, fixed sine-cosine positions and AdamW are from
"Better plain ViT baselines" (arXiv 2205.01580). From scratch a ViT needs more images than most
folders have. Expect it to learn colours and textures, and start from published weights for
more.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import common
import ml_collections

from vit_jax.config import parse_arg

DEBUG = dict(
  variant='mu/4', res=8, batch=32, steps=8, warmup=2, data='digits', val='test'
)


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    data='',
    train='train',
    val='val',
    variant='Ti/16',
    res=128,
    batch=64,
    steps=2_000,
    epochs=0.0,
    warmup=-1,
    lr=1e-3,
    seed=0,
  )
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  warmup = min(100, arg.steps // 10)
  if arg.epochs:
    c.epochs, warmup = arg.epochs, 0.1
  else:
    c.steps = arg.steps

  c.model = dict(name='vit', variant=arg.variant, classifier='gap', posemb='sincos2d')
  c.data = dict(source=arg.data, split=arg.train, batch_size=arg.batch)
  c.data.pp = f'decode|inception_crop({arg.res}, 20)|flip_lr|value_range'
  c.task = dict(name='classify', loss='softmax', label_smoothing=0.1)
  c.optim = dict(name='adamw', lr=arg.lr, wd=0.1, clip=1.0)
  warmup = warmup if arg.warmup < 0 else arg.warmup
  c.optim.schedule = dict(decay='cosine', warmup=warmup)

  val = dict(source=arg.data, split=arg.val, batch_size=arg.batch)
  val['pp'] = common.central(arg.res)
  # A fraction of the run.
  every = 0.1
  c.evals = dict(val=dict(type='classification', data=val, every=every))
  c.checkpoint = dict(every=every, best='val/top1')
  c.log = dict(every=every / 4)
  return c
