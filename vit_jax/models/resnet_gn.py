"""ResNet with GroupNorm and weight standardisation, post-activation (v1).

It is big_vision's `bit`, the ResNet of its ImageNet recipes, and the trunk of hybrids, whose
parameter names it shares. The published BiT files and the ResNets of the ViT paper are
pre-activation: see `bit`.
"""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Depth
from vit_jax.models.base import Classifier, Family
from vit_jax.nn import resnet
from vit_jax.nn.layers import check_images


class ResNetGN(Classifier):
  """A root, stages of bottleneck units with GroupNorm, a mean, a head.

  `blocks` and `width` come from `variant`.
  """

  blocks: tuple[Depth, ...] = (3, 4, 6, 3)  # bottleneck units per stage
  width: int = 64  # channels of the root; stage i has 4 width 2^(i-1) channels

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images.

    Returns:
      (logits [B, K] float32, out): named features, 'stem' and 'stage1', ...
      [B, h, w, C], 'pre_logits' [B, D], the mean of the last stage.
    """
    check_images(images)
    x, stages = resnet.trunk(
      images, self.blocks, self.width, remat=self.remat, dtype=self.dtype
    )
    out = {'stem': stages.pop('root'), **stages}
    x = x.astype(jnp.float32).mean(axis=(1, 2))
    return self.classify(x, out, features)


FAMILY = Family(
  model=ResNetGN,
  variant=resnet.variant,
  blocks=r'(?P<block>block(?P<stage>\d+)/unit)(?P<layer>\d+)/.*',
  before=r'(conv|gn)_root/.*',
  branch_ends=r'block\d+/unit\d+/gn3',
  prompts=('pad',),
  stems=('conv_root/kernel',),
  stride=lambda fields: (resnet.stride(fields['blocks']),) * 2,
  tiny=(dict(blocks=(1, 1), width=32),),
)
