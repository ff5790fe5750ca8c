"""AugReg: "How to train your ViT?" on ImageNet-21k (arXiv 2106.10270).

  vit_jax train --config=augreg_i21k                # B/16, TPU v3-64
  vit_jax train --config=augreg_i21k:variant=L/16,aug=medium2,epochs=30
  vit_jax train --config=augreg_i21k:variant=S/32,dropout=0.1,sd=0.1
  vit_jax train --config=augreg_i21k:debug

300 epochs (30 in the short runs), batch 4096, Adam with a bfloat16 first moment at 1e-3,
weight decay 0.1 (0.03 in half of the paper's runs), clipping at 1, cosine. `aug` is a level
of LEVELS, by default that of the variant. names=files means the names in the published files,
which call the first two levels light0 and light1. RandAugment and mixup have the known bugs
of the published runs (legacy=True). The model is that of the published files: with a class
token, and without a hidden layer before the head.

Expected: see Figure 4 of the paper and the index of its 50,000 files. After fine-tuning on
ImageNet at 384 px, B/16 with medium augmentation has 85.49 %, S/16 83.73, L/16 85.59 and
Ti/16 78.22 (google-research/vision_transformer, README). Not run here, because the data is
not available.

Smallest slices: v3:2x2 or v5e:2x4 (B/16).
"""

import common
from augreg_i1k import augreg

from vit_jax.config import parse_arg

DEFAULT = {
  'Ti/16': 'none',
  'S/32': 'none',
  'S/16': 'light1',
  'B/32': 'light2',
  'B/16': 'light2',
  'L/16': 'medium2',
}

DEBUG = common.DEBUG | dict(aug='medium2')


def get_config(arg=None):
  arg = parse_arg(arg, debug=DEBUG, **common.IMAGENET21K, **common.AUGREG)
  c = augreg(arg, DEFAULT, -10.0)
  common.evaluate_pretraining(c, arg)
  return c
