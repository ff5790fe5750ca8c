"""RoIAlign on TPUs: one Pallas kernel for the forward pass, one for the backward pass.

As matrix products in XLA, RoIAlign multiplies every cell of a map by a weight for every
box, and nearly all weights are zero. Here a grid step holds some rows of a map. Each box
that touches these rows visits the windows of columns that it covers. Forward, a window's
cells times their weights are added to the bins of the box. Backward, the gradients of the
bins times the weights are added to the rows of the map.

Nothing is gathered or scattered, and a box may have any size. Maps are read once per group
of boxes and written once. Sums are float32.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from vit_jax.detection.regions.bins import Axis
from vit_jax.kernels import split, tpus

# Rows and columns of a window. Its 256 cells are two tiles of a matrix unit.
_ROWS, _COLUMNS = 8, 32
# Rows of a register, and rows of a bfloat16 tile.
_SUBLANES, _TILE = 8, 16
# Windows that a box visits on average, for the cost estimate.
_VISITS = 5
_IMAGES = PartitionSpec(('data', 'fsdp'))


class Pooling(NamedTuple):
  """The arguments of `roi_align.roi_align` that are not arrays.

  Attributes:
    vmem: bytes of on-chip memory that a kernel may use.
    sums: bytes of the bins of a group of boxes, in float32.
  """

  strides: tuple[float, ...]
  size: int
  samples: int
  aligned: bool
  vmem: int = 0
  sums: int = 16 * 2**20

  @property
  def bins(self) -> int:
    """Number of a box's bins, with each row padded to whole registers."""
    return self.size * _round_up(self.size, _SUBLANES)


