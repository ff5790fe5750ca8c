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

  On CPUs the gradient of the kernel is a product of two matrices, with inputs flattened to
  [B N, D]. JAX's own gradient sums over the two axes [B, N]. For it XLA's CPU compiler
  transposes the activations, and a step of ViT-S takes 1.16 times as long. On TPUs, whose
  arrays have tiles of (8, 128), flattening would move every element, so they keep JAX's
  gradient.
  """
  return _plus(_product(x, kernel), bias)


def _plus(y, bias):
  return y if bias is None else y + bias


def _product(x, kernel):
  return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


@dense.defjvp
def _dense_jvp(primals, tangents):
  (x, kernel, bias), (dx, *dparams) = primals, tangents
  # The product is outside of `choose_by_platform`, so that policies of `jax.checkpoint` see
  # it.
  y = _plus(_product(x, kernel), bias)
  return y, _product(dx, kernel) + _by_params(x, *dparams)


def _flat(x, dkernel, dbias):
  y = x.reshape(-1, x.shape[-1]) @ dkernel
  return _plus(y.reshape(*x.shape[:-1], -1), dbias)


# The tangent with respect to the parameters. Its transpose gives the parameters' gradients.
_by_params = choose_by_platform(
  cpu=_flat, default=lambda x, dkernel, dbias: _plus(_product(x, dkernel), dbias)
)


# -- patches ----------------------------------------------------------------------------


def _convolve(images, kernel, bias):
  (B, H, W, C), (ph, pw, _, D) = images.shape, kernel.shape
  if pw * C >= 32:
    images = images.reshape(B, H, W // pw, pw * C)
    kernel = kernel.reshape(ph, 1, pw * C, D)
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


# Projects each patch of images [B, H, W, C] and returns [B, H / ph, W / pw, D]. The kernel is
# [ph, pw, C, D] and the bias [D] or None, all of one dtype. On TPUs it is a convolution,
# because to cut images into patches would move every pixel. Its channels are the rows of a
# patch, because three colours would fill 3 of the 128 rows of a matrix unit; rows of 4 or 8
# pixels take longer to make than they save (benchmarks/NOTES.md). Elsewhere it is a product,
# because CPUs are slow to differentiate a convolution.
embed = choose_by_platform(tpu=_convolve, default=_multiply_patches)


# -- layer normalisation ----------------------------------------------------------------


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float, dtype):
  """Normalises the last axis of x, then multiplies by `scale` and adds `bias`.

  Statistics are computed in float32, and the variance in two passes.

  Args:
    x: [..., D].
    scale, bias: [D].
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
  """Returns (x - mean) / sqrt(var + eps) over the last axis, in float32.

  The derivative is written out, because JAX's own would read the activations several times
  more.
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


# The backward pass stores x in its own dtype. All layers share this one function, so that
# it is traced once per shape.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _normalise_tangent(x, mean, rstd, dx):
  y, dx = _normalise(x, mean, rstd), dx.astype(jnp.float32)
  # The result has no component along the vector of ones or along y.
  return (dx - dx.mean(-1, keepdims=True) - y * (dx * y).mean(-1, keepdims=True)) * rstd


# -- dropout ----------------------------------------------------------------------------


def keep_mask(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
  """Returns a random bool array in which each element is False with probability `rate`.

  An element is decided by a hash of the key and of its index in the whole array. The mask
  therefore does not depend on how devices share the array. The hash is so cheap that the
  backward pass computes the mask again instead of storing it. With Threefry, JAX's own
  generator, dropout 0.1 would cost a step of ViT-B/16 69 % more cycles on a TPU v5e
  (benchmarks/NOTES.md). Use it for dropout, not for cryptography or initial values.

  Args:
    key: a random key of any of JAX's generators.
    rate: in [0, 1). It is exact to 2**-32.
    shape: the shape of the whole array, even if several devices share it.
  """
  return _words(key, shape) >= jnp.uint32(round(rate * 2**32))


def _words(key, shape) -> jax.Array:
  """Returns uniformly distributed uint32 numbers of a shape.

  This is multiply-shift hashing (Dietzfelbinger et al., "A reliable randomized algorithm for
  the closest-pair problem", 1997). Every row has a random word r, and every column has two, v
  and w. An element is (r ^ v) w. w is odd, so that the product is uniform if r is. The high
  bits, which decide about an element, depend on all lower bits. Without v, two columns would
  be correlated if the w of one happened to be a small multiple of the other's.
  """
  seed, step = jax.random.bits(key, (2,), jnp.uint32)
  row = seed
  # Hash axis by axis: the first axes have few numbers, and no index overflows 32 bits.
  for axis in range(len(shape) - 1):
    part = (*shape[: axis + 1], *(1,) * (len(shape) - axis - 1))
    row = _mix(row ^ _weyl(part, axis, step))
  v = _mix(_weyl(shape[-1:], 0, step))
  return (row ^ v) * (_mix(v) | 1)


def _weyl(shape, axis, step):
  """Returns a uint32 array with a Weyl sequence, step + index * golden, along `axis`.

  `golden` is 2**32 / golden ratio, which makes neighbours differ in all bits (Steele et al.,
  "Fast splittable pseudorandom number generators", 2014).
  """
  golden = jnp.uint32(0x9E3779B9)
  return jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * golden + step


def _mix(x):
  """A bijection of uint32 in which every bit of x affects every bit of the result.

  lowbias32 of C. Wellons, "Prospecting for hash functions", 2018.
  """
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
