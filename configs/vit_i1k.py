"""ViT on ImageNet-1k from scratch: the last row of the paper's Table 3.

  vit_jax train --config=vit_i1k                 # B/16, TPU v3-32
  vit_jax train --config=vit_i1k:variant=L/32
  vit_jax train --config=vit_i1k:debug

300 epochs, batch 4096, Adam at 3e-3 with weight decay 0.3, cosine, gradients clipped at
norm 1, dropout 0.1, sigmoid loss. Expected on the validation images at 224 px: B/32
69.19, B/16 74.79, L/32 66.90, L/16 72.59 % (google-research/vision_transformer issue 62).
configs/vit_s16_i1k.py and configs/augreg_i1k.py do better. Not run here, because the data is
not available.

Data: TFDS `imagenet2012`, prepared from the two archives of image-net.org.

Smallest slices: v3:2x2 or v5e:2x4 (B/16).
"""

import common

from vit_jax import models
from vit_jax.config import parse_arg

DEBUG = common.DEBUG_I1K


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **common.IMAGENET,
    variant='B/16',
    batch=4096,
    epochs=300.0,
    warmup=10_000,
  )
  c = common.classifier(arg, 'vit', common.inception(arg.res), loss='sigmoid')
  c.model.dropout = 0.1
  c.model.representation_size = models.resolve('vit', arg.variant)[1]['width']
  # The prior of one class of 1000, ln(1 / 1000).
  c.model.head_bias_init = -6.9

  c.optim = dict(name='adamw', lr=3e-3, wd=0.3, clip=1.0)
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup)

  common.evaluate_i1k(c, arg)
  return c
