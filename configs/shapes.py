"""A small ViT on synthetic images of coloured shapes: classes and structured tasks, no download.

  vit_jax train --config=shapes                     # kind and colour: 36 classes
  vit_jax train --config=shapes:task=count          # or position, distance
  vit_jax train --config=shapes:train=train[:1000]  # the effect of fewer images

The source 'shapes' describes the tasks. `size` is the side of an image in pixels, and
`examples` the number of training images; the test images are always the same. Images are not
flipped or cropped, which would change positions, numbers and distances.

Hardware: any; 400 steps take 145 s of processor time. Expect on the 5,000 test images 32.5 %
of classes (chance 2.8 %; the model has learned the colours and a little of the kinds) and
66.2 % of counts (chance 12.5 %). The model has then just begun to learn positions: 11.6 %
(chance 6.25 %) with sine-cosine position embeddings (--config.model.posemb=sincos2d), and
chance with learned ones. Distances were at chance after 120 steps. Both need more steps
(steps=N).

Smallest slices: v3:2x2 or v5e:2x2.
"""

import ml_collections

from vit_jax.config import parse_arg

DEBUG = dict(examples=64, steps=4, batch=16, warmup=1, test='test[:32]')


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    task='class',
    size=32,
    examples=100_000,
    train='train',
    test='test',
    batch=64,
    steps=400,
    warmup=40,
    lr=2e-3,
    seed=0,
  )
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  c.steps = arg.steps

  # There are 64 patches if the size is a multiple of 8.
  c.model = dict(
    name='vit', patch_size=(arg.size // 8, arg.size // 8), classifier='gap'
  )
  c.model.update(width=96, depth=4, mlp_dim=192, num_heads=6)

  made = dict(source=f'shapes:{arg.task}', pp='value_range(-1, 1)')
  made['source_options'] = dict(size=arg.size, num_examples=arg.examples)
  c.data = dict(split=arg.train, batch_size=arg.batch, **made)

  c.task = dict(name='classify', loss='softmax')
  c.optim = dict(name='adamw', lr=arg.lr, wd=0.05, clip=1.0)
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup)

  test = dict(split=arg.test, batch_size=250, **made)
  c.evals = dict(test=dict(type='classification', data=test))
  c.checkpoint = dict(every=0.25)
  c.log = dict(every=0.05)
  return c
