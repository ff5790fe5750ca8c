"""ResNet: "Deep Residual Learning for Image Recognition", arXiv 1512.03385.

With BatchNorm and bottleneck blocks, and the stride in their 3x3 convolution, not in the
first 1x1 (v1.5): the network of torchvision, timm and transformers.
"""

import functools
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Depth, Share
from vit_jax.errors import UserError, choose
from vit_jax.models.family import Classifier, Family
from vit_jax.nn.batch_norm import BatchNorm
from vit_jax.nn.layers import check_images
from vit_jax.nn.resnet import STAGES
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack

_INIT = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')  # arXiv 1502.01852


def variant(name: str) -> dict:
  """Returns the fields of '50', '101', '152', ...; UserError for another name."""
  stages = {str(layers): units for layers, units in STAGES.items()}
  also = ', all of bottleneck blocks'
  return dict(depths=choose('ResNet variant', str(name), stages, also))


def _conv(width: int, size: int, strides: int, dilation: int, dtype, name: str):
  """A convolution without bias that pads both sides alike, as PyTorch does."""
  return nn.Conv(
    width,
    (size, size),
    (strides, strides),
    padding=size // 2 * dilation,
    kernel_dilation=dilation,
    use_bias=False,
    kernel_init=_INIT,
    dtype=dtype,
    name=name,
  )


class Stem(nn.Module):
  """7x7 convolution and max-pool: [B, H, W, C] -> [B, H / 4, W / 4, width]."""

  width: int
  norm: functools.partial
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, *, train: bool):
    x = _conv(self.width, 7, 2, 1, self.dtype, 'conv')(x)
    x = nn.relu(self.norm(name='norm')(x, train=train))
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


class Block(nn.Module):
  """Bottleneck: 1x1, 3x3 and 1x1 convolutions beside a shortcut, ReLU after the sum."""

  width: int
  norm: functools.partial
  zero_init: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, rate=None, *, train: bool = False, strides=1, dilation=1):
    """Maps [B, H, W, C] to [B, H / strides, W / strides, width]."""

    def layer(x, part, width, size=1, strides=1, dilation=1, **options):
      x = _conv(width, size, strides, dilation, self.dtype, f'conv{part}')(x)
      return self.norm(name=f'norm{part}', **options)(x, train=train)

    shortcut = x
    if strides != 1 or x.shape[-1] != self.width:
      shortcut = layer(x, '_proj', self.width, 1, strides)
    y = nn.relu(layer(x, '1', self.width // 4))
    y = nn.relu(layer(y, '2', self.width // 4, 3, strides, dilation))
    y = layer(y, '3', self.width, zero_scale=self.zero_init)
    return nn.relu(shortcut + StochasticDepth()(y, rate, train=train))


class ResNet(Classifier):
  """See `__call__`. `depths` comes from `variant`."""

  depths: tuple[Depth, ...] = (3, 4, 6, 3)  # blocks per stage
  widths: tuple[int, ...] = (256, 512, 1024, 2048)  # channels that leave each stage
  stem_width: int = 64
  # Pixels per position of the last features; stages that would exceed it are dilated
  # instead, as torchvision's and timm's: 16 is the DC5 of detectors.
  output_stride: Literal[4, 8, 16, 32, 64] = 32
  stochastic_depth: Share = 0.0  # rate of the last block; the first has 0, linear
  zero_init: bool = True  # the last norm of a block starts at 0, arXiv 1706.02677, 5.1
  # Running statistics and the norms' scale and bias stay what they are, as in detectors.
  frozen_norm: bool = False

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images of any size, standardised.

    Training normalises by the statistics of the batch, and averages them into the running
    ones where `mutable=['batch_stats']`.

    Returns:
      (logits [B, K] float32, out): named features, 'stem' (after the max-pool), 'stage1',
      ... [B, h, w, C], 'pre_logits' [B, D], the mean of the last stage.
    """
    check_images(images)
    self._check_fields()
    norm = functools.partial(BatchNorm, frozen=self.frozen_norm, dtype=self.dtype)
    out = {}
    x = Stem(self.stem_width, norm, self.dtype, name='stem')(images, train=train)
    out['stem'] = x
    rates = depth_rates(self.stochastic_depth, sum(self.depths))
    stride, dilation = 4, 1
    for s, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
      # A dilated stage begins with the dilation of the stage before.
      first = dict(strides=2 if s else 1, dilation=dilation)
      if s and stride == self.output_stride:
        first['strides'], dilation = 1, 2 * dilation
      stride *= first['strides']
      rest = dict(dilation=dilation)
      x, _ = stack(
        functools.partial(Block, width, norm, self.zero_init, self.dtype),
        x,
        name=f'stage{s + 1}_block',
        rates=rates[:depth],
        remat=self.remat,
        train=train,
        more=lambda i, first=first, rest=rest: rest if i else first,
      )
      rates = rates[depth:]
      out[f'stage{s + 1}'] = x
    x = x.astype(jnp.float32).mean(axis=(1, 2))
    return self.classify(x, out, features)

  def _check_fields(self):
    if not len(self.depths) == len(self.widths) >= 1:
      raise UserError(
        f'depths={self.depths}, widths={self.widths}: expected one of each per stage.'
      )
    if any(width % 4 for width in self.widths):
      raise UserError(
        f'widths={self.widths}: expected multiples of 4, by which bottlenecks narrow.'
      )


def _stride(fields) -> tuple[int, int]:
  return (min(fields['output_stride'], 4 * 2 ** (len(fields['depths']) - 1)),) * 2


_NUMBERS = '|'.join(map(str, STAGES))

FAMILY = Family(
  model=ResNet,
  variant=variant,
  blocks=r'(?P<block>stage(?P<stage>\d+)_block)_(?P<layer>\d+)/.*',
  before=r'stem/.*',
  branch_ends=r'stage\d+_block_\d+/norm3',
  prompts=('pad',),
  stems=('stem/conv/kernel',),
  stride=_stride,
  published=(
    # timm and torchvision: resnet50; transformers: microsoft/resnet-50
    (rf'resnet({_NUMBERS})', lambda layers: (layers, {})),
    (rf'(?:microsoft/)?resnet-({_NUMBERS})', lambda layers: (layers, {})),
  ),
  tiny=(dict(depths=(1, 2), widths=(32, 64), stem_width=16),),
)
