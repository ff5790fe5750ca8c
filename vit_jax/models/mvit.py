"""MViTv2: "Improved Multiscale Vision Transformers", arXiv 2112.01526.

Parameters are those of the published files. The model differs from the authors' code in one
thing: the head starts at zero, as in all models here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.check import Depth, Share
from vit_jax.errors import UserError, choose
from vit_jax.kernels import ATTENDED, place
from vit_jax.kernels.depthwise import depthwise
from vit_jax.models.base import Classifier, Family
from vit_jax.nn.layers import Dense, LayerNorm, MlpBlock, attend_in, check_images
from vit_jax.nn.map_positions import DecomposedPositions
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack
from vit_jax.nn.windows import Windows

# Width and heads of the first stage, and blocks per stage, from Table 1 of the paper and the
# authors' configs. Each further stage doubles width and heads.
VARIANTS = {
  'T': dict(width=96, num_heads=1, depths=(1, 2, 5, 2)),
  'S': dict(width=96, num_heads=1, depths=(1, 2, 11, 2)),
  'B': dict(width=96, num_heads=1, depths=(2, 3, 16, 3)),
  'L': dict(width=144, num_heads=2, depths=(2, 6, 36, 4), expand='mlp'),
  'H': dict(width=192, num_heads=3, depths=(4, 8, 60, 8), classifier='token'),
}
_INIT = nn.initializers.truncated_normal(0.02)
_ZEROS = nn.initializers.zeros_init()
# PyTorch's initial values of convolutions.
_CONV_INIT = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')

_Pair = tuple[int, int]


def variant(name: str) -> dict:
  """Returns the fields of 'T', 'S', 'B', 'L' or 'H'; raises UserError for others."""
  return choose('MViT variant', name, VARIANTS)


@dataclasses.dataclass(frozen=True)
class Step:
  """The plan of a block.

  Attributes:
    grid: (h, w) of the block's input map.
    stride: stride with which queries are pooled, and so the block's output.
    key_stride: stride with which keys and values are pooled.
    num_heads: number of heads.
    attention: channels of the attention's output.
    width: channels of the block's output.
    window: side of the attention windows, in positions of the block's input; 0: no windows.
  """

  grid: tuple[int, int]
  stride: int
  key_stride: int
  num_heads: int
  attention: int
  width: int
  window: int = 0


def _grid_of(grid: _Pair, stride: int) -> _Pair:
  """Returns (h, w) of a map after pooling, rounded up."""
  return tuple(-(-n // stride) for n in grid)


def _on_map(function: Callable, x, grid: _Pair):
  """Applies a function of maps [B, h, w, ...] to the last h w tokens of x [B, N, ...]."""
  others = x.shape[1] - grid[0] * grid[1]
  y = function(x[:, others:].reshape(x.shape[0], *grid, *x.shape[2:]))
  y = y.reshape(y.shape[0], -1, *y.shape[3:])
  return jnp.concatenate([x[:, :others], y], axis=1) if others else y


class Pool(nn.Module):
  """A 3 x 3 depthwise convolution over [B, h, w, M Dh] with the same filters for all heads."""

  num_heads: int
  stride: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    """Returns [B, h / stride, w / stride, M Dh]. Sides are rounded up."""
    head = x.shape[-1] // self.num_heads
    kernel = self.param('kernel', _CONV_INIT, (3, 3, 1, head), jnp.float32)
    kernel = jnp.tile(kernel.astype(self.dtype), self.num_heads)
    return depthwise(x, kernel, self.stride, padding=((1, 1),) * 2)


class PoolingAttention(nn.Module):
  """Attention whose queries, keys and values are pooled, with relative positions.

  The pooled queries are added to the attention's result.

  Attributes:
    width: channels of all heads together, and of the result.
    stride: stride with which queries are pooled.
    key_stride: stride with which keys and values are pooled.
    class_residual: whether the queries of the tokens before the map are added to the result
      too, not only those of the map.
  """

  num_heads: int
  width: int
  stride: int
  key_stride: int
  class_residual: bool
  dtype: jnp.dtype
  kernel_init: Callable

  @nn.compact
  def __call__(self, x, grid: _Pair, window: int = 0):
    """Maps [B, N, D], whose last h w tokens are a map (h, w), to [B, n, width].

    Args:
      window: side of the windows within which the map's tokens attend; 0: no windows. The
        windows are cut after pooling, and the map is padded with zeros. No tokens may
        stand before a map with windows.
    """
    heads = (self.num_heads, self.width // self.num_heads)
    dense = functools.partial(
      Dense, self.width, kernel_init=self.kernel_init, dtype=self.dtype
    )

    def pooled(name, stride):
      y = dense(outputs=heads, name=name)(x)
      pool = Pool(self.num_heads, stride, self.dtype, name=f'pool_{name}')
      y = _on_map(pool, y, grid)
      y = y.reshape(*y.shape[:2], *heads)
      return LayerNorm(self.dtype, name=f'norm_{name}')(y)

    query = pooled('query', self.stride)
    key, value = (pooled(name, self.key_stride) for name in ('key', 'value'))
    grids = _grid_of(grid, self.stride), _grid_of(grid, self.key_stride)
    whole, kinds = query, []
    if window:
      sides = ((window // n,) * 2 for n in (self.stride, self.key_stride))
      kinds = [Windows(map, side) for map, side in zip(grids, sides, strict=True)]
      cut = lambda y, kind: kind.cut(y.reshape(len(y), *kind.map, -1)).reshape(
        -1, kind.window[0] * kind.window[1], *heads
      )
      query, key, value = cut(query, kinds[0]), cut(key, kinds[1]), cut(value, kinds[1])
    positions = DecomposedPositions(name='relative_positions')
    query, key, bias = positions(query, key, *([k.window for k in kinds] or grids))
    y = attend_in(self, query, key, value, bias)
    if kinds:
      y = kinds[0].join(y.reshape(*y.shape[:2], self.width)).reshape(whole.shape)
      query = whole
    others = query.shape[1] - grids[0][0] * grids[0][1]
    if others and not self.class_residual:
      zeros = jnp.zeros_like(query[:, :others])
      query = jnp.concatenate([zeros, query[:, others:]], axis=1)
    y = checkpoint_name((y + query).reshape(*y.shape[:2], self.width), ATTENDED)
    return dense(inputs=heads, name='out')(y)


class Block(nn.Module):
  """Pooling attention and an MLP, both residual. Maps [B, N, C] to [B, n, width].

  If a branch changes the width, its shortcut is a projection of the normalised input.
  """

  class_residual: bool
  mlp_ratio: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, rate=None, *, step: Step, train: bool = False):
    def shortcut(x, normed, width):
      if width == x.shape[-1]:
        return x
      return Dense(width, kernel_init=_INIT, dtype=self.dtype, name='shortcut')(normed)

    drop = lambda y: StochasticDepth()(y, rate, train=train)
    x = place(x)
    y = LayerNorm(self.dtype, name='norm1')(x)
    x = shortcut(x, y, step.attention)
    if step.stride > 1:
      window, strides = (step.stride + 1,) * 2, (step.stride,) * 2
      pool = lambda x: nn.max_pool(x, window, strides, [(1, 1)] * 2)
      x = _on_map(pool, x, step.grid)
    attention = PoolingAttention(
      step.num_heads,
      step.attention,
      step.stride,
      step.key_stride,
      self.class_residual,
      self.dtype,
      kernel_init=_INIT,
      name='attention',
    )
    x = x + drop(attention(y, step.grid, step.window))
    y = LayerNorm(self.dtype, name='norm2')(x)
    mlp = MlpBlock(
      int(step.attention * self.mlp_ratio),
      act='gelu_erf',
      dtype=self.dtype,
      kernel_init=_INIT,
      bias_init=_ZEROS,
      outputs=step.width,
      name='mlp',
    )
    return shortcut(x, y, step.width) + drop(mlp(y))


class Stem(nn.Module):
  """A 7 x 7 convolution with stride 4. Maps [B, H, W, C] to [B, h, w, width]."""

  width: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    return nn.Conv(
      self.width,
      (7, 7),
      (4, 4),
      padding=[(3, 3)] * 2,
      kernel_init=_CONV_INIT,
      dtype=self.dtype,
      name='conv',
    )(x)


class MViT(Classifier):
  """Stages of blocks with pooling attention, and a head.

  Pooling attention downsamples queries, keys and values, each as a map [h, w].

  `width`, `num_heads`, `depths` and more come from `variant`.
  """

  width: int = 96  # channels of the first stage; each later stage has twice as many
  num_heads: int = 1  # heads of the first stage; each later stage has twice as many
  depths: tuple[Depth, ...] = (1, 2, 5, 2)  # blocks per stage
  # The layer that doubles the width: 'attention' in the first block of a stage, or 'mlp' in
  # the last block of the stage before.
  expand: Literal['attention', 'mlp'] = 'attention'
  # Stride of keys and values in the first stage; each further stage halves it.
  kv_stride: int = 4
  mlp_ratio: float = 4.0
  classifier: Literal['gap', 'token'] = 'gap'  # mean of the last map, or a class token
  # Whether the class token's query is added to the attention's result, as the queries of
  # the map are. timm adds it; the authors' code does not.
  class_residual: bool = False
  stochastic_depth: Share = 0.0  # rate of the last block, rising linearly from 0
  # Side of the attention windows in the first stage (56 in detectors); each later stage
  # halves it. The first block of a stage has the windows of the stage before. In all stages
  # but the first, the last block has no windows; there keys and values have twice the
  # stride, except in the last stage (detectron2). None: no windows.
  window: int | None = None
  # For detectors: a norm on the map of each stage instead of one after the last stage.
  map_norms: bool = False

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images of any size. A side that a stride does not divide is rounded up.

    Position tables belong to the size of images for which the parameters were made. For
    other sizes they are resized linearly.

    Returns:
      (logits [B, K] float32, out): named features, 'stem', 'stage1', ... [B, h, w, C],
      'pre_logits' [B, D], the mean of the last stage, or the class token, after the final
      norm.
    """
    check_images(images)
    if self.width % self.num_heads:
      raise UserError(
        f'num_heads={self.num_heads} does not divide the width {self.width}: each head '
        'has width / num_heads channels.'
      )
    if self.window and self.classifier == 'token':
      raise UserError(
        f"window={self.window} does not work with a class token: use classifier='gap'."
      )
    if self.class_residual and self.classifier != 'token':
      raise UserError(
        f"class_residual=True needs classifier='token', not {self.classifier!r}: leave it out."
      )
    out = {}
    out['stem'] = x = Stem(self.width, self.dtype, name='stem')(images)
    B, *grid, C = x.shape
    x = x.reshape(B, -1, C)
    if self.classifier == 'token':
      cls = self.param('cls', _INIT, (1, 1, C), jnp.float32)
      cls = jnp.broadcast_to(cls.astype(x.dtype), (B, 1, C))
      x = jnp.concatenate([cls, x], axis=1)
    rates = depth_rates(self.stochastic_depth, sum(self.depths))
    block = functools.partial(Block, self.class_residual, self.mlp_ratio, self.dtype)
    for s, depth in enumerate(self.depths):
      steps = self._steps(s, tuple(grid))
      x, _ = stack(
        block,
        x,
        name=f'stage{s + 1}_block',
        rates=rates[:depth],
        remat=self.remat,
        train=train,
        more=lambda i, steps=steps: {'step': steps[i]},
      )
      rates = rates[depth:]
      grid = _grid_of(steps[-1].grid, steps[-1].stride)
      tokens = x[:, -grid[0] * grid[1] :]
      norm = LayerNorm(self.dtype, name=f'stage{s + 1}_norm')
      tokens = norm(tokens) if self.map_norms else tokens
      out[f'stage{s + 1}'] = tokens.reshape(B, *grid, -1)
    x = x[:, :1] if self.classifier == 'token' else x
    x = x if self.map_norms else LayerNorm(name='norm')(x)
    x = x.mean(axis=1)
    return self.classify(x, out, features)

  def _steps(self, s: int, grid: tuple[int, int]) -> list[Step]:
    """Returns the plan of each block of stage s (from 0) for an input map (h, w)."""
    depth, heads, width = self.depths[s], self.num_heads << s, self.width << s
    key_stride = max(self.kv_stride >> s, 1)
    first = Step(grid, 2 if s else 1, key_stride, heads, width, width)
    grid = _grid_of(grid, first.stride)
    after = dataclasses.replace(first, grid=grid, stride=1)
    steps = [first] + [after] * (depth - 1)
    if self.window:
      sides = [self.window >> max(s - 1, 0)] + [self.window >> s] * (depth - 1)
      if s:
        sides[-1] = 0
      steps = [
        dataclasses.replace(x, window=n) for x, n in zip(steps, sides, strict=True)
      ]
      if 0 < s < len(self.depths) - 1:
        steps[-1] = dataclasses.replace(steps[-1], key_stride=2 * key_stride)
    if self.expand == 'mlp' and s + 1 < len(self.depths):
      steps[-1] = dataclasses.replace(steps[-1], width=2 * width)
    return steps


