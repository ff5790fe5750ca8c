"""DINOv2: self-distillation of images and hidden patches (arXiv 2304.07193).

  vit_jax train --config=dinov2_i1k                      # L/16 on ImageNet-1k, 100 "epochs"
  vit_jax train --config=dinov2_i1k:recipe=large,data=photos,knn=photos
  vit_jax train --config=dinov2_i1k:data=digits,seed=0 --workdir=runs/dinov2    # bundled
  vit_jax train --config=dinov2_i1k:debug

As dino_i1k, and the student also predicts patches that it does not see (iBOT), while KoLeo
spreads the features of a batch. By `recipe`, from the authors' configs vitl16_short.yaml and
vitl14.yaml (facebookresearch/dinov2):

  short: L/16, batch 2048, 125,000 steps, rate 4e-3 x sqrt(batch / 1024), 65,536 prototypes for
    images and patches, centering, momentum 0.992, layer decay 0.9
  large: L/14, batch 3072, 625,000 steps, rate 2e-4 x sqrt(batch / 1024), 131,072 prototypes in
    two heads, Sinkhorn, momentum 0.994, weight decay to 0.2, local crops of 98 px

Both: crops from 32 %, AdamW, weight decay from 0.04 (to 0.4), gradients of backbone and heads
clipped at norm 3 each, rate of the patch embedding x 0.2, LayerScale from 1e-5, each
branch of a block skips 0.3 or 0.4 of the images, temperature from 0.04 to 0.07 in 37,500 steps.
An "epoch" has 1,250 steps.

The published weights were trained with an inverted blur: the first global crop is never
blurred. blur=published does so; blur=intended, the default, blurs as the paper says.

Hardware: as vit_i1k. Expected of `short`: kNN 81.6 %, linear probe 82.9. Not run here, because
the data is not available.

Smallest slices: v5e:4x4 (S/16; L/16 was not compiled).
"""

import math

import dino_i1k

from vit_jax.config import parse_arg
from vit_jax.errors import choose
from vit_jax.models import vit

DEBUG = dino_i1k.DEBUG
STEPS_PER_EPOCH = 1250
BLURS = {'intended': '', 'published': ', inverted=True'}
RECIPES = {
  'short': dict(
    variant='L/16',
    batch=2048,
    epochs=100.0,
    warmup=10,
    lr=4e-3,
    wd_end=0.4,
    layer_decay=0.9,
    ema=0.992,
    depth=0.3,
    local=96,
    group=64,
    task=dict(patch_head='shared', head=dict(lengths=True)),
  ),
  'large': dict(
    variant='L/14',
    batch=3072,
    epochs=500.0,
    warmup=80,
    lr=2e-4,
    wd_end=0.2,
    layer_decay=1.0,
    ema=0.994,
    depth=0.4,
    local=98,
    group=32,
    task=dict(
      centering='sinkhorn',
      head=dict(outputs=131_072, bottleneck=384, lengths=True),
      patch_head=dict(outputs=131_072, lengths=True),
    ),
  ),
}


def get_config(arg=None):
  arguments = dict(variant='', recipe='short', blur='intended')
  arg = parse_arg(arg, debug=DEBUG, **dino_i1k.ARGUMENTS, **arguments)
  r = choose('recipe', arg.recipe, RECIPES)
  small = arg.data == 'digits'
  arg.variant = arg.variant or r['variant']
  arg.local = arg.local or (0 if small else r['local'])
  blur = f'p=(1.0, 0.1, 0.5){choose("blur", arg.blur, BLURS)}'
  c = dino_i1k.start(arg, batch=r['batch'], epochs=r['epochs'], area=32, blur=blur)
  batch, epochs = c.data.batch_size, c.epochs
  c.task = dict(r['task'], name='dino', koleo=0.1, koleo_group=min(r['group'], batch))
  c.task.update(
    temperature=0.07, temperature_start=0.04, temperature_warmup=30 * STEPS_PER_EPOCH
  )
  options = dict(ema=r['ema'], wd_end=r['wd_end'], layer_decay=r['layer_decay'])
  if small:
    heads = dict(outputs=512, hidden=256, bottleneck=64)
    c.task.update(dino_i1k.SMALL_TASK, head=heads)
    del c.task.temperature_start, c.task.temperature_warmup
    depth, lr, options['ema'] = c.model.depth, arg.lr or 1e-3, 0.99
  else:
    del c.epochs
    c.steps = round(epochs * STEPS_PER_EPOCH)
    c.model.layer_scale = 1e-5
    c.task.skip_branches = r['depth']
    depth = vit.variant(arg.variant)['depth']
    lr = arg.lr or r['lr'] * math.sqrt(batch / 1024)
  c.optim = dino_i1k.optimizer(lr, epochs, r['warmup'], **options)
  # Backbone and heads.
  c.optim.clip_by = '(dino/(?:patch_)?head/|).*'
  mask = r['layer_decay'] ** (depth + 1)
  c.optim.lr_rules = [('embedding/.*', 0.2), ('dino/mask', mask), ('.*', 1.0)]
  return c
