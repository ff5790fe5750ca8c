"""Depthwise convolutions on TPUs: a kernel for them, and one for the filter's gradient.

XLA's take three to four times as many cycles on v5e, v6e and 7x, and 1.5 times as many on v5p
(benchmarks/NOTES.md). Here maps are stored as [H, W, B, C], so that images and channels fill
the tiles: what a filter reads at an offset is another register, not a shifted one. A step of
the grid copies a part of the map and what surrounds it to float32, with zeros where the map ends.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import linear_call

from vit_jax.kernels.placement import each_its_images, images_each
from vit_jax.kernels.tpu_rows import LANES, SUBLANES, largest_divisor

_COLUMNS = 28  # of a grid step's part of the map at most
_POSITIONS = 256  # rows times columns at most: all are unrolled
_SUMS = 14  # registers that are summed at a time, of 64


class Plan(NamedTuple):
  """How the kernel divides a map.

  Attributes:
    rows, columns: of the part that a grid step computes; they divide the map's.
    interpret: run by JAX, not Mosaic.
  """

  rows: int
  columns: int
  interpret: bool = False


def plan(x: jax.Array, size: tuple[int, int]) -> Plan | None:
  """Returns how the TPUs of the mesh (`jax.set_mesh`) should convolve x; None if XLA should.

  None for what is not bfloat16 [B, H, W, C], for filters with an even side, where the mesh
  splits channels or the number of images on a device is not a multiple of eight, for maps
  without suitable divisors, and up to v4: there XLA's are faster (v4), or the kernel gains 2 %
  of a step (v3; benchmarks/NOTES.md).

  Args:
    size: rows and columns of the filter.
  """
  images = images_each(x.shape[0])
  if images is None or images % SUBLANES or x.dtype != jnp.bfloat16:
    return None
  from jax.experimental.pallas import tpu as pltpu

  if not all(k % 2 for k in size) or pltpu.get_tpu_info().generation < 5:
    return None
  columns = _part(x.shape[2], _COLUMNS, size[1])
  rows = columns and _part(x.shape[1], _POSITIONS // columns, size[0])
  return Plan(rows, columns) if rows else None


def _part(length: int, most: int, k: int) -> int | None:
  """Returns the largest divisor of `length` up to `most`: all of it, or k or more; else None.

  A part of k or more is, with the k - 1 rows around it, no longer than the map.
  """
  found = largest_divisor(length, most)
  return found if found == length or found >= k else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def convolve_and_input(x, kernel, bias, plan: Plan) -> tuple[jax.Array, jax.Array]:
  """Returns (the convolution of x, plus the bias, x), x for what reads it besides.

  Of the x that is returned, the kernel adds the gradient to that of the convolution: see
  `layer_norm.layer_norm_and_input`. Sums are in float32. Differentiable once, in either mode;
  not under `jax.vmap`.

  Args:
    x: [B, H, W, C].
    kernel: [kh, kw, 1, C], odd; zeros surround the map.
    bias: [C].
    plan: of `plan` for x.

  Returns:
    two of the shape and dtype of x.
  """
  return _convolved(x, kernel, bias, plan), x


@convolve_and_input.defjvp
def _jvp(plan, primals, tangents):
  (x, kernel, bias), (dx, dkernel, dbias) = primals, tangents
  dy, dx = linear_call(
    lambda kernel, dx: (_convolved(dx, kernel, None, plan), dx),
    lambda kernel, dys: _convolved(dys[0], kernel[::-1, ::-1], None, plan, dys[1]),
    *(kernel, dx),
  )
  # Any of these may be differentiated alone. XLA makes one call of the two that are alike.
  sums = lambda x, dy: _call(_sums, kernel.shape[:2], plan, [x, dy])
  dy += linear_call(
    lambda x, dkernel: _convolved(x, dkernel, None, plan),
    lambda x, dy: sums(x, dy)[:-1].reshape(kernel.shape),
    *(x, dkernel),
  )
  dy += linear_call(
    lambda x, dbias: jnp.broadcast_to(dbias, x.shape),
    lambda x, dy: sums(x, dy)[-1],
    *(x, dbias),
  )
  return convolve_and_input(x, kernel, bias, plan), (dy, dx)


def _convolved(x, kernel, bias, plan, added=None):
  """Returns the convolution of x, plus the bias, plus `added`, like x; None: without."""
  bias = jnp.zeros_like(kernel[0, 0, 0]) if bias is None else bias
  params = [p.astype(jnp.float32) for p in (kernel[:, :, 0], bias[None])]
  arrays = [x] if added is None else [x, added]
  return _call(_convolve, kernel.shape[:2], plan, arrays, params)


# Traced and lowered once for each shape, not for each layer.
@functools.partial(jax.jit, static_argnames=('kernel', 'size', 'plan'), inline=True)
def _call(kernel, size, plan, arrays, params=()) -> jax.Array:
  """Runs a kernel over eight images, registers of channels, and parts of the map.

  Args:
    kernel: `_convolve` or `_sums`.
    size: (kh, kw).
    arrays: [B, H, W, C], the first read with what surrounds a part.
    params: [..., C], float32, for `_convolve`.

  Returns:
    of `_convolve`, like the arrays; of `_sums`, [kh kw + 1, C].
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  (kh, kw), parts, forward = size, (plan.rows, plan.columns), kernel is _convolve

  def run(*operands):
    maps = [x.transpose(1, 2, 0, 3) for x in operands[: len(arrays)]]
    H, W, B, C = maps[0].shape
    grid = (B // SUBLANES, pl.cdiv(C, LANES), H // plan.rows, W // plan.columns)
    lanes, starts, read = min(C, LANES), [], []
    for n, part, k in zip((H, W), parts, size, strict=True):
      read.append(min(n, part + k - 1))
      start = functools.partial(_start, part=part, reach=k // 2, last=n - read[-1])
      starts.append(start)
    channel = lambda c: c * LANES if C > LANES else 0
    around = pl.BlockSpec(
      (*map(pl.Element, (*read, SUBLANES)), pl.Element(lanes, (0, -C % lanes))),
      lambda b, c, h, w: (starts[0](h), starts[1](w), b * SUBLANES, channel(c)),
    )
    part = pl.BlockSpec((*parts, SUBLANES, lanes), lambda b, c, h, w: (h, w, b, c))
    out_spec, out = part, jax.ShapeDtypeStruct(maps[0].shape, maps[0].dtype)
    if not forward:  # a register for each element of the filter, of eight images
      sums = (kh * kw + 1, SUBLANES)
      out_spec = pl.BlockSpec((None, *sums, lanes), lambda b, c, h, w: (b, 0, 0, c))
      out = jax.ShapeDtypeStruct((grid[0], *sums, C), jnp.float32)
    wide = (n + 2 * (k - 1) for n, k in zip(parts, size, strict=True))
    cost = pl.CostEstimate(
      flops=0,  # of matrix units
      transcendentals=0,
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, out)),
    )
    y = pl.pallas_call(
      functools.partial(kernel, size, starts),
      grid=grid,
      in_specs=[around, *(part for _ in maps[1:])]
      + [
        pl.BlockSpec(
          (*p.shape[:-1], lanes), lambda b, c, h, w, d=p.ndim: (0,) * (d - 1) + (c,)
        )
        for p in params
      ],
      out_specs=out_spec,
      out_shape=out,
      scratch_shapes=[pltpu.VMEM((*wide, SUBLANES, lanes), jnp.float32)],
      cost_estimate=cost,
      interpret=plan.interpret,
      # Parts of a map add to one sum.
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('parallel',) * 2
        + ('parallel' if forward else 'arbitrary',) * 2
      ),
      metadata={'grid': 'x'.join(map(str, grid))},  # for `tools.tpu.cost`
      name='depthwise' if forward else 'depthwise_sums',
    )(*maps, *operands[len(arrays) :])
    return y.transpose(2, 0, 1, 3) if forward else y

  y = each_its_images(run, len(arrays), len(params))(*arrays, *params)
  return y if forward else y.sum((0, 2)).astype(arrays[0].dtype)


