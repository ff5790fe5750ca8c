"""ViTDet's backbone, a ViT in which most blocks attend within windows.

"Exploring Plain Vision Transformer Backbones for Object Detection", arXiv 2203.16527. The
pyramids that the paper builds on it are in `models.sfp`. The image encoder of "Segment
Anything" (SAM), arXiv 2304.02643, is the same with a neck. Parameters have the same names as
in `models.vit`. Initial values differ from the authors' code: they are those of our ViTs.
"""

import functools
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import INT32, Count, Depth, Range, Share
from vit_jax.detection.models.pyramid import ConvNorm
from vit_jax.errors import UserError, choose
from vit_jax.kernels import place
from vit_jax.models.base import Classifier, Family
from vit_jax.nn.layers import (
  ACTIVATIONS,
  LayerNorm,
  LayerScale,
  MlpBlock,
  MultiHeadDotProductAttention,
  PatchEmbedding,
  check_images,
)
from vit_jax.nn.map_positions import DecomposedPositions, ResizedPositions
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack
from vit_jax.nn.windows import Windows

# Width, depth and heads of ViT-B, L and H. The last block of each quarter attends to the
# whole map (section 3 of the paper).
VARIANTS = {'B': (768, 12, 12), 'L': (1024, 24, 16), 'H': (1280, 32, 16)}


