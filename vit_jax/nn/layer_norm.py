"""Layer normalisation with its gradient in closed form."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp


class LayerNorm(nn.Module):
  """Normalises the last axis (arXiv 1607.06450), statistics in float32.

  Parameters are Flax's, `scale` and `bias` [D]; eps 1e-6 and the two-pass variance are
  those with which the published files were trained. The gradient is written out: what
  the compiler derives reads the activations several times more.
  """

  dtype: jnp.dtype = jnp.float32
  eps: float = 1e-6

  @nn.compact
  def __call__(self, x):
    """Maps [..., D] to [..., D] of `dtype`."""
    width = x.shape[-1:]
    scale = self.param('scale', nn.initializers.ones_init(), width, jnp.float32)
    bias = self.param('bias', nn.initializers.zeros_init(), width, jnp.float32)
    return normalise(x, scale, bias, self.eps).astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def normalise(x, scale, bias, eps: float):
  """(x - mean) / sqrt(var + eps) * scale + bias over the last axis, in float32."""
  return _forward(x, scale, bias, eps)[0]


def _forward(x, scale, bias, eps):
  wide = x.astype(jnp.float32)
  mean = wide.mean(-1, keepdims=True)
  centred = wide - mean
  rstd = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)
  return centred * (rstd * scale) + bias, (x, mean, rstd, scale)


def _backward(_, residuals, g):
  x, mean, rstd, scale = residuals
  y = (x.astype(jnp.float32) - mean) * rstd
  gy = g * scale
  # The normalised vector has no component along 1 and along itself.
  along = gy.mean(-1, keepdims=True) + y * (gy * y).mean(-1, keepdims=True)
  rows = tuple(range(x.ndim - 1))
  return ((gy - along) * rstd).astype(x.dtype), (g * y).sum(rows), g.sum(rows)


normalise.defvjp(_forward, _backward)
