"""ViT-S/16 on ImageNet-1k: "Better plain ViT baselines" (arXiv 2205.01580).

  vit_jax train --config=vit_s16_i1k              # 90 epochs, TPU v3-8
  vit_jax train --config=vit_s16_i1k:epochs=300
  vit_jax train --config=vit_s16_i1k:debug

Average pooling, fixed sine-cosine positions, a hidden layer before the head, softmax, batch
1024, RandAugment(2, 10) and mixup of 0.2. A TPU v3-8 takes under 7 hours for 90 epochs, and
under a day for 300. Expected: 76.5 % top-1 on the validation images after 90 epochs (76.4 to
76.9 in an independent reproduction), 80 % after 300 (the paper's abstract). Not run here,
because the data is not available.

Data: TFDS `imagenet2012`, prepared from the two archives of image-net.org. RandAugment has
the known bugs of the published runs; randaug=correct has none.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import common

from vit_jax import models
from vit_jax.config import parse_arg
from vit_jax.errors import choose

RANDAUG = {'legacy': 'randaug(2, 10, True)', 'correct': 'randaug(2, 10)'}

DEBUG = common.DEBUG_I1K


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **common.IMAGENET,
    variant='S/16',
    randaug='legacy',
    batch=1024,
    epochs=90.0,
    warmup=10_000,
  )
  augment = choose('config argument randaug', arg.randaug, RANDAUG)
  pp = common.inception(arg.res, augment)
  c = common.classifier(arg, 'vit', pp, loss='softmax', mixup=0.2)
  c.model.update(classifier='gap', posemb='sincos2d')
  c.model.representation_size = models.resolve('vit', arg.variant)[1]['width']

  c.optim = dict(name='adamw', lr=1e-3, wd=0.1, clip=1.0, moment_dtype='bfloat16')
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup)

  common.evaluate_i1k(c, arg)
  return c
