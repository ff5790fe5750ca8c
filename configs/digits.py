"""The main job: a small ViT on handwritten digits, real and bundled.

  vit_jax train --config=digits            # or: make train
  vit_jax train --config=digits:seed=1
  vit_jax train --config=digits:teacher=RUN    # from another run, without labels

Hardware: any; 70 s of training on 2 CPU cores. Expect 99 % top-1 on the 360 test images
(every fifth of the 1,797); docs/verification.md has the results by seed.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import ml_collections

from vit_jax.config import parse_arg

DEBUG = dict(epochs=0.5, batch=64, warmup=5)


def get_config(arg=None):
  arg = parse_arg(
    arg, debug=DEBUG, seed=0, epochs=50.0, batch=128, warmup=20, teacher=''
  )
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  c.epochs = arg.epochs

  # The 8 x 8 pixels are doubled, so that small rotations do not blur them, and cut into 16
  # patches. Many narrow heads learn faster here than few wide ones.
  c.model = dict(name='vit', patch_size=(4, 4), classifier='gap')
  c.model.update(width=96, depth=3, mlp_dim=192, num_heads=6)

  double = "resize(16, method='bicubic', rounding='nearest')"
  c.data = dict(source='digits', split='train', batch_size=arg.batch)
  # Rotations up to 8 degrees, shifts up to 0.8 of the 16 pixels, zooms up to 5 %. Larger ones
  # would turn digits into other digits.
  affine = 'random_affine(8, 0.05, (0.95, 1.05))'
  c.data.pp = f'{double}|{affine}|value_range(-1, 1)'

  c.task = dict(name='classify', loss='softmax', label_smoothing=0.1)
  if arg.teacher:
    c.task = dict(name='distill', teacher=arg.teacher)
  c.optim = dict(name='adamw', lr=2e-3, wd=0.05, clip=1.0, ema=0.99)
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup)

  test = dict(source='digits', split='test', batch_size=360)
  test['pp'] = f'{double}|value_range(-1, 1)'
  digits = dict(source='digits', train='train', test='test')
  c.evals = dict(
    test=dict(type='classification', data=test, every=400),
    test_ema=dict(type='classification', data=test, use_ema=True),
    fewshot=dict(type='fewshot', datasets=dict(digits=digits), batch_size=360),
  )
  c.evals.fewshot.pp = test['pp']
  c.checkpoint = dict(every=400)
  c.log = dict(every=100)
  return c
