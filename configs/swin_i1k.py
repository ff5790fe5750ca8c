"""Swin-T on ImageNet-1k from scratch (arXiv 2103.14030, section 4.1 and appendix A2).

  vit_jax train --config=swin_i1k                       # TPU v3-32
  vit_jax train --config=swin_i1k:variant=B
  vit_jax train --config=swin_i1k:variant=V2-T,res=256  # V2, arXiv 2111.09883
  vit_jax train --config=swin_i1k:debug

300 epochs, batch 1024, AdamW at 1e-3 with weight decay 0.05, 20 epochs of warmup, cosine
down to 1e-5, RandAugment (rand-m9-mstd0.5-inc1), mixup of 0.8 or CutMix of 1.0, random erasing
of 0.25, label smoothing of 0.1, stochastic depth up to 0.2 (T), 0.3 (S), 0.5 (B). V2 models
are trained the same way at 256 px. Each value is from config.py or configs/ in the authors'
repository, microsoft/Swin-Transformer, which clips gradients at norm 5; the paper says 1.
Warmup starts at 0, not 1e-6, and images are resized bilinearly, not bicubically. Expected:
near the published 81.3 % top-1 (T), 83.0 (S), 83.5 (B); V2 81.8 (T), 83.7 (S), 84.2 (B), and
with windows of 16 (V2-T/16) 82.8, 84.1, 84.6. Not run here, because the data is not
available. For another size see configs/finetune.py, with --config.model.windows.

Data: TFDS `imagenet2012`, prepared from the two archives of image-net.org.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import common

from vit_jax.config import parse_arg
from vit_jax.errors import choose

DEBUG = common.DEBUG_I1K | dict(variant='T', small=True, res=32)
STOCHASTIC_DEPTH = {'T': 0.2, 'S': 0.3, 'B': 0.5}


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **common.IMAGENET,
    variant='T',
    # For debugging: two narrow stages.
    small=False,
    batch=1024,
    epochs=300.0,
    # 20 epochs of train[:99%].
    warmup=24_773,
  )
  pp = common.erasing(arg.res, 2)
  c = common.classifier(arg, 'swin', pp, **common.MIXING)
  size = arg.variant.removeprefix('V2-').split('/')[0]
  c.model.stochastic_depth = choose(
    'size in the config argument variant', size, STOCHASTIC_DEPTH
  )
  if arg.small:
    c.model.update(width=16, depths=(2, 1), num_heads=(2, 4), windows=(4, 4))

  c.optim = dict(name='adamw', lr=1e-3, wd=0.05, clip=5.0)
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup, end=1e-5 / 1e-3)
  # Norms, biases and positions, including V2's MLPs for positions, do not decay.
  c.optim.wd_rules = [
    ('.*/relative_positions/.*', 0.0),
    ('.*/kernel', 1.0),
    ('.*', 0.0),
  ]

  common.evaluate_i1k(c, arg)
  return c
