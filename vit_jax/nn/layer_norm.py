"""Layer normalisation."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.kernels.layer_norm import layer_norm, layer_norm_and_input
from vit_jax.nn.param import param


class LayerNorm(nn.Module):
  """Normalises the last axis (arXiv 1607.06450); parameters `scale` and `bias` [D].

  eps 1e-6 and the two-pass variance are those with which the published files were
  trained.
  """

  dtype: jnp.dtype = jnp.float32
  eps: float = 1e-6
  scale_init: Callable = nn.initializers.ones_init()
  fused: bool = False  # whether a fused kernel may be used: see `kernels.layer_norm`
  turned: bool = False  # how the kernel reads a map: see there

  @nn.compact
  def __call__(self, x, *, and_input: bool = False):
    """Maps [..., D] to [..., D] of `dtype`; to (that, x) if asked for `and_input`.

    The latter is for a residual connection: see `layer_norm_and_input`.
    """
    width = x.shape[-1:]
    make = lambda name, init: param(self, name, lambda rng: init(rng, width), width)
    scale = make('scale', self.scale_init)
    bias = make('bias', nn.initializers.zeros_init())
    run = layer_norm_and_input if and_input else layer_norm
    return run(x, scale, bias, self.eps, self.dtype, self.fused, self.turned)
