"""BiT-ResNet-50 on ImageNet-1k from scratch (big_vision's recipe; model of arXiv 1912.11370).

  vit_jax train --config=bit_i1k                   # TPU v3-32
  vit_jax train --config=bit_i1k:variant=R101
  vit_jax train --config=bit_i1k:debug

90 epochs, batch 4096, SGD with a bfloat16 momentum of 0.9 at 0.1 per 256 images, 1.6;
weight decay 1e-3 times the rate, cosine, clipping at 1, softmax. Expected: 76 to 77 % top-1,
which a ResNet-50 with GroupNorm and weight standardisation reaches in 90 epochs; the recipe
states no number. Not run here, because the data is not available.

Data: TFDS `imagenet2012`, prepared from the two archives of image-net.org.

Smallest slices: v3:2x2 or v5e:2x4.
"""

import common

from vit_jax.config import parse_arg

DEBUG = common.DEBUG_I1K | dict(variant='R26', small=True, res=32)


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **common.IMAGENET,
    variant='R50',
    # For debugging: two stages of one unit.
    small=False,
    batch=4096,
    epochs=90.0,
    warmup=1_000,
  )
  c = common.classifier(arg, 'resnet_gn', common.inception(arg.res), loss='softmax')
  if arg.small:
    c.model.blocks = (1, 1)

  # The recipe decays by 1e-4 without multiplying by the rate, 0.1 per 256 images.
  c.optim = dict(name='sgd', lr=0.1 * arg.batch / 256, wd=1e-3, clip=1.0)
  c.optim.update(momentum=0.9, moment_dtype='bfloat16')
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup)

  common.evaluate_i1k(c, arg)
  return c
