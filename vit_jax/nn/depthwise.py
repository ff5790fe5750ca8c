"""Depthwise convolution as a layer."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.kernels.depthwise import same_and_input
from vit_jax.nn.param import param


class DepthwiseConv(nn.Module):
  """A filter for every channel, plus a bias; zeros surround the map.

  Parameters are those of `nn.Conv`: `kernel` [kh, kw, 1, C] and `bias` [C].
  """

  size: tuple[int, int]  # odd
  dtype: jnp.dtype
  kernel_init: Callable
  fused: bool = False  # whether a kernel may be used: see `kernels.depthwise`

  @nn.compact
  def __call__(self, x):
    """Returns (the convolution, x), both [B, H, W, C]: see `kernels.depthwise`."""
    C = x.shape[-1]
    shape, zeros = (*self.size, 1, C), nn.initializers.zeros_init()
    kernel = param(self, 'kernel', lambda rng: self.kernel_init(rng, shape), shape)
    bias = param(self, 'bias', lambda rng: zeros(rng, (C,)), (C,))
    x, kernel, bias = (a.astype(self.dtype) for a in (x, kernel, bias))
    return same_and_input(x, kernel, bias, self.fused)
