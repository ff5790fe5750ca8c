"""Attention that pools the map of its tokens (MViTv2, arXiv 2112.01526, section 4.1)."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.kernels import ATTENDED
from vit_jax.kernels.depthwise import depthwise
from vit_jax.nn.layers import Dense, LayerNorm, attend_in
from vit_jax.nn.map_positions import DecomposedPositions
from vit_jax.nn.windows import Windows

Pair = tuple[int, int]
# PyTorch's initial values of convolutions.
CONV_INIT = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')


def grid_of(grid: Pair, stride: int) -> Pair:
  """Returns (h, w) of a map after pooling, rounded up."""
  return tuple(-(-n // stride) for n in grid)


def on_map(function: Callable, x, grid: Pair):
  """Applies [B, h, w, ...] -> [B, H, W, ...] to the last h w tokens of [B, N, ...]."""
  others = x.shape[1] - grid[0] * grid[1]
  y = function(x[:, others:].reshape(x.shape[0], *grid, *x.shape[2:]))
  y = y.reshape(y.shape[0], -1, *y.shape[3:])
  return jnp.concatenate([x[:, :others], y], axis=1) if others else y


class Pool(nn.Module):
  """A depthwise convolution of 3 x 3 over [B, h, w, M Dh], the same for all M heads."""

  num_heads: int
  stride: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    """Returns [B, h / stride, w / stride, M Dh], sides rounded up."""
    head = x.shape[-1] // self.num_heads
    kernel = self.param('kernel', CONV_INIT, (3, 3, 1, head), jnp.float32)
    kernel = jnp.tile(kernel.astype(self.dtype), self.num_heads)
    return depthwise(x, kernel, self.stride, padding=((1, 1),) * 2)


class PoolingAttention(nn.Module):
  """Attention whose queries, keys and values are pooled, with relative positions.

  The pooled queries are added to what they attend to.

  Attributes:
    width: channels of all heads together, and of the result.
    stride: stride of the pooling of queries.
    key_stride: stride of the pooling of keys and values.
    class_residual: whether the query of a token before the map is added as well.
  """

  num_heads: int
  width: int
  stride: int
  key_stride: int
  class_residual: bool
  dtype: jnp.dtype
  kernel_init: Callable

  @nn.compact
  def __call__(self, x, grid: Pair, window: int = 0):
    """Maps [B, N, D], the last h w of them a map (h, w), to [B, n, width].

    Args:
      window: side of the windows of the map within which tokens attend, cut after pooling
        and padded with zeros; there are no tokens before the map then. 0: none.
    """
    heads = (self.num_heads, self.width // self.num_heads)
    dense = functools.partial(
      Dense, self.width, kernel_init=self.kernel_init, dtype=self.dtype
    )

    def pooled(name, stride):
      y = dense(outputs=heads, name=name)(x)
      pool = Pool(self.num_heads, stride, self.dtype, name=f'pool_{name}')
      y = on_map(pool, y, grid)
      y = y.reshape(*y.shape[:2], *heads)
      return LayerNorm(self.dtype, name=f'norm_{name}')(y)

    query = pooled('query', self.stride)
    key, value = (pooled(name, self.key_stride) for name in ('key', 'value'))
    grids = grid_of(grid, self.stride), grid_of(grid, self.key_stride)
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
