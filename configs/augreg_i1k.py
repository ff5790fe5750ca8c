"""AugReg: "How to train your ViT?" on ImageNet-1k from scratch (arXiv 2106.10270).

  vit_jax train --config=augreg_i1k                 # B/16, TPU v3-32
  vit_jax train --config=augreg_i1k:variant=Ti/16,aug=strong1
  vit_jax train --config=augreg_i1k:variant=S/16,aug=light1,names=files
  vit_jax train --config=augreg_i1k:debug

300 epochs, batch 4096, Adam with a bfloat16 first moment at 1e-3, weight decay 0.1, clipping
at 1, cosine, sigmoid loss. Half of the paper's runs have dropout=0.1,sd=0.1. `aug` is a level
of LEVELS, by default that of the variant. names=files means the names in the published files,
which call the first two levels light0 and light1. RandAugment and mixup have the known bugs
of the published runs (legacy=True). The model is that of the published files: with a class
token, and without a hidden layer before the head.

Expected: about 79 % top-1 for B/16 at 224 px (google-research/big_vision, issue 7). Figure 4
of the paper has the other models. Not run here, because the data is not available.

Smallest slices: v3:2x2 or v5e:2x4 (B/16).
"""

import common
import ml_collections

from vit_jax.config import parse_arg
from vit_jax.errors import choose

# {level: ((operations, magnitude) of RandAugment or None, alpha of mixup)}.
LEVELS = {
  'none': (None, 0.0),
  'light1': ((2, 0), 0.0),
  'light2': ((2, 10), 0.2),
  'medium1': ((2, 15), 0.2),
  'medium2': ((2, 15), 0.5),
  'strong1': ((2, 20), 0.5),
  'strong2': ((2, 20), 0.8),
}
# {names: {name of a level: its name in LEVELS}}. 'files' are the names in the published files
# and their index.csv.
NAMES = {'config': {}, 'files': {'light0': 'light1', 'light1': 'light2'}}
DEFAULT = {
  'Ti/16': 'light1',
  'S/32': 'medium1',
  'S/16': 'medium2',
  'B/32': 'medium2',
  'B/16': 'medium2',
  'L/16': 'medium2',
}

DEBUG = common.DEBUG_I1K | dict(aug='medium2')


def augreg(arg, levels: dict, head_bias: float) -> ml_collections.ConfigDict:
  """Returns the config of a run on either data set, without evaluations."""
  level = arg.aug or choose('config argument variant', arg.variant, levels)
  level = choose('config argument names', arg.names, NAMES).get(level, level)
  randaug, mixup = choose('config argument aug', level, LEVELS)
  augment = f'randaug{(*randaug, True)}' if randaug else ''
  pp = common.inception(arg.res, augment)
  c = common.classifier(arg, 'vit', pp, loss='sigmoid', mixup=mixup)
  c.model.update(dropout=arg.dropout, stochastic_depth=arg.sd)
  # None means 1 / sqrt(width), as in big_vision.
  c.model.posemb_std = None
  c.model.head_bias_init = head_bias
  c.optim = dict(name='adamw', lr=1e-3, wd=arg.wd, clip=1.0, moment_dtype='bfloat16')
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup)
  return c


def get_config(arg=None):
  arg = parse_arg(arg, debug=DEBUG, **common.IMAGENET, **common.AUGREG)
  # The bias is the prior of one class of 1000, ln(1 / 1000).
  c = augreg(arg, DEFAULT, -6.9)
  common.evaluate_i1k(c, arg)
  return c
