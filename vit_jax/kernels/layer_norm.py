"""The normalisation of a vector; statistics in float32, the variance in two passes."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def normalise(x, eps: float):
  """(x - mean) / sqrt(var + eps) over the last axis, in float32.

  The derivative is written out: what is derived of the formula reads the activations
  several times more.
  """
  return _normalise(x, *_statistics(x, eps))


def _statistics(x, eps):
  wide = x.astype(jnp.float32)
  mean = wide.mean(-1, keepdims=True)
  centred = wide - mean
  return mean, jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)


def _normalise(x, mean, rstd):
  return (x.astype(jnp.float32) - mean) * rstd


@normalise.defjvp
def _normalise_jvp(eps, primals, tangents):
  (x,), (dx,) = primals, tangents
  mean, rstd = _statistics(x, eps)

  def linear(x, mean, rstd, dx):
    y, dx = _normalise(x, mean, rstd), dx.astype(jnp.float32)
    # The normalised vector has no component along 1 and along itself.
    return (
      dx - dx.mean(-1, keepdims=True) - y * (dx * y).mean(-1, keepdims=True)
    ) * rstd

  linear = jax.checkpoint(linear, prevent_cse=False)  # keeps x as it is
  return _normalise(x, mean, rstd), linear(x, mean, rstd, dx)
