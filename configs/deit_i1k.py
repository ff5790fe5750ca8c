"""DeiT on ImageNet-1k from scratch, with or without a teacher (arXiv 2012.12877).

  vit_jax train --config=deit_i1k                        # S/16, TPU v3-32
  vit_jax train --config=deit_i1k:variant=Ti/16,teacher=hf:timm/convnext_base.fb_in1k
  vit_jax train --config=deit_i1k:debug

300 epochs, batch 1024, AdamW at 1e-3 with weight decay 0.05, 5 epochs of warmup, cosine down to
1e-5, RandAugment (rand-m9-mstd0.5-inc1), mixup of 0.8 or CutMix of 1.0, random erasing of 0.25,
label smoothing of 0.1, stochastic depth up to 0.1. With teacher=SOURCE, any classifier of
the same classes, the student has a distillation token, whose head learns the classes that the
teacher predicts for the mixed images; that is half of the loss. Each value is from main.py in
the authors' repository, facebookresearch/deit. An epoch shows a third of the images, each
three times in a batch (repeated augmentation). Images are resized bilinearly, not
bicubically, and the authors' teacher, a RegNetY-16GF, is not among the models here.

Expected: near the published 72.2 % top-1 (Ti/16), 79.9 (S/16), 81.8 (B/16); with their teacher
74.5, 81.2, 83.4. Not run here, because the data is not available.

Data: TFDS `imagenet2012`, prepared from the two archives of image-net.org.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import common

from vit_jax.config import parse_arg

DEBUG = common.DEBUG_I1K


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **common.IMAGENET,
    variant='S/16',
    teacher='',
    batch=1024,
    epochs=300.0,
    # 5 epochs of train[:99%].
    warmup=6_193,
  )
  c = common.classifier(arg, 'vit', common.erasing(arg.res, 2), **common.MIXING)
  c.data.repeats = 3
  c.model.update(act='gelu_erf', stochastic_depth=0.1)
  if arg.teacher:
    c.model.update(classifier='distilled', registers=1)
    c.task.update(name='distill', teacher=arg.teacher, distance='hard', weight=0.5)

  c.optim = dict(name='adamw', lr=1e-3, wd=0.05)
  c.optim.schedule = dict(decay='cosine', warmup=arg.warmup, end=1e-5 / 1e-3)

  common.evaluate_i1k(c, arg)
  return c
