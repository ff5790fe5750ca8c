"""MLP-Mixer-B/16 on ImageNet-1k from scratch (arXiv 2105.01601, by big_vision's recipe).

  vit_jax train --config=mixer_i1k                 # TPU v3-32
  vit_jax train --config=mixer_i1k:epochs=60
  vit_jax train --config=mixer_i1k:debug

300 epochs, batch 4096, Adam at 1e-3 with weight decay 0.1, linear decay to 1e-5 of the
peak, stochastic depth up to 0.1, RandAugment(2, 15), mixup of 0.5, sigmoid loss.
Expected: 76.3 % top-1 on the validation images after 300 epochs, 70.5 after 60. Not run
here, because the data is not available.

Data: TFDS `imagenet2012`, prepared from the two archives of image-net.org. RandAugment has
the known bugs of the published runs.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import common

from vit_jax.config import parse_arg

DEBUG = common.DEBUG_I1K | dict(variant='S/8', small=True)


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **common.IMAGENET,
    variant='B/16',
    # For debugging: two narrow blocks.
    small=False,
    batch=4096,
    epochs=300.0,
    warmup=10_000,
  )
  pp = common.inception(arg.res, 'randaug(2, 15, True)')
  c = common.classifier(arg, 'mixer', pp, loss='sigmoid', mixup=0.5)
  c.model.update(stochastic_depth=0.1, head_bias_init=-6.9)
  if arg.small:
    c.model.update(width=64, depth=2, tokens_mlp_dim=32, channels_mlp_dim=128)

  c.optim = dict(name='adamw', lr=1e-3, wd=0.1, clip=1.0)
  c.optim.schedule = dict(decay='linear', warmup=arg.warmup, end=1e-5)

  common.evaluate_i1k(c, arg)
  return c
