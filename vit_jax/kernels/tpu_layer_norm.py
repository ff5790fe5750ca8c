"""Layer normalisation on TPUs: a kernel for it and one for its derivative.

What XLA makes of it reads the activations once for the mean, again for the variance and
again to normalise them, the first and the last within the products before and after,
which that slows down. Here a step of the grid holds some rows whole, reads them once, and
the derivative computes the statistics again and adds the gradient of the residual
connection. Statistics are in float32, the variance in two passes. benchmarks/NOTES.md has
what it costs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vit_jax.kernels.placement import each_its_images, images_each
from vit_jax.kernels.tpu_rows import (
  FEWEST,
  LANES,
  SUBLANES,
  Rows,
  by_columns,
  largest_divisor,
  round_up,
)

_BLOCKS = 6 * 2**20  # bytes of a grid step's arrays, of the 16 MiB that every TPU has
_LONGEST = 4096  # rows of a grid step: all are unrolled, and narrow ones fill registers


class Plan(NamedTuple):
  """How the kernels divide their work.

  Attributes:
    rows: tokens that a grid step takes: of one image or, if `turned`, of all of a device.
    how: how they are read and written.
    turned: whether x is read as [H, W, B, D], as other kernels of maps have it.
  """

  rows: int
  how: Rows
  turned: bool = False


def plan(x: jax.Array, turned: bool = False) -> Plan | None:
  """Returns how the TPUs of the mesh (`jax.set_mesh`) should normalise x; None if XLA should.

  None for what is not bfloat16 [B, ..., N, D], where the mesh splits channels or does not
  divide the batch, and for a few tokens. None, too, where channels do not fill registers, as
  the kernel gains nothing there; except for maps and for heads, [B, M, N, Dh], which XLA would
  store in a worse layout. Even those are left to XLA on v2 and v3, which read such rows slowly
  (benchmarks/NOTES.md).

  Args:
    turned: x is a map [B, H, W, D], to be read and written as [H, W, B, D]. Then None on v2
      and v3, where the number of images on a device is not a multiple of eight, and where no
      block of 64 rows or more divides the tokens.
  """
  if x.ndim < 3 or x.dtype != jnp.bfloat16:
    return None
  tokens, width = x.shape[-2:]
  images = images_each(x.shape[0])
  if images is None:
    return None
  from jax.experimental.pallas import tpu as pltpu

  how = Rows('float32' if pltpu.get_tpu_info().generation < 4 else 'bfloat16')
  # The derivative's: x, two gradients and its own, two of each, of two bytes.
  most = min(_LONGEST, _BLOCKS // (4 * 2 * 2 * width))
  if turned:
    rows = largest_divisor(x.size // width // x.shape[0] * images, most, SUBLANES)
    whole = images % SUBLANES == 0 and rows >= FEWEST
    return Plan(rows, how, turned) if whole and not how.packed else None
  if tokens < 2 * SUBLANES or (width % LANES and (how.packed or x.ndim == 3)):
    return None
  if how.block(tokens) <= most:
    return Plan(how.block(tokens), how)
  unit = 2 * SUBLANES  # of a tile of bfloat16
  parts = -(-tokens // (most // unit * unit or unit))
  return Plan(round_up(-(-tokens // parts), unit), how)


def layer_norm(x, scale, bias, eps: float, plan: Plan) -> jax.Array:
  """Returns the normalised x times `scale` plus `bias`, by the kernels, on any mesh or none.

  Reverse-mode differentiable only: the derivative is a kernel too.

  Args:
    x: [B, ..., N, D]. scale, bias: float32 [D].
    eps: added to the variance.
    plan: of `plan` for x.

  Returns:
    [B, ..., N, D] of the dtype of x.
  """
  return _norm(x, scale, bias, eps, plan)


def layer_norm_and_input(x, scale, bias, eps: float, plan: Plan):
  """Returns (`layer_norm`, x), x for what reads it besides: see `kernels.layer_norm`."""
  return _norm_and_input(x, scale, bias, eps, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
@functools.partial(jax.jit, static_argnames=('eps', 'plan'), inline=True)
def _norm(x, scale, bias, eps, plan):
  kernel = functools.partial(_forward, eps, plan.how)
  return _call(kernel, 'forward_norm', plan, [x], [scale, bias], sums=0)[0]


def _norm_fwd(x, scale, bias, eps, plan):
  return _norm(x, scale, bias, eps, plan), (x, scale)


def _norm_bwd(eps, plan, residuals, dy):
  return _derivative(eps, plan, *residuals, dy)


_norm.defvjp(_norm_fwd, _norm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _norm_and_input(x, scale, bias, eps, plan):
  return _norm(x, scale, bias, eps, plan), x


def _norm_and_input_fwd(x, scale, bias, eps, plan):
  return _norm_and_input(x, scale, bias, eps, plan), (x, scale)


def _norm_and_input_bwd(eps, plan, residuals, gradients):
  return _derivative(eps, plan, *residuals, *gradients)


_norm_and_input.defvjp(_norm_and_input_fwd, _norm_and_input_bwd)


@functools.partial(jax.jit, static_argnames=('eps', 'plan'), inline=True)
def _derivative(eps, plan, x, scale, *gradients):
  tokens = plan.rows if plan.turned else x.shape[-2]  # of an image, or of a block
  kernel = functools.partial(_backward, eps, plan, tokens)
  arrays = [x, *gradients]
  dx, *sums = _call(kernel, 'backward_norm', plan, arrays, [scale], sums=2)
  return dx, *(partial.sum((0, 1)) for partial in sums)


def _call(kernel, name: str, plan: Plan, arrays, vectors, sums: int) -> list[jax.Array]:
  """Runs a kernel over images and blocks of rows, each device its own images.

  Args:
    arrays: [B, ..., N, D]. vectors: [D].
    sums: how many results are float32 [images, 1, D], added up over an image's blocks,
      after the first, which is like x. Each head is an image; if turned, each block.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  def run(*operands):
    images, params = operands[: len(arrays)], operands[len(arrays) :]
    if plan.turned:  # blocks stand for images
      images = [jnp.moveaxis(x, 0, -2) for x in images]
    shape = images[0].shape
    rows = plan.rows if plan.turned else shape[-2]
    operands = [*(x.reshape(-1, rows, shape[-1]) for x in images), *params]
    (batch, tokens, width), dtype = operands[0].shape, operands[0].dtype
    columns = plan.how.columns(width)

    def block(columns=1, column=0):
      shape = (1, plan.rows, width // columns)
      return pl.BlockSpec(shape, lambda b, i: (b, i, column))

    vector = pl.BlockSpec((1, width), lambda b, i: (0, 0))
    partial = pl.BlockSpec((1, 1, width), lambda b, i: (b, 0, 0))
    grid = (batch, pl.cdiv(tokens, plan.rows))
    out_shape = [jax.ShapeDtypeStruct((batch, tokens, width), dtype)]
    out_shape += [jax.ShapeDtypeStruct((batch, 1, width), jnp.float32)] * sums
    cost = pl.CostEstimate(
      flops=0,  # of matrix units
      transcendentals=batch * tokens,
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *out_shape)),
    )
    y, *rest = pl.pallas_call(
      by_columns(kernel, len(arrays), columns),
      grid=grid,
      in_specs=[block(columns, c) for _ in arrays for c in range(columns)]
      + [vector] * len(vectors),
      out_specs=[block()] + [partial] * sums,
      out_shape=out_shape,
      cost_estimate=cost,
      interpret=plan.how.interpret,
      # Blocks of an image add to one sum.
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('parallel', 'arbitrary')
      ),
      metadata={'grid': 'x'.join(map(str, grid))},  # for `tools.tpu.cost`
      name=name,
    )(
      *(x for x in operands[: len(arrays)] for _ in range(columns)),
      *operands[len(arrays) :],
    )
    y = y.reshape(shape)
    return [jnp.moveaxis(y, -2, 0) if plan.turned else y, *rest]

  run = each_its_images(run, len(arrays), len(vectors))
  return run(*arrays, *(x[None] for x in vectors))


