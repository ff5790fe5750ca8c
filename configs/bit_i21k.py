"""BiT-ResNet-50x1 on ImageNet-21k (big_vision's recipe; model of arXiv 1912.11370).

  vit_jax train --config=bit_i21k                  # TPU v3-32
  vit_jax train --config=bit_i21k:variant=R101x3
  vit_jax train --config=bit_i21k:debug

The "M" models: 90 epochs, batch 4096, SGD with a bfloat16 momentum of 0.9 at 0.03 per 256
images, 0.48; weight decay 1e-3 times the rate, cosine, clipping at 1, sigmoid loss. Expected
after fine-tuning on ImageNet: about 80 % top-1 for R50x1 (the BiT paper, BiT-M). Not run
here, because the data is not available.

Data: a prepared `imagenet21k`, as in configs/vit_b16.py.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import common

from vit_jax.config import parse_arg

DEBUG = common.DEBUG | dict(variant='R26x1', small=True, res=32)


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **common.IMAGENET21K,
    variant='R50x1',
    # For debugging: two stages of one unit.
    small=False,
    batch=4096,
    epochs=90.0,
    warmup=5_000,
  )
  c = common.classifier(arg, 'bit', common.inception(arg.res), loss='sigmoid')
  c.model.head_bias_init = -10.0
  # big_vision pads the max-pool of the root with -inf.
  c.model.zero_pad_pool = False
  if arg.small:
    c.model.blocks = (1, 1)

  # The recipe decays by 3e-5 without multiplying by the rate, 0.03 per 256 images.
  c.optim = dict(name='sgd', lr=0.03 * arg.batch / 256, wd=1e-3, clip=1.0)
  c.optim.update(momentum=0.9, moment_dtype='bfloat16')
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup)

  common.evaluate_pretraining(c, arg)
  return c
