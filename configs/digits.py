"""The main job: a small ViT on scikit-learn's handwritten digits, real and bundled.

  python -m vit_jax.main --config=configs/digits.py            # or: make train

Hardware and time: see the README, which also says the accuracy to expect on the 360
test images (every fifth image of the 1,797), by seed.
"""

import ml_collections

from vit_jax.config import parse_arg


def get_config(arg=None):
  arg = parse_arg(arg, debug=dict(epochs=1, batch=64), seed=0, epochs=60, batch=128)
  c = ml_collections.ConfigDict()
  c.seed = arg.seed
  c.epochs = arg.epochs

  c.model = dict(name='vit', patch_size=(2, 2), width=64, depth=4, mlp_dim=128)
  c.model.update(num_heads=4, classifier='gap', dropout=0.1)

  c.data = dict(source='digits', split='train', batch_size=arg.batch)
  c.data.pp = 'random_affine(15, 0.1, (0.9, 1.1))|value_range(-1, 1)'

  c.task = dict(name='classify', loss='softmax', label_smoothing=0.1)
  c.optim = dict(name='adamw', lr=3e-3, wd=0.05, clip=1.0, ema=0.99)
  c.optim.schedule = dict(decay='cosine', warmup=20)

  test = dict(source='digits', split='test', batch_size=360, pp='value_range(-1, 1)')
  c.evals = dict(
    test=dict(type='classification', data=test, every=200),
    test_ema=dict(type='classification', data=test, use_ema=True),
    fewshot=dict(
      type='fewshot',
      datasets=dict(digits=dict(source='digits', train='train', test='test')),
      pp='value_range(-1, 1)',
      batch_size=360,
    ),
  )
  c.checkpoint = dict(every=200)
  c.log = dict(every=50)
  return c
