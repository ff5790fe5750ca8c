"""Models of the ViT paper on JFT-300M-like data: every row of its Table 3.

  vit_jax train --config=vit_jft:data=records:/data/jft300m
  vit_jax train --config=vit_jft:variant=L/16,epochs=14
  vit_jax train --config=vit_jft:debug

`variant` is one of ROWS: ViTs, the BiT ResNets of the comparison (R50x1 ...) and hybrids
(R50+B/16 ...). Each has its own rate, and 7 or 14 epochs. Batch 4096, Adam, weight decay 0.1
(times the rate), linear warmup over 10,000 steps and linear decay to 1e-5, no dropout, no
clipping (the authors' re-run of H/14 clips at 10: --config.optim.clip=10.0). Table 2 gives
680 TPUv3-core-days for L/16 in 14 epochs, and 2,500 for H/14. Expected after fine-tuning on
ImageNet (Table 6): B/32 80.73, B/16 84.15, L/32 84.37, L/16 86.30 (14 epochs 87.12), H/14
88.08 %. Not run here, because JFT is not public.

`data` is any source of encoded images with one or several labels. The default stands for
the files jft300m/train-00000-of-01024.tfrecord and so on (docs/guides/data_at_scale.md).
fewshot=tfds:NAME adds a few-shot evaluation, by which the paper chose its models.

Smallest slices: v3:2x2 or v5e:2x4 for B/16; v3:4x4 or v5e:4x4 for L/16;
v3:8x8 or v5e:8x8 for H/14.
"""

import common

from vit_jax import models
from vit_jax.config import parse_arg

# {variant: (peak learning rate, epochs)}.
ROWS = {
  'B/32': (8e-4, 7.0),
  'B/16': (8e-4, 7.0),
  'L/32': (6e-4, 7.0),
  'L/16': (4e-4, 7.0),
  'H/14': (3e-4, 14.0),
  'R50x1': (1e-3, 7.0),
  'R50x2': (1e-3, 7.0),
  'R101x1': (8e-4, 7.0),
  'R152x1': (6e-4, 7.0),
  'R152x2': (6e-4, 7.0),
  'R50+B/32': (8e-4, 7.0),
  'R50+B/16': (8e-4, 7.0),
  'R50+L/32': (2e-4, 7.0),
  'R50+L/16': (4e-4, 7.0),
}

DEBUG = common.DEBUG | dict(lr=8e-4, fewshot='digits')


def get_config(arg=None):
  defaults = common.IMAGENET21K | dict(
    variant='B/16',
    # 0 means the value in ROWS.
    lr=0.0,
    epochs=0.0,
    batch=4096,
    warmup=10_000,
    data='records:jft300m',
    train='train',
    val='val',
    classes=18_291,
  )
  arg = parse_arg(arg, debug=DEBUG, **defaults)
  lr, epochs = ROWS.get(arg.variant, (arg.lr, arg.epochs))
  lr, arg.epochs = arg.lr or lr, arg.epochs or epochs

  resnet = arg.variant in ROWS and '/' not in arg.variant
  name = 'bit' if resnet else 'vit'
  c = common.classifier(arg, name, common.inception(arg.res), loss='sigmoid')
  c.model.head_bias_init = -10.0
  if not resnet:
    c.model.representation_size = models.resolve('vit', arg.variant)[1]['width']

  c.optim = dict(name='adamw', lr=lr, wd=0.1)
  end = 1e-5 / lr if lr else 0.0
  c.optim.schedule = dict(decay='linear', warmup=arg.warmup, end=end)

  common.evaluate_pretraining(c, arg)
  return c
