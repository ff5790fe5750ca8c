"""The embedding of patches: a convolution whose stride is its kernel, or one product."""

import math

import jax
from jax import lax

from vit_jax.kernels.by_platform import by_platform
from vit_jax.kernels.dense import dense
from vit_jax.kernels.placement import tpus


def embed(images: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
  """Projects each patch: [B, H, W, C] -> [B, H / ph, W / pw, D], all of one dtype.

  On TPUs it is a convolution: cut into patches, every pixel of the images would move in
  memory, which takes longer than the product; but not on v2 and v3, which have the bandwidth.
  Elsewhere it is a product: on CPUs the convolution's gradient is slow. The choice is made
  when the program is lowered, that of a generation by the mesh.

  Args:
    kernel: [ph, pw, C, D]; H and W are multiples of ph and pw.
    bias: [D].
  """
  on_tpus = _as_product if _before_v4(images.shape[0]) else _convolved
  return by_platform(tpu=on_tpus, default=_as_product)(images, kernel, bias)


def _before_v4(batch: int) -> bool:
  if tpus(batch) is None:
    return False
  from jax.experimental.pallas import tpu as pltpu

  return pltpu.get_tpu_info().generation < 4


def _convolved(images, kernel, bias):
  numbers = ('NHWC', 'HWIO', 'NHWC')
  y = lax.conv_general_dilated(
    images, kernel, kernel.shape[:2], 'VALID', dimension_numbers=numbers
  )
  return y + bias  # whose gradient XLA sums as it copies y's


def _as_product(images, kernel, bias):
  (B, H, W, C), (ph, pw, _, D) = images.shape, kernel.shape
  patches = images.reshape(B, H // ph, ph, W // pw, pw, C).swapaxes(2, 3)
  size = math.prod(kernel.shape[:3])
  return dense(patches.reshape(*patches.shape[:3], size), kernel.reshape(size, D), bias)
