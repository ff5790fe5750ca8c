"""Dense layers, patches, layer normalisation and dropout, as functions of arrays."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from vit_jax.kernels import allows, choose_by_platform, tpus

# -- dense layers -----------------------------------------------------------------------


@jax.custom_jvp
def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
  """Returns x W + b, [..., F], for x [..., D], kernel [D, F] and bias [F], of one dtype.

  On CPUs the gradient of the kernel is a product of two matrices. Contracted over [B, N],
  as JAX derives it, XLA's CPU compiler transposes the activations first, and a step of
  ViT-S takes 1.16 times as long. Flattening to [B N, D] avoids that, but moves every
  element on a TPU, whose arrays are tiled (8, 128). So it is chosen at lowering.
  """
  return _plus(_product(x, kernel), bias)


def _plus(y, bias):
  return y if bias is None else y + bias


def _product(x, kernel):
  return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


@dense.defjvp
def _dense_jvp(primals, tangents):
  (x, kernel, bias), (dx, *dparams) = primals, tangents
  # These products stay visible to the policies of `jax.checkpoint`.
  y = _plus(_product(x, kernel), bias)
  return y, _product(dx, kernel) + _by_params(x, *dparams)


def _flat(x, dkernel, dbias):
  y = x.reshape(-1, x.shape[-1]) @ dkernel
  return _plus(y.reshape(*x.shape[:-1], -1), dbias)


# The tangent by the parameters; their gradients are its transpose.
_by_params = choose_by_platform(
  cpu=_flat, default=lambda x, dkernel, dbias: _plus(_product(x, dkernel), dbias)
)


# -- patches ----------------------------------------------------------------------------


def _convolve(images, kernel, bias):
  numbers = ('NHWC', 'HWIO', 'NHWC')
  y = lax.conv_general_dilated(
    images, kernel, kernel.shape[:2], 'VALID', dimension_numbers=numbers
  )
  return _plus(y, bias)


def _multiply_patches(images, kernel, bias):
  (B, H, W, C), (ph, pw, _, D) = images.shape, kernel.shape
  patches = images.reshape(B, H // ph, ph, W // pw, pw, C).swapaxes(2, 3)
  size = math.prod(kernel.shape[:3])
  return dense(patches.reshape(*patches.shape[:3], size), kernel.reshape(size, D), bias)


# Projects each patch: images [B, H, W, C], kernel [ph, pw, C, D] and bias [D] or None, of one
# dtype, to [B, H / ph, W / pw, D]. On TPUs it is a convolution: to cut images into patches would
# move every pixel, which takes longer than the product. Elsewhere it is a product, because
# the gradient of the convolution is slow on CPUs.
embed = choose_by_platform(tpu=_convolve, default=_multiply_patches)


# -- layer normalisation ----------------------------------------------------------------


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float, dtype):
  """Normalises the last axis of x, times `scale`, plus `bias`.

  Statistics are in float32, the variance in two passes.

  Args:
    x: [..., D].
    scale, bias: [D].
    eps: added to the variance.
    dtype: the dtype of the result, [..., D].
  """
  if x.dtype == dtype == jnp.bfloat16 and x.ndim == 3 and tpus(x.shape[0]) is not None:
    from vit_jax.kernels import tpu_layer_norm

    again = functools.partial(layer_norm, eps=eps, dtype=dtype)
    plan = tpu_layer_norm.plan(x)
    if plan and allows('tpu_layer_norm', again, x, scale, bias):
      return tpu_layer_norm.layer_norm(x, scale, bias, eps, plan)
  return (normalise(x, eps) * scale + bias).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def normalise(x, eps: float):
  """(x - mean) / sqrt(var + eps) over the last axis, in float32.

  The derivative is written out, because the derived one reads the activations several
  times more.
  """
  return _normalise(x, *_statistics(x, eps))


def _statistics(x, eps):
  wide = x.astype(jnp.float32)
  mean = wide.mean(-1, keepdims=True)
  centred = wide - mean
  return mean, lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)


def _normalise(x, mean, rstd):
  return (x.astype(jnp.float32) - mean) * rstd


@normalise.defjvp
def _normalise_jvp(eps, primals, tangents):
  (x,), (dx,) = primals, tangents
  mean, rstd = _statistics(x, eps)
  return _normalise(x, mean, rstd), _normalise_tangent(x, mean, rstd, dx)


# Stores x in its own dtype. One function for all layers is traced once per shape.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _normalise_tangent(x, mean, rstd, dx):
  y, dx = _normalise(x, mean, rstd), dx.astype(jnp.float32)
  # The normalised vector has no component along 1 and along itself.
  return (dx - dx.mean(-1, keepdims=True) - y * (dx * y).mean(-1, keepdims=True)) * rstd


# -- dropout ----------------------------------------------------------------------------


def keep_mask(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
  """Returns bool `shape`, False with probability `rate`, element by element.

  Each element's number is a hash of the key and of its own index: a pure function of
  where it stands in the whole array, whatever the devices that share it, and cheap enough
  to be computed again where it is needed instead of being stored. With Threefry, JAX's
  generator, dropout 0.1 costs a step of ViT-B/16 69 % more cycles on a TPU v5e
  (benchmarks/NOTES.md). Fit for dropout, not for cryptography or for initial values.

  Args:
    key: a random key of any of JAX's generators.
    rate: in [0, 1), met to 2**-32.
    shape: that of the whole array, also where several devices share it.
  """
  return _words(key, shape) >= jnp.uint32(round(rate * 2**32))


def _words(key, shape) -> jax.Array:
  """Returns uint32 `shape`, uniform.

  Every row has a word r, every column two, v and w, and an element is (r ^ v) w: this is
  multiply-shift hashing (Dietzfelbinger et al., "A reliable randomized algorithm for the
  closest-pair problem", 1997). w is odd, so that the product is uniform if r is. The high
  bits, which decide, depend on all bits below. Without v two columns are correlated where
  one's w happens to be a small multiple of the other's.
  """
  seed, step = jax.random.bits(key, (2,), jnp.uint32)
  row = seed
  # Axis by axis: the first ones are few numbers, and no index overflows 32 bits.
  for axis in range(len(shape) - 1):
    part = (*shape[: axis + 1], *(1,) * (len(shape) - axis - 1))
    row = _mix(row ^ _weyl(part, axis, step))
  v = _mix(_weyl(shape[-1:], 0, step))
  return (row ^ v) * (_mix(v) | 1)


def _weyl(shape, axis, step):
  """Returns uint32 `shape`: along `axis` a Weyl sequence, step + index * golden.

  2**32 / golden ratio spreads neighbours over all bits (Steele et al., "Fast splittable
  pseudorandom number generators", 2014).
  """
  golden = jnp.uint32(0x9E3779B9)
  return jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * golden + step


def _mix(x):
  """A bijection of uint32 in which every bit of x reaches every bit.

  lowbias32 of C. Wellons, "Prospecting for hash functions", 2018.
  """
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
