"""Depthwise convolution: one filter per channel."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from vit_jax.kernels import CONVOLVED, choose_by_platform

# If an image has fewer elements than this, CPUs use XLA's convolution too. It takes less
# than a millisecond per image, and many shifted products would take longer to compile.
SMALL = 4096
# Number of products per step of the kernel's gradient. More take longer to compile; with
# fewer, the sum is written to memory more often.
BLOCK = 28


def depthwise(x: jax.Array, kernel: jax.Array, stride: int, padding) -> jax.Array:
  """Convolves every channel with its own filter. Maps [B, H, W, C] to [B, h, w, C].

  It is `lax.conv_general_dilated` except on CPUs, where XLA runs that as a slow loop. CPUs
  add shifted maps instead. For a 7 x 7 convolution the sum of 49 maps takes less than a
  twentieth of the time, and its gradients less than a tenth.

  Args:
    kernel: [kh, kw, 1, C], in the dtype of x.
    stride: step along rows and columns.
    padding: ((top, bottom), (left, right)), rows and columns of zeros.

  Returns:
    [B, h, w, C] in the dtype of x, with h = (H + top + bottom - kh) // stride + 1 and w in
    the same way. CPUs sum in float32 or wider.
  """
  if math.prod(x.shape[1:]) < SMALL:
    return _plain(x, kernel, stride, padding)
  y = _depthwise(x, kernel, stride, tuple(map(tuple, padding)))
  return checkpoint_name(y, CONVOLVED)


def _plain(x, kernel, stride, padding):
  return lax.conv_general_dilated(
    x,
    kernel,
    (stride,) * 2,
    padding,
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    feature_group_count=x.shape[-1],
  )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _depthwise(x, kernel, stride, padding):
  return lax.platform_dependent(x, kernel, **_branches(_add_shifted, stride, padding))


def _branches(on_cpus, stride, padding):
  bound = lambda f: functools.partial(f, stride=stride, padding=padding)
  return {'cpu': bound(on_cpus), 'default': bound(_plain)}


# Made once for all layers, see `choose_by_platform`.
@functools.cache
def _choose(on_cpus, stride, padding):
  return choose_by_platform(**_branches(on_cpus, stride, padding))


@_depthwise.defjvp
def _jvp(stride, padding, primals, tangents):
  (x, kernel), (dx, dkernel) = primals, tangents
  by_input, by_kernel = (
    _choose(f, stride, padding) for f in (_tangent_by_input, _tangent_by_kernel)
  )
  y = _depthwise(x, kernel, stride, padding)
  return y, by_input(dx, kernel) + by_kernel(x, dkernel)


# The derivatives on CPUs. Each gradient is written out, and the tangent is defined as its
# transpose. Reverse mode transposes the tangent again, and so computes the gradient as
# written. These functions are traced once per shape, not once per layer, because tracing
# takes longer than XLA's compilation.
_traced_once = functools.partial(jax.jit, static_argnames=('stride', 'padding'))


@_traced_once
def _tangent_by_input(dx, kernel, stride, padding):
  gradient = lambda dy: _input_gradient(dy, kernel, dx.shape, stride, padding)
  dy = jax.eval_shape(lambda: _plain(dx, kernel, stride, padding))
  return jax.linear_transpose(gradient, dy)(dx)[0]


@_traced_once
def _tangent_by_kernel(x, dkernel, stride, padding):
  gradient = lambda dy: _kernel_gradient(x, dy, dkernel.shape[:2], stride, padding)
  dy = jax.eval_shape(lambda: _plain(x, dkernel, stride, padding))
  # In a `shard_map`, the kernel may be replicated, but its gradient varies over devices.
  dkernel += jnp.zeros_like(x[0, :1, :1])
  return jax.linear_transpose(gradient, dy)(dkernel)[0]


@_traced_once
def _add_shifted(x, kernel, stride, padding):
  """The convolution as a sum of shifted maps, which XLA fuses into one loop."""
  x = _pad(x, padding)
  kh, kw = kernel.shape[:2]
  h, w = ((n - k) // stride + 1 for n, k in zip(x.shape[1:3], (kh, kw), strict=True))
  rows, columns = (stride * (n - 1) + 1 for n in (h, w))
  sum_ = 0.0
  for i in range(kh):
    for j in range(kw):
      part = x[:, i : i + rows : stride, j : j + columns : stride]
      sum_ += _wide(part) * _wide(kernel[i, j, 0])
  return sum_.astype(x.dtype)


def _input_gradient(dy, kernel, shape, stride, padding):
  """Returns the gradient of x [B, H, W, C]: dilated dy, convolved with the rotated kernel."""
  edges = [
    (k - 1 - low, n + low - stride * (m - 1) - 1, stride - 1)
    for n, m, k, (low, _) in zip(
      shape[1:3], dy.shape[1:3], kernel.shape[:2], padding, strict=True
    )
  ]
  dy = lax.pad(dy, jnp.zeros((), dy.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
  return _add_shifted(dy, kernel[::-1, ::-1], 1, ((0, 0),) * 2)


def _kernel_gradient(x, dy, size, stride, padding):
  """Returns the kernel's gradient [kh, kw, 1, C]: windows of x times dy, summed by blocks."""
  B, h, w, C = dy.shape
  kh, kw = size
  width = -(-w // -(-w // BLOCK))
  height = min(h, max(1, BLOCK // width))
  rows, columns = -(-h // height), -(-w // width)  # blocks down and across
  ends = rows * height, columns * width
  dy = _pad(dy, ((0, ends[0] - h), (0, ends[1] - w)))
  dy = dy.reshape(B, rows, height, columns, width, C)
  dy = dy.transpose(1, 3, 0, 2, 4, 5).reshape(-1, B, height, width, C)
  # Blocks may reach beyond the map, where dy is 0.
  more = (
    (low, max(high, stride * (end - 1) + k - n - low))
    for n, end, k, (low, high) in zip(x.shape[1:3], ends, size, padding, strict=True)
  )
  x = _pad(x, tuple(more))

  # Stores no windows for the backward pass.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def step(sums, block):
    dy, n = block
    at = stride * height * (n // columns), stride * width * (n % columns)
    extent = (stride * (height - 1) + kh, stride * (width - 1) + kw)
    windows = lax.dynamic_slice(x, (0, *at, 0), (B, *extent, C))
    for i in range(height):
      for j in range(width):
        window = windows[:, stride * i :, stride * j :][:, :kh, :kw]
        sums += _wide(window) * _wide(dy[:, i, None, j, None])
    return sums, None

  # Made of x, so that in a `shard_map` it is split like x.
  sums = jnp.zeros_like(_wide(x[:, :kh, :kw]))
  sums, _ = lax.scan(step, sums, (dy, jnp.arange(rows * columns)))
  return sums.sum(0)[:, :, None].astype(x.dtype)


def _pad(x, padding):
  return jnp.pad(x, ((0, 0), *padding, (0, 0)))


def _wide(x):
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
