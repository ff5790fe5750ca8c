"""ResNet: "Deep Residual Learning for Image Recognition", arXiv 1512.03385.

This is the network of torchvision, timm and transformers (v1.5): it has BatchNorm, and in
bottlenecks the 3x3 convolution has the stride, not the first 1x1 convolution. The letters c,
d, s and t of variants, for deeper stems and averaging shortcuts, are those of
arXiv 1812.01187 and of timm. The ResNets of CLIP (arXiv 2103.00020, section 2.4) average
where others stride, and pool by attention.
"""

import functools
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Depth, Share
from vit_jax.errors import UserError, choose
from vit_jax.models.base import Family, ImageTower
from vit_jax.nn.batch_norm import BatchNorm
from vit_jax.nn.layers import Dense, attend_in, check_images
from vit_jax.nn.resnet import STAGES
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack

# Initial values of arXiv 1502.01852.
_INIT = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')

# {layers: basic blocks per stage} (Table 1 of the paper; 10 layers: timm).
BASIC = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
# {letters in a name of timm: fields}.
LETTERS = {
  '': {},
  'c': dict(deep_stem=(32, 32)),
  'd': dict(deep_stem=(32, 32), avg_down=True),
  's': dict(deep_stem=(64, 64), stem_width=128),
  't': dict(deep_stem=(24, 32), avg_down=True),
}
# CLIP's ResNets: {size: (blocks per stage, channels of the stem, width of the projection)}.
CLIP = {
  '50': ((3, 4, 6, 3), 64, 1024),
  '101': ((3, 4, 23, 3), 64, 512),
  '50x4': ((4, 6, 10, 6), 80, 640),
  '50x16': ((6, 8, 18, 8), 96, 768),
  '50x64': ((3, 15, 36, 10), 128, 1024),
}
HEAD_WIDTH = 64  # channels per head of the attention that pools


def variant(name: str) -> dict:
  """Returns the fields of '18', '50', '101', ...; raises UserError for others."""
  stages = {**BASIC, 14: BASIC[10], **STAGES}
  layers = choose('ResNet variant', str(name), {str(key): key for key in stages})
  basic = dict(block='basic', widths=(64, 128, 256, 512)) if layers in BASIC else {}
  return dict(depths=stages[layers], **basic)


def _conv(width: int, size: int, strides: int, dilation: int, dtype, name: str):
  """A convolution without bias that pads both sides alike, as PyTorch does."""
  options = dict(padding=size // 2 * dilation, kernel_dilation=dilation, use_bias=False)
  options |= dict(kernel_init=_INIT, dtype=dtype, name=name)
  return nn.Conv(width, (size, size), (strides, strides), **options)


def _average(x, size: int):
  """Averages windows of size x size. Those that are not whole are left out."""
  return x if size == 1 else nn.avg_pool(x, (size, size), (size, size))


class Stem(nn.Module):
  """A 7x7 convolution, or several 3x3 convolutions; then a max-pool, or an average.

  Maps [B, H, W, C] to [B, H / 4, W / 4, width].

  Attributes:
    deep: channels of the 3x3 convolutions, except the last one; None: one 7x7 convolution.
  """

  width: int
  deep: tuple[int, ...] | None
  anti_alias: bool
  norm: functools.partial
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, *, train: bool):
    size, stride = 7, 2
    for i, width in enumerate(self.deep or ()):
      x = _conv(width, 3, stride, 1, self.dtype, f'conv{i + 1}')(x)
      x = nn.relu(self.norm(name=f'norm{i + 1}')(x, train=train))
      size, stride = 3, 1
    x = _conv(self.width, size, stride, 1, self.dtype, 'conv')(x)
    x = nn.relu(self.norm(name='norm')(x, train=train))
    if self.anti_alias:
      return _average(x, 2)
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


class Block(nn.Module):
  """Convolutions beside a shortcut, with ReLU after the sum.

  A bottleneck has 1x1, 3x3 and 1x1 convolutions, numbered 1 to 3, with fewer channels inside.
  A basic block has two 3x3 convolutions, numbered 1 and 3, so that the last convolution of
  both kinds has the same name.

  Attributes:
    narrow: channels inside a bottleneck; None: a basic block.
    avg_down: whether the shortcut averages 2x2 pixels; otherwise it drops pixels.
    stride_first: whether the first 1x1 convolution of bottlenecks has the stride.
    anti_alias: whether bottlenecks and their shortcuts average instead of striding.
  """

  width: int
  narrow: int | None
  avg_down: bool
  stride_first: bool
  anti_alias: bool
  norm: functools.partial
  zero_init: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, rate=None, *, train: bool = False, strides=1, dilation=(1, 1)):
    """Maps [B, H, W, C] to [B, H / strides, W / strides, width].

    Args:
      dilation: dilation of the first 3x3 convolution, and of the second if there is one.
    """

    def layer(x, part, width, size=1, strides=1, dilation=1, **options):
      x = _conv(width, size, strides, dilation, self.dtype, f'conv{part}')(x)
      return self.norm(name=f'norm{part}', **options)(x, train=train)

    shortcut, last = x, dict(zero_scale=self.zero_init)
    project = strides != 1 or x.shape[-1] != self.width
    # The side of the windows that are averaged in place of a stride.
    window, strides = (strides, 1) if self.anti_alias else (1, strides)
    if project:
      step = strides
      if self.avg_down and (strides, dilation[1]) != (1, 1):
        step = 1
        # In a dilated stage, timm counts the zeros beyond the border in the average.
        zeros = dict(padding='SAME', count_include_pad=strides == 1)
        shortcut = nn.avg_pool(x, (2, 2), (strides, strides), **zeros)
      shortcut = layer(_average(shortcut, window), '_proj', self.width, 1, step)
    if self.narrow is None:
      y = nn.relu(layer(x, '1', self.width, 3, strides, dilation[0]))
      y = layer(y, '3', self.width, 3, 1, dilation[1], **last)
    else:
      first, second = (strides, 1) if self.stride_first else (1, strides)
      y = nn.relu(layer(x, '1', self.narrow, 1, first))
      y = nn.relu(layer(y, '2', self.narrow, 3, second, dilation[0]))
      y = layer(_average(y, window), '3', self.width, **last)
    return nn.relu(shortcut + StochasticDepth()(y, rate, train=train))


