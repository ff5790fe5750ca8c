"""Dropout."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.kernels.dropout import keep_mask


class Dropout(nn.Module):
  """As `nn.Dropout` (arXiv 1207.0580), with masks from `kernels.dropout`."""

  rate: float

  @nn.compact
  def __call__(self, x, *, deterministic: bool):
    if deterministic or not self.rate:
      return x
    keep = keep_mask(self.make_rng('dropout'), self.rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1 - self.rate, x.dtype), jnp.zeros_like(x))
