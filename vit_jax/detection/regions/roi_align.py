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
  scales = jnp.take((1 / np.array(strides)).astype(np.float32), levels)
  low, high = jnp.split(boxes * scales[..., None], 2, -1)  # x and y of both corners
  sides = np.array([x.shape[2:0:-1] for x in maps])  # widths and heights
  cells, most = jnp.take(sides, levels, axis=0), sides.max(0)
  columns, rows = (
    bin_weights(
      low[..., i], high[..., i], cells[..., i], size, samples, aligned, most[i]
    )
    for i in (0, 1)
  )
  return _contract(rows, columns, levels, tuple(maps)).astype(maps[0].dtype)


def _contract_whole(rows, columns, levels, maps) -> jax.Array:
  """Returns Wy F Wx^T for each box, float32 [B, R, P, Q, C], with F from its level.

  Args:
    rows, columns: weights [B, R, P, h] and [B, R, Q, w], for the largest h and w.
    levels: int [B, R].
    maps: one [B, h, w, C] for each level.
  """
  # bfloat16 maps are accurate to 2**-9 only, so the weights may be rounded likewise.
  precision = 'default' if maps[0].dtype == jnp.bfloat16 else 'highest'
  product = functools.partial(jnp.einsum, precision=precision)
  total = 0
  for level, x in enumerate(maps):
    h, w = x.shape[1:3]
    ours = jnp.where((levels == level)[..., None, None], rows[..., :h], 0)
    pooled = product('brph,bhwc->brpwc', ours, x.astype(jnp.float32))
    total += product('brqw,brpwc->brpqc', columns[..., :w], pooled)
  return total


@jax.custom_vjp
def _contract_windows(rows, columns, levels, maps) -> jax.Array:
  """Computes `_contract_whole` from the windows of a map in which a box has weights.

  It visits one box after another, so it needs no memory for others. A sum has fewer terms
  than over the whole map, all others being 0: results differ by the rounding of float32.
  """
  C, window = maps[0].shape[-1], _window(rows, columns)
  maps = [_pad(x, window) for x in maps]
  sizes = np.array([x.shape[1:3] for x in maps])

  def pool(box):
    image, level, rows, columns = box
    cut = lambda x: lambda y, z: lax.dynamic_slice(x, (image, y, z, 0), (1, *window, C))

    def add(total, start, rows, columns):
      cells = lax.switch(level, [cut(x) for x in maps], *start)[0]
      part = jnp.einsum('ph,hwc->pwc', rows, cells.astype(jnp.float32))
      return total + jnp.einsum('qw,pwc->pqc', columns, part)

    zeros = jnp.zeros((len(rows), len(columns), C), jnp.float32)
    return _over_windows(add, zeros, rows, columns, jnp.take(sizes, level, axis=0))

  pooled = lax.map(pool, (*_list_boxes(levels), *_flatten(rows, columns)))
  return pooled.reshape(*rows.shape[:2], *pooled.shape[1:])


def _contract_forward(*arguments):
  return _contract_windows(*arguments), arguments


def _contract_backward(residuals, gradient):
  """Returns the gradients of the maps; none reaches the weights, see `roi_align`."""
  rows, columns, levels, maps = residuals
  window = _window(rows, columns)
  boxes = (*_list_boxes(levels), *_flatten(rows, columns, gradient))

  def gradient_of(level, x):
    padded = _pad(x, window)

    def visit(total, box):
      image, its_level, rows, columns, gradient = box

      def add(total, start, rows, columns):
        part = jnp.einsum('qw,pqc->pwc', columns, gradient)
        part = jnp.einsum('ph,pwc->hwc', rows, part)
        start = image, *start, 0
        cells = lax.dynamic_slice(total, start, (1, *part.shape))
        return lax.dynamic_update_slice(total, cells + part, start)

      rows = jnp.where(its_level == level, rows, 0)
      return _over_windows(add, total, rows, columns, padded.shape[1:3]), None

    total, _ = lax.scan(visit, jnp.zeros(padded.shape, jnp.float32), boxes)
    return total[:, : x.shape[1], : x.shape[2]].astype(x.dtype)

  return None, None, None, tuple(gradient_of(i, x) for i, x in enumerate(maps))


_contract_windows.defvjp(_contract_forward, _contract_backward)
_contract = choose_by_platform(cpu=_contract_windows, default=_contract_whole)


def _window(rows, columns) -> tuple[int, int]:
  return min(_WINDOW, rows.shape[-1]), min(_WINDOW, columns.shape[-1])


def _pad(x: jax.Array, window: tuple[int, int]) -> jax.Array:
  """Pads a map that is smaller than a window."""
  more = [(0, max(n - m, 0)) for n, m in zip(window, x.shape[1:3], strict=True)]
  return jnp.pad(x, [(0, 0), *more, (0, 0)])


def _list_boxes(levels: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the image and the level of each box, int [B R]."""
  B, R = levels.shape
  return jnp.repeat(jnp.arange(B), R), levels.reshape(-1)


def _flatten(*arrays):
  return [x.reshape(-1, *x.shape[2:]) for x in arrays]


def _over_windows(add, total, rows, columns, size):
  """Calls `total = add(total, start, rows, columns)` for each window with weights of a box.

  Args:
    add: function of the total, the window's first cell (y, x), and its weights.
    rows, columns: weights of one box, [P, h] and [Q, w].
    size: (height, width) of the map, at least of a window.
  """
  window = _window(rows, columns)
  first_row, number = _covered(rows, window[0])
  first_column, across = _covered(columns, window[1])

  def step(k, total):
    y, ours = _cut(rows, first_row + k // across * window[0], window[0], size[0])
    x, its = _cut(columns, first_column + k % across * window[1], window[1], size[1])
    return add(total, (y, x), ours, its)

  return lax.fori_loop(0, number * jnp.maximum(across, 1), step, total)


def _covered(weights: jax.Array, side: int) -> tuple[jax.Array, jax.Array]:
  """Returns the first cell with a weight, and the number of windows up to the last."""
  cells = (weights != 0).any(0)
  first, last = jnp.argmax(cells), len(cells) - jnp.argmax(cells[::-1])
  return first, jnp.where(cells.any(), (last - first + side - 1) // side, 0)


def _cut(weights: jax.Array, first: jax.Array, side: int, length):
  """Cuts out a window's weights; returns (the window's first cell, weights).

  A window at the end of the map starts before `first`, with weights of 0.
  """
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
