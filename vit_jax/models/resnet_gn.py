"""ResNet with GroupNorm and weight standardisation, post-activation (v1).

big_vision's `bit`, the network of its ImageNet recipes, and the trunk of the hybrids,
whose parameter names it shares. The published BiT files and the ResNets of the ViT paper
are pre-activation: see `bit`.
"""

from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Count, Depth
from vit_jax.models.family import Family
from vit_jax.nn import resnet
from vit_jax.nn.layers import check_images, linear_head
from vit_jax.nn.stack import REMAT


class ResNetGN(nn.Module):
  """See `__call__`. `blocks` and `width` come from `variant`."""

  num_classes: Count | None = 1000  # None: no head, logits are out['pre_logits']
  blocks: tuple[Depth, ...] = (3, 4, 6, 3)  # bottleneck units per stage
  width: int = 64  # of the root; stage i has 4 width 2^(i-1) channels
  head_bias_init: float = 0.0
  remat: Literal[REMAT] = 'none'  # of units, what to recompute: see nn.stack
  # Of the body; pooling, head and all parameters are float32.
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images.

    Args:
      images: [B, H, W, C] in [-1, 1].
      train: nothing here differs in training.
      features: whether the caller reads more of `out` than 'pre_logits'.

    Returns:
      (logits [B, K] float32, out): named features, 'stem' and 'stage1', ...
      [B, h, w, C], 'pre_logits' [B, D], the mean of the last stage.
    """
    check_images(images)
    x, stages = resnet.trunk(
      images, self.blocks, self.width, remat=self.remat, dtype=self.dtype
    )
    out = {'stem': stages.pop('root'), **stages}
    out['pre_logits'] = x = x.astype(jnp.float32).mean(axis=(1, 2))
    x = linear_head(x, self.num_classes, self.head_bias_init)
    return x, out if features else {'pre_logits': out['pre_logits']}


FAMILY = Family(
  model=ResNetGN,
  variant=resnet.variant,
  blocks=r'(?P<block>block(?P<stage>\d+)/unit)(?P<layer>\d+)/.*',
  before=r'(conv|gn)_root/.*',
  branch_ends=r'block\d+/unit\d+/gn3',
  prompts=('pad',),
  stems=('conv_root/kernel',),
  stride=lambda fields: (resnet.stride(fields['blocks']),) * 2,
  any_size=lambda fields: True,
  tiny=(dict(blocks=(1, 1), width=32),),
)
