"""MViTv2-T on ImageNet-1k from scratch (arXiv 2112.01526, section 5.1).

  vit_jax train --config=mvit_i1k                       # TPU v3-32
  vit_jax train --config=mvit_i1k:variant=B
  vit_jax train --config=mvit_i1k:debug

300 epochs, AdamW with weight decay 0.05 at 2.5e-4 per 256 images, which is 2e-3 for the batch
of 2048, 70 epochs of warmup, cosine down to 8e-6, gradients clipped at norm 1, RandAugment,
mixup of 0.8 or CutMix of 1.0, random erasing of 0.25, label smoothing of 0.1, stochastic depth
up to 0.1 (T, S), 0.3 (B), 0.5 (L). The values are from the authors' repository,
facebookresearch/mvit: from configs/MVITv2_{T,S,B}.yaml and configs/test/MVITv2_L_test.yaml,
or mvit/config/defaults.py if these lack them. Augmentations are not repeated (AUG.NUM_SAMPLE
is 1). RandAugment is timm's `rand-m9-n6-mstd0.5-inc1`, as in theirs. Warmup starts at 0, not
at 8e-8.
Expected: near the published 82.3 % top-1 (T), 83.6 (S), 84.4 (B), 85.3 (L). Not run here,
because the data is not available. For another size see configs/finetune.py.

Data: TFDS `imagenet2012`, prepared from the two archives of image-net.org.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import common

from vit_jax.config import parse_arg
from vit_jax.errors import choose

DEBUG = common.DEBUG_I1K | dict(variant='T', small=True, res=32)
STOCHASTIC_DEPTH = {'T': 0.1, 'S': 0.1, 'B': 0.3, 'L': 0.5}


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **common.IMAGENET,
    variant='T',
    # For debugging: two narrow blocks.
    small=False,
    batch=2048,
    epochs=300.0,
    # 70 epochs of train[:99%].
    warmup=43_352,
  )
  pp = common.erasing(arg.res, 6)
  c = common.classifier(arg, 'mvit', pp, **common.MIXING)
  c.model.stochastic_depth = choose(
    'size in the config argument variant', arg.variant, STOCHASTIC_DEPTH
  )
  if arg.small:
    c.model.update(width=16, depths=(1, 1))

  c.optim = dict(name='adamw', lr=2e-3, wd=0.05, clip=1.0)
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup, end=8e-6 / 2e-3)
  # Norms and biases do not decay; tables of positions do.
  c.optim.wd_rules = [
    ('.*/(kernel|relative_positions/.*)', 1.0),
    ('.*', 0.0),
  ]

  common.evaluate_i1k(c, arg)
  return c