def plan(maps, count: int, pooling: Pooling) -> Pooling | None:
  """Returns the pooling with its on-chip memory, or None if the kernel cannot run.

  It cannot run if the mesh (`jax.set_mesh`) has no TPUs, splits channels or does not divide
  the batch; if the channels do not fill registers; or if the gradients of all boxes of an
  image do not fit on the chip.

  Args:
    maps: [B, h, w, C], bfloat16.
  """
  mesh, channels = tpus(maps[0].shape[0]), maps[0].shape[-1]
  if mesh is None or mesh.shape['tensor'] > 1 or channels % 128:
    return None
  vmem = pltpu.get_tpu_info().vmem_capacity_bytes * 15 // 16
  # The backward pass holds the bfloat16 gradients of all bins; the forward pass holds a
  # group's sums and results. Both also hold rows of the maps: double-buffered bfloat16 and
  # float32 sums.
  bins = max(2 * count * pooling.bins * channels, 2 * pooling.sums)
  rows = _ROWS * channels * sum(_padded_shape(x)[2] for x in maps)
  return pooling._replace(vmem=vmem) if bins + (2 * 2 + 4) * rows <= vmem else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def roi_align(maps, boxes, levels, pooling: Pooling) -> jax.Array:
  """Computes `roi_align.roi_align` of a tuple of maps, under any mesh or none.

  It is differentiable in reverse mode only, because the derivative is a kernel, too.
  """

  def run(boxes, levels, *maps):
    (batch, count, _), channels = boxes.shape, maps[0].shape[-1]
    most = max(pooling.sums // (4 * pooling.bins * channels), 1)
    group = max(n for n in range(1, min(count, most) + 1) if count % n == 0)
    bins = (group, pooling.bins, channels)
    out = _call(
      _forward,
      pooling,
      (boxes, levels, [x.shape[1:3] for x in maps], group),
      list(map(_pad, maps)),
      _rows(maps),
      pl.BlockSpec((1, *bins), lambda b, g, i, _: (b, g, 0, 0)),
      jax.ShapeDtypeStruct((batch, count, *bins[1:]), maps[0].dtype),
      bins,
    )
    return out.reshape(batch, count, pooling.size, -1, channels)[..., : pooling.size, :]

  return split(run, (_IMAGES,) * (2 + len(maps)))(boxes, levels, *maps)


def _fwd(maps, boxes, levels, pooling):
  return roi_align(maps, boxes, levels, pooling), (maps, boxes, levels)


def _bwd(pooling, residuals, gradient):
  maps, boxes, levels = residuals

  def run(boxes, levels, gradient, *maps):
    padding = ((0, 0),) * 3 + ((0, -pooling.size % _SUBLANES), (0, 0))
    gradient = jnp.pad(gradient, padding).reshape(*boxes.shape[:2], pooling.bins, -1)
    shapes = list(map(_padded_shape, maps))
    # The gradients of an image's bins stay on the chip. They change once per image, so a
    # single buffer suffices.
    whole = pl.BlockSpec(
      (1, *gradient.shape[1:]), lambda b, g, i, _: (b, 0, 0, 0), pl.Buffered(1)
    )
    padded = _call(
      _backward,
      pooling,
      (boxes, levels, [x.shape[1:3] for x in maps], boxes.shape[1]),
      [gradient],
      [whole],
      _rows(maps),
      [jax.ShapeDtypeStruct(shape, gradient.dtype) for shape in shapes],
      (_ROWS, max(shape[2] for shape in shapes), gradient.shape[-1]),
    )
    return tuple(
      y[:, : x.shape[1], : x.shape[2]] for x, y in zip(maps, padded, strict=True)
    )

  return (
    split(run, (_IMAGES,) * (3 + len(maps)))(boxes, levels, gradient, *maps),
    None,
    None,
  )


roi_align.defvjp(_fwd, _bwd)


def _round_up(n: int, unit: int) -> int:
  return -(-n // unit) * unit


def _padded_shape(x) -> tuple[int, ...]:
  """Returns the shape of a map [B, h, w, C] after padding to whole windows."""
  batch, h, w, channels = x.shape
  return batch, _round_up(h, _ROWS), max(_round_up(w, _TILE), _COLUMNS), channels


def _pad(x):
  ends = zip(x.shape, _padded_shape(x), strict=True)
  return jnp.pad(x, [(0, after - before) for before, after in ends])


def _first(heights) -> list[int]:
  """Returns the index of each map's first block of rows, then the number of blocks."""
  return [0, *itertools.accumulate(-(-h // _ROWS) for h in heights)]


def _rows(maps) -> list[pl.BlockSpec]:
  """Makes the block spec of each map. A map's block stays put while others are visited."""
  first = _first(x.shape[1] for x in maps)
  place = lambda start, end: (
    lambda b, g, i, _: (b, jnp.clip(i, start, end - 1) - start, 0, 0)
  )
  return [
    pl.BlockSpec((1, _ROWS, *_padded_shape(x)[2:]), place(*ends))
    for x, *ends in zip(maps, first[:-1], first[1:], strict=True)
  ]


def _call(kernel, pooling, boxes, inputs, in_specs, out_specs, out_shape, sums):
  """Runs a kernel over images, groups of boxes and blocks of rows of all maps.

  Args:
    boxes: the arguments of `_lists`, without `pooling`.
    sums: shape of the float32 sums on the chip.
  """
  visitors, counts, scalars, windows = _lists(pooling, *boxes)
  batch, groups, blocks, _, group = visitors.shape
  grid = (batch, groups, blocks)
  scalar = lambda n: pl.BlockSpec(
    (1, 1, n, group), lambda b, g, i, _: (b, g, 0, 0), memory_space=pltpu.SMEM
  )
  visits = _VISITS * batch * groups * group
  moved = groups * sum(x.size * x.dtype.itemsize for x in inputs)
  moved += sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(out_shape)
  )
  return pl.pallas_call(
    functools.partial(kernel, pooling, boxes[2]),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=grid,
      in_specs=[
        pl.BlockSpec(
          (1, 1, 1, 1, group),
          lambda b, g, i, _: (b, g, i, 0, 0),
          memory_space=pltpu.SMEM,
        ),
        scalar(scalars.shape[2]),
        scalar(windows.shape[2]),
        *in_specs,
      ],
      out_specs=out_specs,
      scratch_shapes=[pltpu.VMEM(sums, jnp.float32)],
    ),
    out_shape=out_shape,
    cost_estimate=pl.CostEstimate(
      flops=2 * visits * pooling.bins * _ROWS * _COLUMNS * sums[-1],
      transcendentals=0,
      bytes_accessed=moved,
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary'),
      vmem_limit_bytes=pooling.vmem,
    ),
    # benchmarks read the grid to count cycles.
    metadata={'grid': 'x'.join(map(str, grid))},
    name=kernel.__name__.strip('_') + '_roi_align',
  )(counts, visitors, scalars, windows, *inputs)


def _lists(pooling, boxes, levels, sides, group):
  """Lists which boxes touch which block of rows, and which windows they visit.

  Args:
    boxes, levels: as in `roi_align.roi_align`.
    sides: (h, w) of each map.
    group: boxes in a group, a divisor of R.

  Returns:
    visitors: int [B, groups, blocks, 1, group]: boxes that touch a block come first.
    counts: int [B * groups * blocks], how many boxes touch a block.
    scalars: float32 [B, groups, 12, group], the fields of `Axis` for rows and columns.
    windows: int [B, groups, 2, group], each box's first column and number of windows.
  """
  of_level = lambda values, dtype: jnp.asarray(values, dtype)[levels]
  scale = of_level([1 / stride for stride in pooling.strides], jnp.float32)
  low, high = jnp.split(boxes * scale[..., None], 2, -1)
  axes, ends = [], []
  for i, cells in enumerate(zip(*sides, strict=True)):
    axis = Axis.divide(low[..., 1 - i], high[..., 1 - i], *pooling[1:4])
    last = of_level(cells, jnp.float32) - 1
    near, far = axis.start, axis.start + pooling.size * axis.width
    near, far = jnp.minimum(near, far), jnp.maximum(near, far)
    none = (axis.number == 0) | (far < -1) | (near > last + 1)
    whole = lambda x, last=last: jnp.floor(jnp.clip(x, 0, last)).astype(jnp.int32)
    far = jnp.minimum(whole(far) + 1, last.astype(jnp.int32))
    ends.append((whole(near), jnp.where(none, -1, far)))
    axes += axis
  (top, bottom), (left, right) = ends
  first = _first(h for h, _ in sides)
  of_map = of_level(first[:-1], jnp.int32)
  top, bottom = (of_map + y // _ROWS for y in (top, jnp.where(right < 0, -1, bottom)))
  blocks = jnp.arange(first[-1])[:, None]
  by_group = lambda x: x.reshape(*x.shape[:-1], -1, group).swapaxes(1, -2)
  top, bottom = (by_group(y)[:, :, None] for y in (top, bottom))
  touches = (top <= blocks) & (blocks <= bottom)  # [B, groups, blocks, group]
  visitors = jnp.argsort(~touches, stable=True).astype(jnp.int32)
  left = left // _TILE * _TILE
  windows = jnp.stack([left, (right - left) // _COLUMNS + 1], 1)
  return (
    visitors[:, :, :, None],
    touches.sum(-1, dtype=jnp.int32).ravel(),
    by_group(jnp.stack(axes, 1)),
    by_group(windows),
  )


def _forward(pooling, sides, *refs):
  *lists, out, sums = refs
  maps = lists[4:]

  @pl.when(pl.program_id(2) == 0)
  def _():
    sums[...] = jnp.zeros_like(sums)

  def visit(cells, box, window, weights):
    values = cells[0, :, window].reshape(_ROWS * _COLUMNS, -1)
    sums[box] += jnp.dot(weights, values, preferred_element_type=jnp.float32)

  _visits(pooling, sides, lists[:4], maps, visit)

  @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
  def _():
    out[0] = sums[...].astype(out.dtype)


def _backward(pooling, sides, *refs):
  *lists, gradient = refs[:5]
  *maps, sums = refs[5:]

  def visit(cells, box, window, weights):
    del cells
    values = lax.dot_general(
      weights, gradient[0, box], (((0,), (0,)), ((), ())),
      preferred_element_type=jnp.float32,
    )  # fmt: skip
    sums[:, window] += values.reshape(_ROWS, _COLUMNS, -1)

  def begin(cells):
    sums[:, : cells.shape[2]] = jnp.zeros(cells.shape[1:], jnp.float32)

  def end(cells):
    cells[0] = sums[:, : cells.shape[2]].astype(cells.dtype)

  _visits(pooling, sides, lists, maps, visit, begin, end)


def _visits(pooling, sides, lists, maps, visit, *around):
  """Visits the windows of all boxes that touch the rows of this step.

  Args:
    sides: (h, w) of each map.
    lists: blocks of the results of `_lists`.
    visit: called with the block, the index of the box, the slice of the window's columns,
      and its weights [bins, rows x columns], bfloat16.
    around: functions to call with the block before and after its visits.
  """
  block, count = pl.program_id(2), pl.num_programs(2)
  step = (pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)) * count + block
  first = _first(h for h, _ in sides)

  def visit_map(cells, side, start):
    for function in around[:1]:
      function(cells)
    rows = (block - start) * _ROWS
    each = functools.partial(_windows, pooling, side, rows, lists[1:], cells, visit)
    lax.fori_loop(0, lists[0][step], each, None)
    for function in around[1:]:
      function(cells)

  for cells, side, start, end in zip(maps, sides, first[:-1], first[1:], strict=True):
    inside = (start <= block) & (block < end)
    pl.when(inside)(functools.partial(visit_map, cells, side, start))


def _windows(pooling, side, rows, lists, cells, visit, i, carry):
  """Visits the windows of the i-th box that touches a block starting at row `rows`."""
  visitors, scalars, windows = lists
  shape = (_round_up(pooling.size, _SUBLANES), _ROWS * _COLUMNS)
  bins = lax.broadcasted_iota(jnp.int32, shape, 0).astype(jnp.float32)
  place = lax.broadcasted_iota(jnp.int32, shape, 1)
  box = visitors[0, 0, 0, 0, i]
  fields = [scalars[0, 0, k, box] for k in range(2 * len(Axis._fields))]
  y, x = Axis(*fields[: len(Axis._fields)]), Axis(*fields[len(Axis._fields) :])
  row = (rows + place // _COLUMNS).astype(jnp.float32)
  vertical = y.weights(bins, row, side[0], pooling.samples)

  def visit_window(j, carry):
    start = windows[0, 0, 0, box] + _COLUMNS * j
    # The last window is shifted to end with the block, and skips columns already visited.
    inside = pl.multiple_of(jnp.minimum(start, cells.shape[2] - _COLUMNS), _TILE)
    column = inside + place % _COLUMNS
    weights = x.weights(bins, column.astype(jnp.float32), side[1], pooling.samples)
    weights = jnp.where(column >= start, weights, 0)
    weights = [vertical[p : p + 1] * weights for p in range(pooling.size)]
    weights = jnp.concatenate(weights).astype(jnp.bfloat16)
    visit(cells, box, pl.ds(inside, _COLUMNS), weights)
    return carry

  return lax.fori_loop(0, windows[0, 0, 1, box], visit_window, carry)