def _start(i, part, reach, last):
  """Returns where reading starts for part i of a map, within the map."""
  return jnp.clip(i * part - reach, 0, last)


def _widen(size, starts, parts, x_ref, wide_ref):
  """Copies to `wide_ref` what was read for a part of the map, with zeros outside the map.

  `wide_ref` holds the part with twice the filter's reach around it, as what was read may
  begin before what is wanted, or after it.
  """
  from jax.experimental import pallas as pl

  at = []
  for axis, (start, part, k) in enumerate(zip(starts, parts, size, strict=True)):
    i, reach = pl.program_id(2 + axis), k // 2
    at.append(pl.ds(start(i) - i * part + 2 * reach, x_ref.shape[axis]))
    for edge in (reach, part + 2 * reach) if reach else ():
      across = (slice(None),) * axis
      strip = wide_ref.at[(*across, pl.ds(edge, reach))]
      strip[...] = jnp.zeros(strip.shape, strip.dtype)
  wide_ref[(*at,)] = x_ref[...].astype(jnp.float32)


def _every_position(rows: int, columns: int, compute) -> None:
  """Calls compute(row, (start, columns)) for what is in registers at a time of a part."""

  def compute_row(row, _):
    for start in range(0, columns, _SUMS):
      compute(row, (start, min(_SUMS, columns - start)))

  # Traced for one row, and unrolled afterwards: there are hundreds of operations a position.
  lax.fori_loop(0, rows, compute_row, None, unroll=True)


