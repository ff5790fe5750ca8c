"""Dense layers, x W + b; how their gradients are computed suits the platform."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from vit_jax.kernels.by_platform import by_platform


@jax.custom_jvp
def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
  """Returns x W + b, [..., F], for x [..., D], kernel [D, F] and bias [F], of one dtype.

  Without a bias (None) it is x W.

  The gradients of the parameters are chosen when the program is lowered:

  On CPUs the kernel's is a product of two matrices. Contracted over [B, N], as it is
  derived, XLA's CPU compiler transposes the activations for it (a step of ViT-S takes
  1.16 times as long). Flattened to [B N, D] it does not; on a TPU, whose arrays are tiled
  (8, 128), flattening 197 tokens moves every element.

  On TPUs the bias's is a product with ones, in bfloat16 with sums in float32: by XLA's
  cost model a tenth of the cycles of a sum over [B, N].
  """
  return _plus(_product(x, kernel), bias)


def _plus(y, bias):
  return y if bias is None else y + bias


def _product(x, kernel):
  return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


@dense.defjvp
def _jvp(primals, tangents):
  (x, kernel, bias), (dx, *dparams) = primals, tangents
  by_params = _by_params_of_bfloat16 if x.dtype == jnp.bfloat16 else _by_params
  # Products in the open, for policies of `jax.checkpoint` to find.
  y = _plus(_product(x, kernel), bias)
  return y, _product(dx, kernel) + by_params(x, *dparams)


def flattened(kernel: jax.Array, shape: tuple[int, int]) -> jax.Array:
  """Returns the kernel, whose axes may be heads and channels of heads, as [D, F].

  It is for what converts it to another dtype. XLA for TPUs does that within the product
  that reads the kernel, but moves it before a reshape, where it would write the converted
  kernel to memory: so the two are kept apart there.
  """
  if kernel.shape == shape:
    return kernel
  # A kernel [D, M, Dh] lies in memory with D last, unless Dh fills the lanes.
  apart = _apart_last_first if kernel.shape[0] == shape[0] else _apart
  return apart(kernel.reshape(shape))


def _only_forward(tpu):
  # The gradient's way stays free: its norm is taken within the product it comes from.
  @jax.custom_jvp
  @functools.partial(jax.jit, inline=True)  # traced once for each shape
  def fn(x):
    return lax.platform_dependent(x, tpu=tpu, default=lambda x: x)

  fn.defjvp(lambda primals, tangents: (fn(*primals), *tangents))
  return fn


_apart = _only_forward(lax.optimization_barrier)
_apart_last_first = _only_forward(lambda x: lax.optimization_barrier(x.T).T)


# What the parameters' tangents add to y's; the gradients are its transposition.


def _plain(x, dkernel, dbias):
  return _plus(_product(x, dkernel), dbias)


def _flat(x, dkernel, dbias):
  y = x.reshape(-1, x.shape[-1]) @ dkernel
  return _plus(y.reshape(*x.shape[:-1], -1), dbias)


def _by_ones(x, dkernel, dbias):
  if dbias is None:
    return _product(x, dkernel)
  rows = 8  # of a tile: one row alone would be made a sum again
  ones = jnp.ones((*x.shape[:-1], rows), x.dtype)
  return _product(x, dkernel) + _product(
    ones, jnp.pad(dbias[None], ((0, rows - 1), (0, 0)))
  )


_by_params = by_platform(cpu=_flat, default=_plain)
_by_params_of_bfloat16 = by_platform(cpu=_flat, default=_plain, tpu=_by_ones)
