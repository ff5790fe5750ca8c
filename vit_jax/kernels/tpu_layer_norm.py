"""Layer normalisation on TPUs: a kernel for it and one for its derivative.

XLA reads the activations for the mean, again for the variance, and again to normalise them.
It does the first inside the product before the norm and the last inside the product after it,
which slows these products down. Here a grid step holds whole rows and reads them once. The
derivative recomputes the statistics. Statistics are computed in float32, and the variance in
two passes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from vit_jax.kernels import split, tpus

_LANES, _SUBLANES = 128, 8  # The shape of a vector register.
# Maximum bytes of a grid step's arrays; every TPU has at least 16 MiB of on-chip memory.
_BLOCKS = 6 * 2**20
_LONGEST = 4096  # Maximum rows of a grid step, because the loop over them is unrolled.


def plan(x: jax.Array) -> int | None:
  """Returns the number of rows of a grid step for x [B, N, D]; None leaves x to XLA.

  XLA computes other dtypes than bfloat16, few tokens, and channels that do not fill
  registers. It also computes if the mesh (`jax.set_mesh`) is not of TPUs, splits channels,
  or does not divide the batch.
  """
  mesh, (_, tokens, width) = tpus(x.shape[0]), x.shape
  small = tokens < 2 * _SUBLANES or width % _LANES
  if small or mesh is None or mesh.shape['tensor'] > 1:
    return None
  # The derivative holds x, dy and dx, double-buffered, with 2 bytes an element. The factor 4
  # stands for these three arrays and for intermediate results.
  most = min(_LONGEST, _BLOCKS // (4 * 2 * 2 * width))
  if tokens <= most:
    return tokens
  unit = 2 * _SUBLANES  # Rows in a tile of bfloat16.
  parts = -(-tokens // (most // unit * unit or unit))
  return -(-tokens // (parts * unit)) * unit


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
@functools.partial(jax.jit, static_argnames=('eps', 'rows'), inline=True)
def layer_norm(x, scale, bias, eps: float, rows: int):
  """Computes `layers.layer_norm` of x [B, N, D] by the kernel, `rows` rows per grid step.

  Works under any mesh or none. It is differentiable in reverse mode only, because the
  derivative is a kernel too.
  """
  return _call(_forward, (eps,), rows, [x], [scale, bias])[0]


def _fwd(x, scale, bias, eps, rows):
  return layer_norm(x, scale, bias, eps, rows), (x, scale)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _bwd(eps, rows, residuals, dy):
  x, scale = residuals
  dx, *sums = _call(_backward, (eps, x.shape[1]), rows, [x, dy], [scale], sums=2)
  return dx, *(partial.sum((0, 1)) for partial in sums)


layer_norm.defvjp(_fwd, _bwd)


def _call(kernel, static, rows, arrays, vectors, sums: int = 0) -> list:
  """Runs a kernel over images and blocks of rows. Each device runs it on its own images.

  Args:
    arrays: arrays [B, N, D]. The first result has the same shape.
    vectors: arrays [D].
    sums: number of further results, float32 [B, 1, D], sums over an image's blocks.
  """

  def run(*operands):
    batch, tokens, width = operands[0].shape
    block = pl.BlockSpec((1, rows, width), lambda b, i: (b, i, 0))
    vector = pl.BlockSpec((1, width), lambda b, i: (0, 0))
    partial = pl.BlockSpec((1, 1, width), lambda b, i: (b, 0, 0))
    grid = (batch, pl.cdiv(tokens, rows))
    out_shape = [jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)]
    out_shape += [jax.ShapeDtypeStruct((batch, 1, width), jnp.float32)] * sums
    return pl.pallas_call(
      functools.partial(kernel, *static),
      grid=grid,
      in_specs=[block] * len(arrays) + [vector] * len(vectors),
      out_specs=[block] + [partial] * sums,
      out_shape=out_shape,
      cost_estimate=pl.CostEstimate(
        flops=0,  # No work for the matrix units.
        transcendentals=batch * tokens,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *out_shape)),
      ),
      # All blocks of an image add to the same sum.
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('parallel', 'arbitrary')
      ),
      # Read by the benchmark that counts cycles.
      metadata={'grid': 'x'.join(map(str, grid))},
      name=kernel.__name__.strip('_') + '_norm',
    )(*operands)

  images, whole = PartitionSpec(('data', 'fsdp')), PartitionSpec()
  run = split(run, (images,) * len(arrays) + (whole,) * len(vectors))
  return run(*arrays, *(x[None] for x in vectors))


def _statistics(x, eps):
  """Returns (x - mean, 1 / sqrt(var + eps)) of float32 rows."""
  width = x.shape[1]
  centred = x - x.sum(1, keepdims=True) * (1 / width)
  var = (centred * centred).sum(1, keepdims=True) * (1 / width)
  return centred, lax.rsqrt(var + eps)


def _tiles(rows: int, size: int):
  """Yields slices of rows whose float32 values stay in registers, the last one shorter."""
  for start in range(0, rows, size):
    yield slice(start, min(start + size, rows))


def _forward(eps, x_ref, scale_ref, bias_ref, y_ref):
  for tile in _tiles(y_ref.shape[1], 2 * _SUBLANES):
    centred, rstd = _statistics(x_ref[0, tile].astype(jnp.float32), eps)
    y = centred * rstd * scale_ref[...] + bias_ref[...]
    y_ref[0, tile] = y.astype(y_ref.dtype)


def _backward(eps, tokens, x_ref, dy_ref, scale_ref, dx_ref, dscale_ref, dbias_ref):
  scale, (_, rows, width) = scale_ref[...], dx_ref.shape
  several = tokens > rows
  left = tokens - pl.program_id(1) * rows
  # (dscale, dbias) of the tiles of 8 rows, and of a shorter last one.
  whole, rest = [], []
  for tile in _tiles(rows, _SUBLANES):
    x, dy = (ref[0, tile].astype(jnp.float32) for ref in (x_ref, dy_ref))
    # Rows of the last block beyond the last token have arbitrary values.
    if tokens % rows:
      row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
      x, dy = (jnp.where(row < left - tile.start, a, 0.0) for a in (x, dy))
    centred, rstd = _statistics(x, eps)
    y = centred * rstd
    sums = [dy * y, dy]
    if len(x) == _SUBLANES:
      whole = [a + b for a, b in zip(whole, sums, strict=True)] if whole else sums
    else:
      rest = [s.sum(0, keepdims=True) for s in sums]
    dy = dy * scale
    # The derivative has no component along the vector of ones or along y.
    mean = dy.sum(1, keepdims=True) * (1 / width)
    along = (dy * y).sum(1, keepdims=True) * (1 / width)
    dx_ref[0, tile] = ((dy - mean - y * along) * rstd).astype(dx_ref.dtype)
  totals = [s.sum(0, keepdims=True) for s in whole]
  if rest:
    totals = [a + b for a, b in zip(totals, rest, strict=True)] if totals else rest
  for ref, total in zip((dscale_ref, dbias_ref), totals, strict=True):
    if several:
      total += jnp.where(pl.program_id(1) > 0, ref[0], 0.0)
    ref[0] = total
