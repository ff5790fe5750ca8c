"""Stochastic depth (Huang et al., arXiv 1603.09382)."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class StochasticDepth(nn.Module):
  """Drops a residual branch per example with probability `rate`, in training.

  Kept branches are divided by 1 - rate, so that evaluation needs no factor (as timm's
  DropPath; the Mixer reference code does not rescale).
  """

  @nn.compact
  def __call__(self, x, rate, *, train: bool = False):
    """x: [B, ...]; rate: float or scalar array in [0, 1), may differ per layer."""
    if not train:
      return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    keep = jax.random.bernoulli(self.make_rng('dropout'), 1.0 - rate, shape)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros_like(x))
