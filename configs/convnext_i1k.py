"""ConvNeXt-T on ImageNet-1k from scratch (arXiv 2201.03545, Table 5).

  vit_jax train --config=convnext_i1k              # TPU v3-32
  vit_jax train --config=convnext_i1k:variant=B
  vit_jax train --config=convnext_i1k:debug

300 epochs, batch 4096, AdamW at 4e-3 with weight decay 0.05, 20 epochs of warmup, cosine,
RandAugment (rand-m9-mstd0.5-inc1), mixup of 0.8 and CutMix of 1.0, random erasing of 0.25,
label smoothing of 0.1, stochastic depth up to 0.1 (T), 0.4 (S), 0.5 (B, L), and an average of
the parameters (0.9999). One thing differs from the published recipe: images are resized
bilinearly, not bicubically. Expected: near the published 82.1 % top-1 (T), 83.1 (S), 83.8 (B),
84.3 (L). Not run here, because the data is not available.

Data: TFDS `imagenet2012`, prepared from the two archives of image-net.org.

Smallest slices: v3:2x2 or v5e:2x4.
"""

import common

from vit_jax.config import parse_arg
from vit_jax.errors import choose

DEBUG = common.DEBUG_I1K | dict(variant='T', small=True, res=32)
STOCHASTIC_DEPTH = {'T': 0.1, 'S': 0.4, 'B': 0.5, 'L': 0.5}


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **common.IMAGENET,
    variant='T',
    # For debugging: two narrow stages.
    small=False,
    batch=4096,
    epochs=300.0,
    # 20 epochs of train[:99%].
    warmup=6_193,
  )
  pp = common.erasing(arg.res, 2)
  c = common.classifier(arg, 'convnext', pp, **common.MIXING)
  c.model.stochastic_depth = choose(
    'config argument variant', arg.variant, STOCHASTIC_DEPTH
  )
  if arg.small:
    c.model.update(depths=(1, 1), widths=(16, 32))

  c.optim = dict(name='adamw', lr=4e-3, wd=0.05, ema=0.9999)
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup, end=1e-6 / 4e-3)

  common.evaluate_i1k(c, arg)
  c.evals.ema = common.accuracy(arg, arg.val, use_ema=True)
  return c
