"""Layer normalisation."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.kernels.layer_norm import normalise
from vit_jax.nn.param import param


class LayerNorm(nn.Module):
  """Normalises the last axis (arXiv 1607.06450); parameters `scale` and `bias` [D].

  eps 1e-6 and the two-pass variance are those with which the published files were
  trained.
  """

  dtype: jnp.dtype = jnp.float32
  eps: float = 1e-6
  scale_init: Callable = nn.initializers.ones_init()

  @nn.compact
  def __call__(self, x):
    """Maps [..., D] to [..., D] of `dtype`."""
    width = x.shape[-1:]
    make = lambda name, init: param(self, name, lambda rng: init(rng, width), width)
    scale = make('scale', self.scale_init)
    bias = make('bias', nn.initializers.zeros_init())
    return (normalise(x, self.eps) * scale + bias).astype(self.dtype)
