"""Convolution with weight standardisation (Qiao et al., arXiv 1903.10520)."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class StdConv(nn.Module):
  """A convolution without bias whose kernel has mean 0 and deviation 1 per output.

  Its one parameter is `kernel` [kh, kw, C, features] in float32, standardised in
  float32 at every call. The two reference codes guard the division differently, and a
  published file agrees only with its own: w / (std + 1e-5) in the hybrids and in
  `resnet_gn`, w / sqrt(var + 1e-10) in the published BiT (`eps_in_root`).
  """

  features: int
  kernel_size: int
  strides: int = 1
  padding: str | int = 'SAME'  # a number: so many zeros on each side
  eps_in_root: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps [B, H, W, C] to [B, h, w, features] of `dtype`."""
    size = (self.kernel_size, self.kernel_size)
    kernel = self.param(
      'kernel',
      nn.initializers.lecun_normal(),
      (*size, x.shape[-1], self.features),
      jnp.float32,
    )
    padding = self.padding
    if not isinstance(padding, str):
      padding = [(padding, padding)] * 2
    return jax.lax.conv_general_dilated(
      x.astype(self.dtype),
      standardise(kernel, eps_in_root=self.eps_in_root).astype(self.dtype),
      window_strides=(self.strides, self.strides),
      padding=padding,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )


def standardise(kernel, *, eps_in_root: bool = False):
  """Returns the kernel [kh, kw, C, K] with mean 0 and deviation 1 over (kh, kw, C)."""
  centred = kernel - kernel.mean((0, 1, 2), keepdims=True)
  variance = (centred * centred).mean((0, 1, 2), keepdims=True)
  if eps_in_root:
    return centred * jax.lax.rsqrt(variance + 1e-10)
  # A constant kernel, pruned or decayed to zero, must not have an infinite gradient.
  return centred / (jnp.sqrt(jnp.maximum(variance, 1e-30)) + 1e-5)
