"""ViTDet's backbone: "Exploring Plain Vision Transformer Backbones for Object Detection",
arXiv 2203.16527; the pyramids that the paper builds on its maps are in `models.sfp`.

A ViT most of whose blocks attend within windows. Parameters have the names of a ViT's.
Differs from the authors' code in the initial values, which are those of ViTs here.
"""

import functools
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Count, Depth, Range, Share
from vit_jax.errors import UserError, choose
from vit_jax.kernels import place
from vit_jax.models.family import Family
from vit_jax.nn.layers import (
  ACTIVATIONS,
  LayerNorm,
  MlpBlock,
  MultiHeadDotProductAttention,
  PatchEmbedding,
  check_images,
  linear_head,
)
from vit_jax.nn.map_positions import DecomposedPositions, ResizedPositions
from vit_jax.nn.stack import REMAT, StochasticDepth, depth_rates, stack
from vit_jax.nn.windows import Windows

# Width, depth, heads: those of ViT-B, L and H. The last block of each quarter attends to
# the whole map (section 3 of the paper).
VARIANTS = {'B': (768, 12, 12), 'L': (1024, 24, 16), 'H': (1280, 32, 16)}


def variant(name: str) -> dict:
  """Returns the fields of 'B', 'L', 'H' or 'B/16', whose number is the side of a patch.

  Raises:
    UserError: for another name.
  """
  found = re.fullmatch(r'(\w+?)(?:/([1-9]\d*))?', name)
  size, patch = found.groups() if found else (name, None)
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


class Block(nn.Module):
  """x + attention(norm(x)) within windows, then x + mlp(norm(x)), of a map [B, h, w, D]."""

  num_heads: int
  mlp_dim: int
  act: str
  norm_eps: float
  relative: bool
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

    x = place(x)
    x = x + drop(attend(norm(name='LayerNorm_0')(x)))
    return x + drop(mlp(norm(name='LayerNorm_1')(x)))


class Encoder(nn.Module):
  """Positions, then the blocks; no norm follows.

  Attributes:
    block: makes a `Block`.
    rates: rates of stochastic depth of the blocks.
    positions: of `ResizedPositions`; None: none are added.
    windows: (h, w) of the windows of every block; None: all of the map.
  """

  block: functools.partial
  rates: tuple[float, ...]
  remat: str
  positions: tuple[tuple[int, int], bool] | None
  windows: tuple[tuple[int, int] | None, ...]

  @nn.compact
  def __call__(self, x, *, train: bool = False):
    """Maps [B, h, w, D] to (the same, {'tokens': the same, 'block00': ...})."""
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


class ViTDet(nn.Module):
  """See `__call__`. Fields up to `global_blocks` come from `variant`."""

  num_classes: Count | None = None  # None: no head, outputs are out['pre_logits']
  patch_size: tuple[int, int] = (16, 16)
  width: int = 768
  depth: Depth = 12
  mlp_dim: int = 3072
  num_heads: int = 12
  # Blocks, from 0, that attend to the whole map; the others do within windows.
  global_blocks: Sequence[Annotated[int, Range(0, 999)]] = (2, 5, 8, 11)
  window: int = 14  # side of the windows; what they do not tile is padded with zeros
  relative: bool = True  # positions in attention, see nn.map_positions
  absolute: bool = True  # positions added to tokens, a table resized to their grid
  # Of that table, (H, W) in pixels of the images, and whether its first row is that of a
  # class token, which is not read: as published by pre-training a ViT.
  pretrained_size: tuple[int, int] = (224, 224)
  class_row: bool = True
  act: Literal[tuple(ACTIVATIONS)] = 'gelu_erf'
  norm_eps: float = 1e-6
  stochastic_depth: Share = (
    0.0  # of the last block: 0.1 for B, 0.4 L, 0.5 H in the paper
  )
  head_bias_init: float = 0.0
  remat: Literal[REMAT] = 'none'  # of blocks, what to recompute: see nn.stack
  # Of the body; pooling, head and all parameters are float32.
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Gives the maps of images of any size that patches tile.

    Args:
      images: [B, H, W, C] in [-1, 1].
      train: stochastic depth, which needs the 'dropout' rng.
      features: whether the caller reads more of `out` than 'pre_logits'.

    Returns:
      (logits [B, K] float32, out): named features [B, h, w, D], 'stem', 'tokens'
      with positions added, 'block00', ..., 'stage1', ..., what leaves each block that
      attends to the whole map, and the last; 'pre_logits' [B, D], the mean of that.
    """
    check_images(images)
    last = self._check()
    embedding = PatchEmbedding(
      self.width, self.patch_size, self.dtype, name='embedding'
    )
    x = embedding(images)
    out = {'stem': x}
    block = functools.partial(
      Block,
      self.num_heads,
      self.mlp_dim,
      self.act,
      self.norm_eps,
      self.relative,
      self.dtype,
    )
    grid = tuple(
      n // p for n, p in zip(self.pretrained_size, self.patch_size, strict=True)
    )
    whole = set(self.global_blocks)
    encoder = Encoder(
      block,
      tuple(depth_rates(self.stochastic_depth, self.depth)),
      self.remat,
      (grid, self.class_row) if self.absolute else None,
      tuple(None if i in whole else (self.window,) * 2 for i in range(self.depth)),
      name='Transformer',
    )
    x, blocks = encoder(x, train=train)
    out |= blocks
    for stage, i in enumerate(last):
      out[f'stage{stage + 1}'] = blocks[f'block{i:02d}']
    out['pre_logits'] = x = x.astype(jnp.float32).mean(axis=(1, 2))
    x = linear_head(x, self.num_classes, self.head_bias_init)
    return x, out if features else {'pre_logits': out['pre_logits']}

  def _check(self) -> list[int]:
    """Returns the blocks that end a stage; UserError for some that there are not."""
    blocks = list(self.global_blocks)
    if blocks != sorted({i for i in blocks if type(i) is int and 0 <= i < self.depth}):
      raise UserError(
        f'Model field global_blocks={tuple(blocks)}: expected ascending numbers of blocks '
        f'from 0 to {self.depth - 1}.'
      )
    return sorted({*blocks, self.depth - 1})


_BLOCK = r'Transformer/encoderblock_\d+'

FAMILY = Family(
  model=ViTDet,
  variant=variant,
  blocks=r'(?P<block>Transformer/encoderblock)_(?P<layer>\d+)/.*',
  before=r'embedding/.*|Transformer/posembed_input/.*',
  matrices=(
    (rf'{_BLOCK}/.*/(query|key|value)/kernel', ((-3,), (-2, -1))),
    (rf'{_BLOCK}/MultiHeadDotProductAttention_0/out/kernel', ((-3, -2), (-1,))),
    (rf'{_BLOCK}/MlpBlock_0/Dense_\d+/kernel', ((-2,), (-1,))),
  ),
  branch_ends=rf'{_BLOCK}/MlpBlock_0',
  prompts=('pad',),
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
    ),
  ),
)
