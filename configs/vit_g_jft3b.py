"""ViT-g/14 and G/14 on JFT-3B-like data: "Scaling Vision Transformers" (arXiv 2106.04560).

  vit_jax train --config=vit_g_jft3b:data=records:/data/jft3b
  vit_jax train --config=vit_g_jft3b:variant=G/14,fsdp=16
  vit_jax train --config=vit_g_jft3b:debug

One million steps of 16,384 images, Adafactor with a bfloat16 momentum at 8e-4, 10,000 steps
of warmup, a reciprocal square root with timescale 10,000, 50,000 steps of cooldown; weight
decay 0.03 (head 3), clipping at 1, attention pooling, sigmoid loss. The state is split over
`fsdp` devices, and blocks are recomputed in the backward pass. To see the memory of a device:

  vit_jax inspect --config vit_g_jft3b:variant=G/14 --mesh data=64,fsdp=16

Expected (G/14): 90.45 % on ImageNet after fine-tuning, 84.86 % 10-shot. Not run here, because
JFT is not public. The paper trained G/14 longer, with batches of 32,768.

`data` is any source of encoded images, as in configs/vit_jft.py.

Smallest slices: v3:8x8 or v5e:8x8.
"""

import common

from vit_jax.config import parse_arg

DEBUG = common.DEBUG | dict(
  steps=12, cooldown=4, fsdp=1, eval_every=6, fewshot='digits'
)


def get_config(arg=None):
  defaults = common.IMAGENET21K | dict(
    variant='g/14',
    batch=16_384,
    steps=1_000_000,
    warmup=10_000,
    cooldown=50_000,
    fsdp=16,
    data='records:jft3b',
    train='train',
    val='val',
    classes=29_593,
    eval_every=10_000,
  )
  arg = parse_arg(arg, debug=DEBUG, **defaults)
  c = common.classifier(arg, 'vit', common.inception(arg.res), loss='sigmoid')
  c.model.update(classifier='map', head_bias_init=-10.0)
  # None means 1 / sqrt(width), as in big_vision.
  c.model.posemb_std = None
  c.model.update(scan=True, remat='full')
  c.mesh = dict(fsdp=arg.fsdp)
  c.sharding = 'fsdp'

  c.optim = dict(name='adafactor', lr=8e-4, wd=0.03, clip=1.0)
  # The decay of the head is a hundred times that of the body (section 3.1).
  c.optim.wd_rules = [('head/kernel', 100.0), ('.*/kernel', 1.0), ('.*', 0.0)]
  c.optim.schedule = dict(decay='rsqrt', timescale=10_000)
  c.optim.schedule.update(warmup=arg.warmup, cooldown=arg.cooldown)

  common.evaluate_pretraining(c, arg)
  return c
