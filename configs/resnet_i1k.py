"""ResNet-50 on ImageNet-1k from scratch (arXiv 1512.03385; torchvision's recipe).

  vit_jax train --config=resnet_i1k                         # TPU v3-8
  vit_jax train --config=resnet_i1k:variant=101
  vit_jax train --config=resnet_i1k:batch=8192,warmup=774   # TPU v3-32
  vit_jax train --config=resnet_i1k:debug

90 epochs, batch 256, SGD with momentum 0.9 at a rate of 0.1, divided by 10 after 30 and 60
epochs; weight decay 1e-4 on all parameters, random crops of 8 to 100 % of the area, flips.
Each value is a default of references/classification/train.py in pytorch/vision, or of
presets.py beside it. Weight decay is decoupled here and therefore 1e-3: PyTorch adds 1e-4 of
the parameters to the gradient, and momentum then sums that up to ten times. Pixels are in
[-1, 1], and the head starts at 0. The rate is 0.1 per 256 images. Large batches need 5 epochs
of warmup (774 steps of 8,192, arXiv 1706.02677) and --config.model.zero_init=True. Expected:
near the published 76.1 % top-1 (50), 77.4 (101), 78.3 (152), the V1 weights of torchvision.
Not run here, because the data is not available.

Data: TFDS `imagenet2012`, prepared from the two archives of image-net.org.

Smallest slices: v3:2x2 or v5e:2x2.
"""

import common

from vit_jax.config import parse_arg

DEBUG = common.DEBUG_I1K | dict(variant='50', small=True, res=32, warmup=0)


def get_config(arg=None):
  arg = parse_arg(
    arg,
    debug=DEBUG,
    **common.IMAGENET,
    variant='50',
    # For debugging: two narrow stages.
    small=False,
    batch=256,
    epochs=90.0,
    warmup=0,
  )
  pp = f'decode|inception_crop({arg.res}, 8, 100)|flip_lr|value_range'
  c = common.classifier(arg, 'resnet', pp, loss='softmax')
  c.model.zero_init = False
  if arg.small:
    c.model.update(depths=(1, 1), widths=(32, 64), stem_width=16)

  c.optim = dict(name='sgd', lr=0.1 * arg.batch / 256, momentum=0.9, wd=1e-3)
  # Norms and biases decay too.
  c.optim.wd_rules = [('.*', 1.0)]
  c.optim.schedule = dict(decay='multistep', at=(1 / 3, 2 / 3), warmup=arg.warmup)

  common.evaluate_i1k(c, arg)
  return c
