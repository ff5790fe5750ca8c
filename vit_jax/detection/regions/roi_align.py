"""RoIAlign: the mean of bilinear samples in each bin of a box (arXiv 1703.06870).

The arithmetic of detectron2's `ROIAlignV2` and of `torchvision.ops.roi_align`, edge rules
included. Interpolation along y and along x are independent, so the bins of a box are
Wy F Wx^T exactly, with one matrix of weights for each axis. Products need no gather and
no scatter, and every number of samples costs the same.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.detection.regions.origins import ORIGINS

# Samples of an adaptive bin are more than half a cell apart, so at most five of them lie
# within one cell of a row; one more covers rounding.
_NEAR = 6


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

  No gradient reaches the boxes.

  Args:
    maps: one [B, h, w, C] for each level.
    boxes: corners [B, R, 4] in pixels. A box that is not finite gives no finite bins.
    strides: pixels of a cell of each map.
    samples: samples along each axis of a bin. 0 takes one for each cell that a bin covers,
      rounded up, so that a box without area gives 0.
    aligned: whether pixel centres are at half numbers. Without it every box is moved by
      half a cell, and made at least one cell long.
    levels: int [B, R], the map of each box; see `level_of`. The default is the first map.

  Returns:
    [B, R, size, size, C] in the dtype of the maps.
  """
  boxes = jax.lax.stop_gradient(boxes.astype(jnp.float32))
  total = 0
  for level, (x, stride) in enumerate(zip(maps, strides, strict=True)):
    scaled = boxes * (1 / stride)
    weights = lambda axis, x=x, scaled=scaled: bin_weights(
      scaled[..., 1 - axis], scaled[..., 3 - axis], x.shape[1 + axis], size,
      samples, aligned,
    )  # fmt: skip
    rows, columns = weights(0), weights(1)
    if levels is not None:
      rows = jnp.where((levels == level)[..., None, None], rows, 0)
    x32 = x.astype(jnp.float32)
    pooled = jnp.einsum('brph,bhwc->brpwc', rows, x32, precision='highest')
    total += jnp.einsum('brqw,brpwc->brpqc', columns, pooled, precision='highest')
  return total.astype(maps[0].dtype)


def bin_weights(
  low: jax.Array,
  high: jax.Array,
  cells: int,
  size: int,
  samples: int = 0,
  aligned: bool = True,
) -> jax.Array:
  """Returns float32 [..., size, cells]: the weight of each cell in each bin of one axis.

  A sample beyond the outermost cells by more than one cell's length counts as 0; a nearer
  one takes the outermost cell.

  Args:
    low, high: float32 [...], the ends of the boxes in cells. samples, aligned: as in
      `roi_align`.
  """
  expand = lambda x: x[..., None, None]
  length = high - low
  start = low - 0.5 if aligned else low
  length = length if aligned else jnp.maximum(length, 1)
  width = expand(length / size)
  bins = expand(start) + jnp.arange(size, dtype=jnp.float32)[:, None] * width
  cell = jnp.arange(cells, dtype=jnp.float32)
  if samples:
    number, first = jnp.full_like(width, samples), 0.0
  else:
    number = expand(_cover(length, size))
    step = jnp.where(number > 0, width / jnp.maximum(number, 1), 1)
    first = jnp.maximum(jnp.floor((cell - 1 - bins) / step - 0.5), 0)
  total = 0.0
  for i in range(samples or _NEAR):
    sample = first + i
    place = bins + (sample + 0.5) * width / jnp.maximum(number, 1)
    counts = (sample < number) & (place >= -1) & (place <= cells)
    hat = 1 - jnp.abs(jnp.clip(place, 0, cells - 1) - cell)
    total += jnp.where(counts, jnp.maximum(hat, 0), 0)
  return total / jnp.maximum(number, 1)


def _cover(length, size):
  """Returns ceil(length / size), at least 0, without the rounding of the division.

  A multiple of `size` must not round up: that is one more sample in every bin.
  """
  low = jnp.maximum(jnp.floor(length / size), 0)
  return low + (length > low * size) + (length > (low + 1) * size)


def level_of(
  boxes: jax.Array,
  finest: int,
  coarsest: int,
  canonical: tuple[float, int] = (224, 4),
  origin: str = 'detectron2',
) -> jax.Array:
  """Returns the level of each box as int [...], 0 for the finest.

  floor(level + log2(sqrt(area) / size)) within the given levels: FPN, arXiv 1612.03144,
  equation 1. It compares the side with powers of two, as a logarithm would round.

  Args:
    boxes: corners [..., 4]. finest, coarsest: the levels, such as 2 and 5.
    canonical: (size, level): boxes of size x size pixels belong to that level.
    origin: a key of `ORIGINS`, for the numbers that guard against rounding.
  """
  size, level = canonical
  details = ORIGINS[origin]
  powers = 2.0 ** (np.arange(finest + 1, coarsest + 1) - level - details.late_epsilon)
  sides = (size * (powers - details.level_epsilon)).astype(np.float32)
  lengths = jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0)
  side = jnp.sqrt(lengths[..., 0] * lengths[..., 1])
  return jnp.sum(side[..., None] >= sides, -1, dtype=jnp.int32)