def variant(name: str) -> dict:
  """Returns the fields of 'B', 'L' or 'H'; 'B/16' also names the side of a patch."""
  match = re.fullmatch(r'(\w+?)(?:/([1-9]\d*))?', name)
  size, patch = match.groups() if match else (name, None)
  width, depth, num_heads = choose(
    'ViTDet variant', size, VARIANTS, ', and /16 after it'
  )
  return dict(
    patch_size=(int(patch or 16),) * 2,
    width=width,
    depth=depth,
    mlp_dim=4 * width,
    num_heads=num_heads,
    global_blocks=tuple(range(depth // 4 - 1, depth, depth // 4)),
  )


SAM = dict(neck=256, pretrained_size=(1024, 1024), class_row=False)


def _samvit(size: str, small: str | None) -> tuple[str, dict]:
  """Returns (variant, fields) of timm's SAM, or of its small classifier like SAM."""
  fields = dict(absolute=False, neck=0, num_classes=1000) if small else SAM
  return f'{size[0].upper()}/16', {**fields, 'norm_eps': 1e-5}


class Block(nn.Module):
  """x + attention(norm(x)) within windows, then x + mlp(norm(x)), on a map [B, h, w, D]."""

  num_heads: int
  mlp_dim: int
  act: str
  norm_eps: float
  relative: bool
  layer_scale: float | None
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, rate=None, *, windows: Windows, train: bool = False):
    drop = lambda y: StochasticDepth()(y, rate, train=train)
    norm = functools.partial(LayerNorm, self.dtype, self.norm_eps)
    mlp = MlpBlock(self.mlp_dim, act=self.act, dtype=self.dtype, name='MlpBlock_0')
    attention = MultiHeadDotProductAttention(
      self.num_heads, dtype=self.dtype, name='MultiHeadDotProductAttention_0'
    )
    positions = None
    if self.relative:
      positions = functools.partial(
        DecomposedPositions(std=0.0, name='relative_positions'),
        grid=windows.window,
        keys=windows.window,
      )

    def attend(y):
      return windows.join(attention(windows.cut(y), train=train, positions=positions))

    def scale(i, y):
      if self.layer_scale is None:
        return y
      return LayerScale(self.layer_scale, name=f'LayerScale_{i}')(y)

    x = place(x)
    x = x + drop(scale(0, attend(norm(name='LayerNorm_0')(x))))
    return x + drop(scale(1, mlp(norm(name='LayerNorm_1')(x))))


class Encoder(nn.Module):
  """Adds positions, then applies the blocks. There is no norm at the end.

  Attributes:
    block: a function that makes a `Block`.
    rates: stochastic depth rate of each block.
    positions: attributes of `ResizedPositions`. None: no positions are added.
    windows: (h, w) of each block's windows. None: the window is the whole map.
  """

  block: functools.partial
  rates: tuple[float, ...]
  remat: str
  positions: tuple[tuple[int, int], bool, bool] | None
  windows: tuple[tuple[int, int] | None, ...]

  @nn.compact
  def __call__(self, x, *, train: bool = False):
    """Maps [B, h, w, D] to (the last map, {'tokens': ..., 'block00': ..., all maps})."""
    grid = x.shape[1:3]
    if self.positions is not None:
      x = x + ResizedPositions(*self.positions, name='posembed_input')(x)
    tokens = x
    x, blocks = stack(
      self.block,
      x,
      name='encoderblock',
      rates=self.rates,
      remat=self.remat,
      train=train,
      more=lambda i: {'windows': Windows(grid, self.windows[i] or grid)},
    )
    return x, {'tokens': tokens, **blocks}


class ViTDet(Classifier):
  """A ViT for detection. `variant` sets the fields up to `global_blocks`."""

  # None: there is no head, and the output is out['pre_logits'].
  num_classes: Count | None = None
  patch_size: tuple[int, int] = (16, 16)
  width: int = 768
  depth: Depth = 12
  mlp_dim: int = 3072
  num_heads: int = 12
  # Indices of the blocks that attend to the whole map rather than within windows.
  global_blocks: Sequence[Annotated[int, Range(0, 999)]] = (2, 5, 8, 11)
  # Side of the windows. If they do not tile a map, it is padded with zeros.
  window: int = 14
  # Relative positions in attention, see `nn.map_positions`.
  relative: bool = True
  # Absolute positions, added to tokens: a table that is resized to their grid.
  absolute: bool = True
  # Image size (H, W) that the table belongs to, and whether its first row belongs to a class
  # token. Tables from the pre-training of a ViT have that row, which is not used.
  pretrained_size: tuple[int, int] = (224, 224)
  class_row: bool = True
  act: Literal[tuple(ACTIVATIONS)] = 'gelu_erf'
  norm_eps: float = 1e-6
  layer_scale: float | None = None  # initial value, see `models.vit_later.LaterViT`
  # Channels of SAM's neck after the last block: two convolutions, each with a norm. 0: a norm
  # alone. None: neither. Unless it is None, positions are resized with antialiasing, as in timm.
  neck: Annotated[int, Range(0, INT32)] | None = None
  # Rate of the last block. The paper has 0.1 for B, 0.4 for L and 0.5 for H.
  stochastic_depth: Share = 0.0

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Computes maps of images.

    Args:
      images: [B, H, W, C] in [-1, 1]; H and W are multiples of the patch size.
      train: whether to apply stochastic depth, which needs the 'dropout' rng.
      features: whether the caller reads more of `out` than 'pre_logits'.

    Returns:
      (logits [B, K] float32, out). `out` has maps [B, h, w, D]: 'stem'; 'tokens', with
      positions added; 'block00', ...; and 'stage1', ..., the outputs of the blocks that
      attend to the whole map and of the last block; and with a neck 'neck', whose number
      of channels is `neck`, or D if that is 0. 'pre_logits' is the mean of the last map.
    """
    check_images(images)
    blocks = list(self.global_blocks)
    if blocks != sorted({i for i in blocks if 0 <= i < self.depth}):
      raise UserError(
        f'Model field global_blocks={tuple(blocks)}: expected ascending numbers of '
        f'blocks from 0 to {self.depth - 1}.'
      )
    x = PatchEmbedding(self.width, self.patch_size, self.dtype, name='embedding')(
      images
    )
    out = {'stem': x}
    block = functools.partial(
      Block,
      self.num_heads,
      self.mlp_dim,
      self.act,
      self.norm_eps,
      self.relative,
      self.layer_scale,
      self.dtype,
    )
    grid = tuple(
      n // p for n, p in zip(self.pretrained_size, self.patch_size, strict=True)
    )
    window = lambda i: None if i in blocks else (self.window,) * 2
    encoder = Encoder(
      block,
      tuple(depth_rates(self.stochastic_depth, self.depth)),
      self.remat,
      (grid, self.class_row, self.neck is not None) if self.absolute else None,
      tuple(map(window, range(self.depth))),
      name='Transformer',
    )
    x, named = encoder(x, train=train)
    out |= named
    for stage, i in enumerate(sorted({*blocks, self.depth - 1})):
      out[f'stage{stage + 1}'] = named[f'block{i:02d}']
    if self.neck is not None:
      x = out['neck'] = self._neck(x, train)
    return self.classify(x.astype(jnp.float32).mean(axis=(1, 2)), out, features)

  def _neck(self, x, train: bool):
    if self.neck == 0:
      return LayerNorm(name='norm')(x)
    x = ConvNorm(self.neck, 1, 'layer', self.dtype, name='neck_1')(x, train=train)
    return ConvNorm(self.neck, 3, 'layer', self.dtype, name='neck_2')(x, train=train)


_BLOCK = r'Transformer/encoderblock_\d+'

FAMILY = Family(
  model=ViTDet,
  variant=variant,
  published=(
    (r'samvit_(base|large|huge)_patch16(_224)?', _samvit),
    (r'facebook/sam-vit-(base|large|huge)', lambda size: (size[0].upper(), SAM)),
  ),
  blocks=r'(?P<block>Transformer/encoderblock)_(?P<layer>\d+)/.*',
  before=r'embedding/.*|Transformer/posembed_input/.*',
  matrices=(
    (rf'{_BLOCK}/.*/(query|key|value)/kernel', ((-3,), (-2, -1))),
    (rf'{_BLOCK}/MultiHeadDotProductAttention_0/out/kernel', ((-3, -2), (-1,))),
    (rf'{_BLOCK}/MlpBlock_0/Dense_\d+/kernel', ((-2,), (-1,))),
  ),
  branch_ends=rf'{_BLOCK}/MlpBlock_0',
  prompts=('pad',),
  of_weights=('pretrained_size', 'class_row', 'norm_eps'),
  stems=('embedding/kernel',),
  offsets=rf'{_BLOCK}/relative_positions/(rows|columns)',
  patches='embedding/kernel',
  stride=lambda fields: tuple(fields['patch_size']),
  tiny=(
    dict(
      patch_size=(4, 4),
      width=16,
      depth=3,
      mlp_dim=32,
      num_heads=2,
      global_blocks=(0, 2),
      window=3,
      pretrained_size=(16, 16),
      neck=8,
    ),
  ),
)
