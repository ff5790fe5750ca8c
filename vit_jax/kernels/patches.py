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
  If a device has few images, their rows of patches, [B H / ph, ph, W, C], are convolved
  instead: XLA stores the images of a batch side by side, and a few leave most of a register
  empty. Elsewhere it is a product: on CPUs the convolution's gradient is slow. The choice is
  made when the program is lowered; the mesh tells the generation and a device's images.

  Args:
    kernel: [ph, pw, C, D]; H and W are multiples of ph and pw.
    bias: [D].
  """
  return by_platform(tpu=_on_tpus(images.shape[0]), default=_as_product)(
    images, kernel, bias
  )


# Images a device, from which they are convolved whole. On v5e and v6e rows of patches take fewer
# cycles for 32 images of any size, and more for 64 of 224 pixels (benchmarks/NOTES.md).
_FEW = 64


def _on_tpus(batch):
  """Returns what to embed with; a symbolic batch, of an exported program, may be a few."""
  if (mesh := tpus(batch)) is not None:
    from jax.experimental.pallas import tpu as pltpu

    if pltpu.get_tpu_info().generation < 4:
      return _as_product
    batch //= mesh.shape['data'] * mesh.shape['fsdp']
  few = not isinstance(batch, int) or batch < _FEW
  return _rows_convolved if few else _convolved


def _rows_convolved(images, kernel, bias):
  (B, H, W, C), ph = images.shape, kernel.shape[0]
  y = _convolved(images.reshape(-1, ph, W, C), kernel, bias)
  return y.reshape(B, H // ph, *y.shape[2:])


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