def _statistics(x, eps):
  """Returns (x - mean, 1 / sqrt(var + eps)) of float32 rows."""
  width = x.shape[1]
  centred = x - x.sum(1, keepdims=True) * (1 / width)
  var = (centred * centred).sum(1, keepdims=True) * (1 / width)
  return centred, lax.rsqrt(var + eps)


def _tiles(rows: int, size: int):
  """Yields slices of rows whose float32 numbers stay in registers, the last shorter."""
  for start in range(0, rows, size):
    yield slice(start, min(start + size, rows))


def _forward(eps, how, x_refs, scale_ref, bias_ref, y_ref):
  for tile in _tiles(y_ref.shape[1], 2 * SUBLANES):
    centred, rstd = _statistics(_load(how, x_refs, tile), eps)
    how.store(y_ref, centred * rstd * scale_ref[...] + bias_ref[...], rows=tile)


def _load(how, refs, rows: slice, there=None):
  return how.load(refs, there=there, rows=rows).astype(jnp.float32)


def _backward(eps, plan, tokens, x_refs, *refs):
  """`refs`: of the gradient of y and, maybe, that of x besides; scale; results."""
  from jax.experimental import pallas as pl

  *gradients, scale_ref, dx_ref, dscale_ref, dbias_ref = refs
  dy_refs, dskip_refs = gradients if len(gradients) == 2 else (*gradients, None)
  scale, width, how = scale_ref[...], dx_ref.shape[2], plan.how
  blocks = pl.cdiv(tokens, plan.rows)
  left = tokens - pl.program_id(1) * plan.rows if blocks > 1 else tokens
  whole, rest = [], []  # (dscale, dbias) of tiles of 8 rows, and of the last
  for tile in _tiles(plan.rows, (2 if how.packed else 1) * SUBLANES):
    # The last block's rows beyond the last token hold anything.
    there = left - tile.start if tokens % plan.rows else None
    x, dy = (_load(how, refs, tile, there) for refs in (x_refs, dy_refs))
    centred, rstd = _statistics(x, eps)
    y = centred * rstd
    sums = (dy * y, dy)
    if (tile.stop - tile.start) % SUBLANES == 0:
      for start in range(0, len(x), SUBLANES):
        part = [s[start : start + SUBLANES] for s in sums]
        whole = [a + b for a, b in zip(whole, part, strict=True)] if whole else part
    else:
      rest = [s.sum(0, keepdims=True) for s in sums]
    dy = dy * scale
    # The normalised vector has no component along 1 and along itself.
    mean = dy.sum(1, keepdims=True) * (1 / width)
    along = (dy * y).sum(1, keepdims=True) * (1 / width)
    dx = (dy - mean - y * along) * rstd
    if dskip_refs is not None:
      dx += _load(how, dskip_refs, tile)
    how.store(dx_ref, dx, rows=tile)
  totals = [s.sum(0, keepdims=True) for s in whole]
  if rest:
    totals = [a + b for a, b in zip(totals, rest, strict=True)] if totals else rest
  for ref, total in zip((dscale_ref, dbias_ref), totals, strict=True):
    if blocks > 1:
      total += jnp.where(pl.program_id(1) > 0, ref[0], 0.0)
    ref[0] = total
