"""BiT: "Big Transfer (BiT): General Visual Representation Learning", arXiv 1912.11370.

A pre-activation ResNet (v2, arXiv 1603.05027) with GroupNorm and weight standardisation. It
is the model of the published BiT files, and the baseline of the ViT paper. Parameters have
the names of these files, but without the leading `resnet/`, and with Flax's `scale` and
`bias` for `gamma` and `beta`.
"""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Depth
from vit_jax.models.base import Classifier, Family
from vit_jax.nn import resnet
from vit_jax.nn.layers import check_images, group_norm
from vit_jax.nn.resnet import StdConv


def _conv(features, size, strides=1, *, dtype, name='standardized_conv2d'):
  # Pads both sides alike. With a stride, 'SAME' may pad one side more than the other.
  padding = (size - 1) // 2
  return StdConv(features, size, strides, padding, True, dtype, name=name)


def _relu_norm(x, dtype):
  return nn.relu(group_norm(x, 'group_norm', eps=1e-5, dtype=dtype))


class Root(nn.Module):
  """7x7 convolution and max-pool, no norm. Maps [B, H, W, C] to [B, H/4, W/4, width]."""

  width: int
  zero_pad_pool: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    x = _conv(self.width, 7, 2, dtype=self.dtype)(x)
    edge = 0.0 if self.zero_pad_pool else -jnp.inf
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=edge)
    return nn.max_pool(x, (3, 3), strides=(2, 2))


class Projection(nn.Module):
  """The 1x1 convolution of a shortcut between different resolutions or channels."""

  features: int
  strides: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    return _conv(self.features, 1, self.strides, dtype=self.dtype)(x)


class Layer(nn.Module):
  """Norm, ReLU and convolution; if `project` is set, also the projection of the shortcut."""

  features: int
  size: int
  strides: int = 1
  project: tuple[int, int] | None = None  # features, strides
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps [B, H, W, C] to ([B, h, w, features], shortcut)."""
    shortcut, x = x, _relu_norm(x, self.dtype)
    if self.project is not None:
      shortcut = Projection(*self.project, self.dtype, name='proj')(x)
    return _conv(self.features, self.size, self.strides, dtype=self.dtype)(x), shortcut


class Unit(nn.Module):
  """A bottleneck. Norms and ReLUs precede the convolutions; no ReLU follows the sum."""

  mid: int
  strides: int = 1
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x):
    features = 4 * self.mid
    changes = self.strides != 1 or x.shape[-1] != features
    project = (features, self.strides) if changes else None
    y, shortcut = Layer(self.mid, 1, 1, project, self.dtype, name='a')(x)
    y, _ = Layer(self.mid, 3, self.strides, dtype=self.dtype, name='b')(y)
    y, _ = Layer(features, 1, dtype=self.dtype, name='c')(y)
    return shortcut + y


class Stage(nn.Module):
  """Units `unit01`, ...; the first has the stride."""

  units: int
  mid: int
  strides: int
  remat: str
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    RematUnit = resnet.rematerialise(Unit, self.remat)
    for i in range(self.units):
      strides = self.strides if i == 0 else 1
      x = RematUnit(self.mid, strides, self.dtype, name=f'unit{i + 1:02d}')(x)
    return x


class Head(nn.Module):
  """The linear layer, stored as a 1x1 convolution: kernel [1, 1, D, K]."""

  num_classes: int
  bias_init: float

  @nn.compact
  def __call__(self, x):
    return nn.Conv(
      self.num_classes,
      (1, 1),
      kernel_init=nn.initializers.zeros_init(),
      bias_init=nn.initializers.constant(self.bias_init),
      name='conv2d',
    )(x[:, None, None])[:, 0, 0]


class BiT(Classifier):
  """A root, stages of pre-activation units with GroupNorm, a mean, a head.

  `blocks` and `width` come from `variant`.
  """

  blocks: tuple[Depth, ...] = (3, 4, 6, 3)  # bottleneck units per stage
  width: int = 64  # channels of the root; stage i has 4 width 2^(i-1) channels
  # Whether the input of the root's max-pool is padded with zeros, which may exceed its
  # negative values. The published models were trained in this way. big_vision and the
  # models that it trains ignore positions beyond the border.
  zero_pad_pool: bool = True

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images.

    Returns:
      (logits [B, K] float32, out): named features, 'stem' and 'stage1', ...
      [B, h, w, C], 'pre_logits' [B, D], the mean after the last norm and ReLU.
    """
    check_images(images)
    out = {}
    x = Root(self.width, self.zero_pad_pool, self.dtype, name='root_block')(images)
    out['stem'] = x
    for i, units in enumerate(self.blocks):
      mid, strides = self.width * 2**i, 1 if i == 0 else 2
      x = Stage(units, mid, strides, self.remat, self.dtype, name=f'block{i + 1}')(x)
      out[f'stage{i + 1}'] = x
    out['pre_logits'] = x = _relu_norm(x, jnp.float32).mean(axis=(1, 2))
    if self.num_classes is not None:
      x = Head(self.num_classes, self.head_bias_init, name='head')(x)
    return x, out if features else {'pre_logits': out['pre_logits']}


FAMILY = Family(
  model=BiT,
  variant=resnet.variant,
  blocks=r'(?P<block>block(?P<stage>\d+)/unit)(?P<layer>\d+)/.*',
  before=r'root_block/.*',
  branch_ends=r'block\d+/unit\d+/c/standardized_conv2d',
  prompts=('pad',),
  stems=('root_block/standardized_conv2d/kernel',),
  stride=lambda fields: (resnet.stride(fields['blocks']),) * 2,
  published=(
    # timm: resnetv2_50x1_bit; Google: BiT-R50x1, BiT-M-R50x1
    (r'resnetv2_(\d+x\d+)_bit', lambda shape: (f'R{shape}', {})),
    (r'BiT-(?:[SML]-)?(R\d+x\d+)', lambda shape: (shape, {})),
  ),
  tiny=(dict(blocks=(1, 1), width=32),),
)
