"""Attention that pools the map of its tokens (MViTv2, arXiv 2112.01526, section 4.1)."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.kernels.depthwise import depthwise
from vit_jax.kernels.split_heads import split_heads
from vit_jax.nn.attention import attend_within
from vit_jax.nn.decomposed import DecomposedPositions
from vit_jax.nn.dense import Dense
from vit_jax.nn.layer_norm import LayerNorm
from vit_jax.nn.remat import ATTENDED

Pair = tuple[int, int]
# PyTorch's, of convolutions.
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
  """A depthwise convolution of 3 x 3 over [B, h, w, M Dh], the same for each of M heads."""

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
    width: channels of all heads, and of the result.
    stride, key_stride: by which queries, and by which keys and values, are pooled.
    class_residual: whether the query of a token before the map is added, too.
    fused: whether fused kernels may be used: see `attend`.
  """

  num_heads: int
  width: int
  stride: int
  key_stride: int
  class_residual: bool
  fused: bool
  dtype: jnp.dtype
  kernel_init: Callable

  @nn.compact
  def __call__(self, x, grid: Pair):
    """Maps [B, N, D], the last h w of them a map (h, w), to [B, n, width]."""
    heads = (self.num_heads, self.width // self.num_heads)
    dense = functools.partial(
      Dense, self.width, kernel_init=self.kernel_init, dtype=self.dtype
    )

    def pooled(name, stride):
      y = dense(outputs=heads, name=name)(x)
      pool = Pool(self.num_heads, stride, self.dtype, name=f'pool_{name}')
      y = split_heads(on_map(pool, y, grid), self.num_heads)
      return LayerNorm(self.dtype, fused=self.fused, name=f'norm_{name}')(y)

    query = pooled('query', self.stride)
    key, value = (pooled(name, self.key_stride) for name in ('key', 'value'))
    grids = grid_of(grid, self.stride), grid_of(grid, self.key_stride)
    tokens_first = lambda x: x.swapaxes(1, 2)
    positions = DecomposedPositions(name='relative_positions')
    query, key, bias = positions(tokens_first(query), tokens_first(key), *grids)
    y = attend_within(
      self, query, key, tokens_first(value), bias=bias, fused=self.fused
    )
    others = query.shape[1] - grids[0][0] * grids[0][1]
    if others and not self.class_residual:
      kept = jnp.zeros_like(query[:, :others])
      query = jnp.concatenate([kept, query[:, others:]], axis=1)
    y = checkpoint_name((y + query).reshape(*y.shape[:2], self.width), ATTENDED)
    return dense(inputs=heads, name='out')(y)