_TIMM = {'tiny': 'T', 'small': 'S', 'base': 'B', 'large': 'L'}
_BLOCK = r'stage\d+_block_\d+'

FAMILY = Family(
  model=MViT,
  variant=variant,
  blocks=r'(?P<block>stage(?P<stage>\d+)_block)_(?P<layer>\d+)/.*',
  before=r'stem/.*|cls',
  matrices=(
    (rf'{_BLOCK}/attention/(query|key|value)/kernel', ((-3,), (-2, -1))),
    (rf'{_BLOCK}/attention/out/kernel', ((-3, -2), (-1,))),
    (rf'{_BLOCK}/(mlp/Dense_\d+|shortcut)/kernel', ((-2,), (-1,))),
  ),
  branch_ends=rf'{_BLOCK}/mlp',
  prompts=('pad',),
  stems=('stem/conv/kernel',),
  offsets=rf'{_BLOCK}/attention/relative_positions/(rows|columns)',
  stride=lambda fields: (4 * 2 ** (len(fields['depths']) - 1),) * 2,
  published=(
    (rf'mvitv2_({"|".join(_TIMM)})', lambda size: (_TIMM[size], {})),
    (
      r'mvitv2_(small|base|large)_cls',
      lambda size: (_TIMM[size], {'classifier': 'token', 'expand': 'attention'}),
    ),
    ('mvitv2_huge_cls', lambda: ('H', {})),
  ),
  tiny=(
    dict(width=16, depths=(1, 1)),
    dict(width=16, depths=(1, 1), num_heads=2, expand='mlp', classifier='token'),
  ),
)