def _read(wide_ref, size, row, columns, i, j):
  """Returns what the filter's element (i, j) is multiplied with there."""
  from jax.experimental import pallas as pl

  start, count = columns
  kh, kw = size
  return wide_ref[row + i + kh // 2, pl.ds(start + j + kw // 2, count)]


def _convolve(size, starts, x_ref, *refs):
  """`refs`: an array to add, if any; filter, bias, result and scratch memory."""
  from jax.experimental import pallas as pl

  *added, filter_ref, bias_ref, y_ref, wide_ref = refs
  parts = y_ref.shape[:2]
  _widen(size, starts, parts, x_ref, wide_ref)

  def compute(row, columns):
    sums = jnp.broadcast_to(bias_ref[...], (columns[1], *y_ref.shape[2:]))
    for i, j in np.ndindex(*size):
      sums += _read(wide_ref, size, row, columns, i, j) * filter_ref[i, pl.ds(j, 1)]
    for ref in added:
      sums += ref[row, pl.ds(*columns)].astype(jnp.float32)
    y_ref[row, pl.ds(*columns)] = sums.astype(y_ref.dtype)

  _every_position(*parts, compute)


def _sums(size, starts, x_ref, dy_ref, sums_ref, wide_ref):
  from jax.experimental import pallas as pl

  parts = dy_ref.shape[:2]
  _widen(size, starts, parts, x_ref, wide_ref)

  @pl.when((pl.program_id(2) == 0) & (pl.program_id(3) == 0))
  def _():
    sums_ref[...] = jnp.zeros(sums_ref.shape, sums_ref.dtype)

  def compute(row, columns):
    dy = dy_ref[row, pl.ds(*columns)].astype(jnp.float32)
    for n, (i, j) in enumerate(np.ndindex(*size)):
      sums_ref[n] += (_read(wide_ref, size, row, columns, i, j) * dy).sum(0)
    sums_ref[n + 1] += dy.sum(0)

  _every_position(*parts, compute)
