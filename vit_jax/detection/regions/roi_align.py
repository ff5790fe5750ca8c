"""RoIAlign: the mean of bilinear samples in each bin of a box (arXiv 1703.06870).

It computes what detectron2's `ROIAlignV2` and `torchvision.ops.roi_align` compute, edge
rules included. Interpolation along y does not depend on that along x, so the bins of a box
are exactly Wy F Wx^T, with one matrix of weights per axis. Matrix products need neither
gather nor scatter, and cost the same for any number of samples. A CPU multiplies only the
part of the map that a box covers, because most weights are 0.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vit_jax.detection.regions.bins import bin_weights
from vit_jax.detection.regions.origins import ORIGINS
from vit_jax.kernels import allows, choose_by_platform, tpus

# Cells along each side of a window. Most boxes fit into one window of their level.
_WINDOW = 32


def roi_align(
  maps: Sequence[jax.Array],
  boxes: jax.Array,
  strides: Sequence[float],
  size: int,
  samples: int = 0,
  aligned: bool = True,
  levels: jax.Array | None = None,
) -> jax.Array:
  """Pools each box from its level into size x size bins.

  Uses the fused kernel on TPUs, see `tpu_roi_align`. No gradient reaches the boxes.

  Args:
    maps: one [B, h, w, C] for each level.
    boxes: corners [B, R, 4] in pixels.
    strides: pixels per cell of each map.
    size: bins along each axis.
    samples: samples along each axis of a bin. 0 means adaptive: one per cell that a bin
      covers, rounded up; a box without area then gives 0.
    aligned: whether pixel centres are at half pixels. If not, every box is off by half a
      cell, and made at least one cell long.
    levels: int [B, R], the map of each box, see `level_of`. None: the first map.

  Returns:
    [B, R, size, size, C] in the dtype of the maps.
  """
  boxes = jax.lax.stop_gradient(boxes.astype(jnp.float32))
  if levels is None:
    levels = jnp.zeros(boxes.shape[:2], jnp.int32)
  options = dict(strides=tuple(strides), size=size, samples=samples, aligned=aligned)
  if maps[0].dtype == jnp.bfloat16 and tpus(boxes.shape[0]) is not None:
    from vit_jax.detection.regions import tpu_roi_align

    pooling = tpu_roi_align.Pooling(**options)
    pooling = tpu_roi_align.plan(maps, boxes.shape[1], pooling)
    again = functools.partial(_pool_random_boxes, count=boxes.shape[1], **options)
    if pooling and allows('tpu_roi_align', again, *maps):
      return tpu_roi_align.roi_align(tuple(maps), boxes, levels, pooling)
  return _products(maps, boxes, levels, **options)


def _products(maps, boxes, levels, strides, size, samples, aligned):
  total = 0
  for level, (x, stride) in enumerate(zip(maps, strides, strict=True)):
    low, high = jnp.split(boxes * (1 / stride), 2, -1)  # x and y of both corners
    columns, rows = (
      bin_weights(low[..., i], high[..., i], x.shape[2 - i], size, samples, aligned)
      for i in range(2)
    )
    rows = jnp.where((levels == level)[..., None, None], rows, 0)
    total += _contract(rows, columns, x)
  return total.astype(maps[0].dtype)


def _contract_whole(rows: jax.Array, columns: jax.Array, x: jax.Array) -> jax.Array:
  """Returns Wy F Wx^T for each box, float32 [B, R, P, Q, C].

  Args:
    rows, columns: weights [B, R, P, h] and [B, R, Q, w].
    x: the map [B, h, w, C].
  """
  # bfloat16 maps are accurate to 2**-9 only, so the weights may be rounded likewise.
  precision = 'default' if x.dtype == jnp.bfloat16 else 'highest'
  product = functools.partial(jnp.einsum, precision=precision)
  pooled = product('brph,bhwc->brpwc', rows, x.astype(jnp.float32))
  return product('brqw,brpwc->brpqc', columns, pooled)


@jax.custom_vjp
def _contract_windows(rows: jax.Array, columns: jax.Array, x: jax.Array) -> jax.Array:
  """Computes `_contract_whole` from the windows of x in which a box has weights.

  It visits one box after another, so it needs no memory for others. A sum has fewer terms
  than over the whole map, all others being 0: results differ by the rounding of float32.
  """

  def pool(box):
    image, rows, columns = box

    def add(total, window):
      start, rows, columns = window
      cells = lax.dynamic_slice(x, (image, *start, 0), _window_shape(x))[0]
      part = jnp.einsum('ph,hwc->pwc', rows, cells.astype(jnp.float32))
      return total + jnp.einsum('qw,pwc->pqc', columns, part)

    zeros = jnp.zeros((len(rows), len(columns), x.shape[-1]), jnp.float32)
    return _over_windows(add, zeros, rows, columns)

  pooled = lax.map(pool, _list_boxes(rows, columns))
  return pooled.reshape(*rows.shape[:2], *pooled.shape[1:])


def _contract_forward(rows, columns, x):
  return _contract_windows(rows, columns, x), (rows, columns, x)


def _contract_backward(residuals, gradient):
  """Returns the gradient of the map; none reaches the weights, see `roi_align`."""
  rows, columns, x = residuals
  boxes = _list_boxes(rows, columns)

  def visit(total, box):
    (image, rows, columns), gradient = box

    def add(total, window):
      start, rows, columns = window
      part = jnp.einsum('qw,pqc->pwc', columns, gradient)
      part = jnp.einsum('ph,pwc->hwc', rows, part)
      start = image, *start, 0
      cells = lax.dynamic_slice(total, start, _window_shape(x))
      return lax.dynamic_update_slice(total, cells + part, start)

    return _over_windows(add, total, rows, columns), None

  gradient = gradient.reshape(-1, *gradient.shape[2:])
  total, _ = lax.scan(visit, jnp.zeros(x.shape, jnp.float32), (boxes, gradient))
  return jnp.zeros_like(rows), jnp.zeros_like(columns), total.astype(x.dtype)


_contract_windows.defvjp(_contract_forward, _contract_backward)
_contract = choose_by_platform(cpu=_contract_windows, default=_contract_whole)


def _window_shape(x: jax.Array) -> tuple[int, ...]:
  return (1, *(min(n, _WINDOW) for n in x.shape[1:3]), x.shape[-1])


def _list_boxes(rows, columns) -> tuple[jax.Array, ...]:
  """Returns (image [B R], rows [B R, P, h], columns [B R, Q, w])."""
  B, R = rows.shape[:2]
  image = jnp.repeat(jnp.arange(B), R)
  return image, *(x.reshape(B * R, *x.shape[2:]) for x in (rows, columns))


def _over_windows(add, total, rows, columns):
  """Calls `total = add(total, window)` for the windows in which a box has weights.

  Args:
    add: function of the total and (start (y, x), rows [P, n], columns [Q, m]).
    rows, columns: weights of one box, [P, h] and [Q, w].
  """
  first_row, number = _covered(rows)
  first_column, across = _covered(columns)

  def step(k, total):
    y, rows_here = _cut(rows, first_row + k // across * _WINDOW)
    x, columns_here = _cut(columns, first_column + k % across * _WINDOW)
    return add(total, ((y, x), rows_here, columns_here))

  return lax.fori_loop(0, number * jnp.maximum(across, 1), step, total)


def _covered(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the first cell with a weight, and the number of windows up to the last."""
  cells = (weights != 0).any(0)
  first, length = jnp.argmax(cells), len(cells)
  last = length - jnp.argmax(cells[::-1])
  return first, jnp.where(cells.any(), (last - first + _WINDOW - 1) // _WINDOW, 0)


def _cut(weights: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Cuts out a window's weights; returns (the window's first cell, weights).

  A window at the end of the map starts before `first`, with weights of 0.
  """
  length = weights.shape[1]
  side = min(_WINDOW, length)
  start = jnp.minimum(first, length - side)
  cut = lax.dynamic_slice(weights, (0, start), (len(weights), side))
  return start, jnp.where(start + jnp.arange(side) >= first, cut, 0)


def _pool_random_boxes(*maps, count, strides, **options):
  """Pools random boxes of many sizes: this call verifies the kernel on the device."""
  rng = np.random.default_rng(0)
  image = strides[0] * np.array(maps[0].shape[2:0:-1])
  sides = image * np.exp(rng.uniform(-4, 0, (count, 2)))
  low = rng.uniform(size=(count, 2)) * (image - sides)
  boxes = np.concatenate([low, low + sides], -1).astype(np.float32)
  boxes = jnp.broadcast_to(boxes, (len(maps[0]), *boxes.shape))
  levels = level_of(boxes, 0, len(maps) - 1, (4 * strides[0] * options['size'], 1))
  return roi_align(maps, boxes, strides, **options, levels=levels)


def level_of(
  boxes: jax.Array,
  finest: int,
  coarsest: int,
  canonical: tuple[float, int] = (224, 4),
  origin: str = 'detectron2',
) -> jax.Array:
  """Returns the level of each box as int [...], 0 for the finest.

  This is floor(level + log2(sqrt(area) / size)), clipped to the given levels: FPN, arXiv
  1612.03144, equation 1. It compares the side with powers of two, because a logarithm
  would round.

  Args:
    boxes: corners [..., 4].
    canonical: (size, level): boxes of size x size pixels belong to that level.
    origin: a key of `ORIGINS`, whose epsilons guard against rounding.
  """
  size, level = canonical
  details = ORIGINS[origin]
  powers = 2.0 ** (np.arange(finest + 1, coarsest + 1) - level - details.late_epsilon)
  sides = (size * (powers - details.level_epsilon)).astype(np.float32)
  lengths = jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0)
  side = jnp.sqrt(lengths[..., 0] * lengths[..., 1])
  return jnp.sum(side[..., None] >= sides, -1, dtype=jnp.int32)
