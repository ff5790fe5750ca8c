"""Layer normalisation; statistics in float32, the variance in two passes."""

import functools

import jax
import jax.numpy as jnp

from vit_jax.kernels import tpu_layer_norm


def layer_norm(
  x: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
  eps: float,
  dtype,
  fused: bool = False,
  turned: bool = False,
) -> jax.Array:
  """Normalises the last axis of x, times `scale`, plus `bias`.

  Args:
    x: [..., D]. scale, bias: [D].
    eps: added to the variance.
    dtype: of the result.
    fused: leave bfloat16 [B, ..., N, D] on a mesh (`jax.set_mesh`) of TPUs to a kernel, which
      has no forward-mode derivative.
    turned: the kernel reads and writes a map [B, H, W, D] as [H, W, B, D], the layout of the
      other kernels of maps; without effect where there is no kernel.

  Returns:
    [..., D] of `dtype`.
  """
  if plan := _plan(x, dtype, fused, turned):
    return tpu_layer_norm.layer_norm(x, scale, bias, eps, plan)
  return (normalise(x, eps) * scale + bias).astype(dtype)


def layer_norm_and_input(
  x: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
  eps: float,
  dtype,
  fused: bool = False,
  turned: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns (`layer_norm`, x), for a residual connection around what reads the former.

  Of the x that is returned, the kernel of the derivative takes the gradient and adds it to
  that of the normalisation, which spares writing and reading the latter.
  """
  if plan := _plan(x, dtype, fused, turned):
    return tpu_layer_norm.layer_norm_and_input(x, scale, bias, eps, plan)
  return layer_norm(x, scale, bias, eps, dtype), x


def _plan(x, dtype, fused, turned):
  return tpu_layer_norm.plan(x, turned) if fused and x.dtype == dtype else None


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
  return _normalise(x, mean, rstd), _tangent(x, mean, rstd, dx)


# Keeps x as it is. A function of its own, so that JAX traces and transposes it once for each
# shape, not for each layer.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _tangent(x, mean, rstd, dx):
  y, dx = _normalise(x, mean, rstd), dx.astype(jnp.float32)
  # The normalised vector has no component along 1 and along itself.
  return (dx - dx.mean(-1, keepdims=True) - y * (dx * y).mean(-1, keepdims=True)) * rstd
