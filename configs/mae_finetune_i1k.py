"""Fine-tunes MAE on ImageNet-1k, as its authors do (arXiv 2111.06377, appendix A.1).

  vit_jax train --config=mae_finetune_i1k:weights=RUN
  vit_jax train --config=mae_finetune_i1k:weights=mae_pretrain_vit_large.pth,size=L
  vit_jax train --config=mae_finetune_i1k:weights=RUN,probe=True
  vit_jax train --config=mae_finetune_i1k:debug

The head reads the normalised mean of the patches. AdamW, batch 1024, weight decay 0.05 of
kernels, 5 epochs of warmup, cosine to 1e-6, RandAugment (rand-m9-mstd0.5-inc1), mixup of 0.8
or CutMix of 1.0, random erasing of 0.25, label smoothing of 0.1. By `size`: rate 5e-4 (B) or
1e-3 (L, H) x batch / 256, multiplied per layer by 0.65 (B) or 0.75 (L, H), 100 (B) or 50
epochs, stochastic depth up to 0.1, 0.2 or 0.3. Each value is from FINETUNE.md in the authors'
repository, facebookresearch/mae. The head starts at 0, theirs with a deviation of 2e-5, and
images are resized bilinearly, not bicubically.

probe=True trains a linear head on the class token of the frozen encoder, with a batch norm before
it: LARS at 0.1 x batch / 256, batch 16384, 10 epochs of warmup, cosine, no weight decay, 90
epochs (B) or 50, crops and flips alone, as in the authors' main_linprobe.py. Expected: 67.8 %
(B/16), 76.0 (L/16), 77.2 (H/14).

`data` may be a folder of classes, with fewer `epochs`. Without warmup=N, warmup is a
twentieth of B's run, and a tenth of L's and H's.

Hardware: as vit_i1k. Expected: 83.66 % (B/16), 85.95 (L/16), 86.93 (H/14) from 1600 epochs
of pre-training. Not run here, because the data is not available.

Smallest slices: v3:2x2 or v5e:2x4 (B/16).
"""

import common
import ml_collections

from vit_jax.config import parse_arg
from vit_jax.errors import choose

DEBUG = common.DEBUG_I1K | dict(weights='')
# (rate per 256 images, layer decay, stochastic depth, epochs) for each size.
SIZES = {
  'B': (5e-4, 0.65, 0.1, 100.0),
  'L': (1e-3, 0.75, 0.2, 50.0),
  'H': (1e-3, 0.75, 0.3, 50.0),
}


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **{key: x for key, x in common.IMAGENET.items() if key != 'classes'},
    weights='hf:timm/vit_base_patch16_224.mae',
    size='B',
    # Whether to train a head alone.
    probe=False,
    # 0: 1024, or 16384 for a probe.
    batch=0,
    epochs=0.0,
    warmup=0,
    lr=0.0,
  )
  lr, layer_decay, depth, epochs = choose('size', arg.size, SIZES)
  arg.batch = arg.batch or (16_384 if arg.probe else 1024)
  if arg.probe:
    lr, epochs = 0.1, {'B': 90.0}.get(arg.size, 50.0)
  lr = arg.lr or lr * arg.batch / 256
  c = ml_collections.ConfigDict()
  c.epochs = arg.epochs or epochs

  c.model = dict(dtype=arg.dtype)
  if not arg.probe:
    c.model.update(classifier='gap', cls_token=True, final_norm='pooled')
    c.model.stochastic_depth = depth
  if arg.weights:
    skip = ['Transformer/encoder_norm/.*', 'pooled_norm/.*', 'head/.*']
    c.weights = dict(source=arg.weights, skip=skip[2:] if arg.probe else skip)
  # `:debug` has no weights.
  else:
    c.model.update(name='vit', variant='mu/8', act='gelu_erf')

  augment = '' if arg.probe else '|randaug_increasing(2, 9, 0.5)'
  pp = f'decode|inception_crop({arg.res}, 8, 100)|flip_lr{augment}|value_range'
  pp += '' if arg.probe else '|random_erasing(0.25, 1.0)'
  c.data = dict(source=arg.data, split=arg.train, batch_size=arg.batch, pp=pp)
  if arg.probe:
    c.task = dict(name='classify')
    c.tune = dict(method='linear', batch_norm=True)
    c.optim = dict(name='lars', lr=lr)
    c.optim.schedule = dict(decay='cosine', warmup=arg.warmup or 10 / epochs)
  else:
    c.task = dict(name='classify', **common.MIXING)
    c.optim = dict(name='adamw', lr=lr, wd=0.05, layer_decay=layer_decay)
    warmup = arg.warmup or 5 / epochs
    c.optim.schedule = dict(decay='cosine', warmup=warmup, end=1e-6 / lr)
  common.evaluate_i1k(c, arg)
  return c