class AttentionPool(nn.Module):
  """Attention of the mean position to itself and to all positions of a map (CLIP).

  Maps [B, h, w, D] to [B, D], the heads' outputs side by side. The model's head is the last
  projection. All is in float32.
  """

  @nn.compact
  def __call__(self, x):
    B, h, w, D = x.shape
    x = x.reshape(B, h * w, D)
    x = jnp.concatenate([x.mean(axis=1, keepdims=True), x], axis=1)
    init = nn.initializers.normal(D**-0.5)
    x = x + self.param('pos_embedding', init, (1, 1 + h * w, D))
    heads = (D // HEAD_WIDTH, HEAD_WIDTH)

    def project(x, name):
      dense = Dense(D, outputs=heads, kernel_init=init, name=name)
      return dense(x).reshape(B, -1, *heads)

    key, value = project(x, 'key'), project(x, 'value')
    y = attend_in(self, project(x[:, :1], 'query'), key, value)
    return y.reshape(B, D)


class ResNet(ImageTower):
  """A stem, stages of residual blocks with BatchNorm, pooling, a head.

  `depths` comes from `variant`.
  """

  depths: tuple[Depth, ...] = (3, 4, 6, 3)  # blocks per stage
  widths: tuple[int, ...] = (256, 512, 1024, 2048)  # output channels per stage
  stem_width: int = 64
  # Channels of the stem's 3x3 convolutions, except the last one (arXiv 1812.01187); None:
  # one 7x7 convolution.
  deep_stem: tuple[int, int] | None = None
  block: Literal['bottleneck', 'basic'] = 'bottleneck'
  # Channels inside the bottlenecks of each stage; None: a quarter of `widths`.
  narrow: tuple[int, ...] | None = None
  # whether shortcuts average 2x2 pixels (ResNet-D, arXiv 1812.01187)
  avg_down: bool = False
  # Pixels per position of the last features. A stage that would exceed it is dilated instead
  # of strided, as in torchvision and timm. 16 is called DC5 in detectors.
  output_stride: Literal[4, 8, 16, 32, 64] = 32
  # Whether the first 1x1 convolution of bottlenecks has the stride, as in the paper and in
  # detectron2.
  stride_first: bool = False
  # Whether the first block of a dilated stage has that stage's dilation (detectron2) or the
  # dilation of the stage before (torchvision, timm).
  dilate_first: bool = False
  # Whether averages of 2x2 pixels replace the max-pool and the strides of bottlenecks and
  # shortcuts, as in CLIP (after arXiv 1904.11486).
  anti_alias: bool = False
  pool: Literal['mean', 'attention'] = 'mean'  # attention: as in CLIP, in heads of 64
  stochastic_depth: Share = 0.0  # rate of the last block, rising linearly from 0
  # whether the last norm of a block starts at 0 (arXiv 1706.02677, 5.1)
  zero_init: bool = True
  # Whether the norms' running statistics, scale and bias never change, as in detectors.
  frozen_norm: bool = False
  norm_eps: float = 1e-5  # 0 in the first detectors that torchvision published

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies standardised images of any size.

    Training normalises by the statistics of the batch. It averages them into the running
    statistics if the call has `mutable=['batch_stats']`.

    Returns:
      (logits [B, K] float32, out): named features, 'stem' (after the pooling), 'stage1',
      ... [B, h, w, C], 'pre_logits' [B, D], the pooled last stage.
    """
    check_images(images)
    if not len(self.depths) == len(self.widths) >= 1:
      raise UserError(
        f'depths={self.depths}, widths={self.widths}: expected one depth and one width '
        'per stage.'
      )
    narrow = self.narrow or tuple(width // 4 for width in self.widths)
    odd = not self.narrow and any(width % 4 for width in self.widths)
    if self.block == 'bottleneck' and (odd or len(narrow) != len(self.widths)):
      raise UserError(
        f'widths={self.widths}, narrow={self.narrow}: expected widths that are multiples '
        'of 4, or as many numbers in narrow.'
      )
    if self.anti_alias and (
      self.block == 'basic' or self.avg_down or self.stride_first
    ):
      raise UserError(
        'anti_alias=True is for bottlenecks: leave out block, avg_down and stride_first.'
      )
    if self.pool == 'attention' and self.widths[-1] % HEAD_WIDTH:
      raise UserError(
        f"widths={self.widths}: pool='attention' needs a last width that is a multiple of "
        f'{HEAD_WIDTH}.'
      )
    norm = functools.partial(
      BatchNorm, frozen=self.frozen_norm, eps=self.norm_eps, dtype=self.dtype
    )
    shared = dict(anti_alias=self.anti_alias, norm=norm, dtype=self.dtype)
    stem = Stem(self.stem_width, self.deep_stem, **shared, name='stem')
    x = stem(images, train=train)
    out = {'stem': x}
    rates = depth_rates(self.stochastic_depth, sum(self.depths))
    stride, dilation = 4, 1
    stages = zip(self.depths, self.widths, narrow, strict=True)
    for s, (depth, width, inner) in enumerate(stages):
      # A dilated stage begins with the dilation of the stage before it.
      strides, before = 2 if s else 1, dilation
      if s and stride == self.output_stride:
        strides, dilation = 1, 2 * dilation
        before = dilation if self.dilate_first else before
      stride *= strides
      first = dict(strides=strides, dilation=(before, dilation))
      rest = [dict(dilation=(dilation, dilation))] * (depth - 1)
      block = functools.partial(
        Block,
        width=width,
        narrow=inner if self.block == 'bottleneck' else None,
        avg_down=self.avg_down,
        stride_first=self.stride_first,
        zero_init=self.zero_init,
        **shared,
      )
      options = dict(rates=rates[:depth], remat=self.remat, train=train)
      more = [first, *rest].__getitem__
      x, _ = stack(block, x, name=f'stage{s + 1}_block', more=more, **options)
      rates = rates[depth:]
      out[f'stage{s + 1}'] = x
    x = x.astype(jnp.float32)
    if self.pool == 'attention':
      x = AttentionPool(name='attention_pool')(x)
    else:
      x = x.mean(axis=(1, 2))
    return self.classify(x, out, features)


_named = lambda layers, letter='': (layers, LETTERS[letter])


def clip_widths(stem_width: int) -> dict:
  """Returns the fields of CLIP's ResNets that follow from the width of the stem."""
  widths = tuple(4 * stem_width * 2**s for s in range(4))
  deep = (stem_width // 2,) * 2
  return dict(stem_width=stem_width, widths=widths, deep_stem=deep, anti_alias=True)


def _clip(size: str, gap: str | None = None):
  """Returns (None, fields) of CLIP's ResNet of a size; with `gap`, it pools by a mean."""
  depths, stem_width, outputs = CLIP[size]
  fields = dict(depths=depths, **clip_widths(stem_width))
  head = dict(pool='attention', num_classes=outputs)
  return None, fields | (dict(num_classes=None) if gap else head)


_NUMBERS = '|'.join(map(str, (18, 34, *STAGES)))

_TINY = dict(depths=(1, 2), widths=(16, 32), stem_width=16)

FAMILY = Family(
  model=ResNet,
  variant=variant,
  blocks=r'(?P<block>stage(?P<stage>\d+)_block)_(?P<layer>\d+)/.*',
  before=r'stem/.*',
  branch_ends=r'stage\d+_block_\d+/norm3',
  prompts=('pad',),
  stems=('stem/conv1/kernel', 'stem/conv/kernel'),
  positions=(('attention_pool/pos_embedding', 'hw'),),
  stride=lambda x: (min(x['output_stride'], 4 * 2 ** (len(x['depths']) - 1)),) * 2,
  any_size=lambda x: x['pool'] == 'mean',
  published=(
    # timm and torchvision: resnet50, wide_resnet50_2; transformers: microsoft/resnet-50
    (rf'resnet({_NUMBERS})(d?)', _named),
    (r'resnet(50|101|152)([cs])', _named),
    (r'resnet(10|14|26|50)(t)', _named),
    (
      r'wide_resnet(50|101)_2',
      lambda layers: (layers, {'narrow': (128, 256, 512, 1024)}),
    ),
    (rf'(?:microsoft/)?resnet-({_NUMBERS})', _named),
    # timm and open_clip: resnet50x4_clip, RN50x4
    (rf'resnet({"|".join(CLIP)})_clip(_gap)?', _clip),
    (rf'RN({"|".join(CLIP)})(?:-quickgelu)?', _clip),
  ),
  tiny=(
    _TINY | dict(widths=(32, 64)),
    _TINY | dict(block='basic', deep_stem=(8, 8), avg_down=True),
    _TINY | dict(widths=(32, 64), deep_stem=(8, 8), anti_alias=True, pool='attention'),
  ),
)
