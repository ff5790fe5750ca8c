"""Crops masks to boxes for training, and pastes predicted masks into images."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.detection.regions.bins import bin_weights


def targets(
  masks: jax.Array,
  extents: jax.Array,
  boxes: jax.Array,
  index: jax.Array,
  size: jax.Array,
  bins: int,
  aligned: bool = True,
) -> jax.Array:
  """Returns the share of each bin that the box's mask covers, [R, bins, bins].

  This is RoIAlign of the masks with one sample per cell, as detectron2's
  `BitMasks.crop_and_resize`, which then thresholds at 0.5.

  Args:
    masks: [N, h, w], float or bool, or uint8 where 255 stands for 1.
    extents: corners [N, 4] of the region that a mask's array spans: the whole image, or
      the box of the object. Outside of it the mask is 0.
    boxes: corners [R, 4].
    index: int [R], the mask of each box.
    size: height and width of the image, [2].
    bins: bins along each side of a box.
    aligned: as in `roi_align`.
  """
  scale = 1 / 255 if masks.dtype == jnp.uint8 else 1
  extents = extents[index]
  height, width = masks.shape[1:]
  cells = jnp.array([width, height], jnp.float32)
  length = extents[:, 2:] - extents[:, :2]
  # Exactly 1 where a mask spans the whole image; the quotient could be off by a rounding.
  per_pixel = jnp.where(length == cells, 1, cells / jnp.where(length > 0, length, 1))
  # Unaligned boxes are off by half a pixel of the image, whatever the size of a cell.
  shift = 0 if aligned else (per_pixel - 1) / 2
  low = (boxes[:, :2] - extents[:, :2]) * per_pixel + shift  # [R, 2]
  high = (boxes[:, 2:] - extents[:, :2]) * per_pixel + shift
  # Extents that reach the border of the image, but for rounding.
  starts = extents[:, :2] < 1e-2
  ends = extents[:, 2:] > size[::-1] - 1e-2
  x, y = ((low[:, i], high[:, i], starts[:, i], ends[:, i]) for i in (0, 1))
  columns = _weights(*x, width, bins, aligned)
  rows = _weights(*y, height, bins, aligned)
  # Apart from their products, which take long to compile for a TPU with weights inside.
  columns, rows = jax.lax.optimization_barrier((columns, rows))
  chosen = masks[index].astype(jnp.float32)
  pooled = jnp.einsum('rph,rhw->rpw', rows, chosen, precision='highest')
  return scale * jnp.einsum('rqw,rpw->rpq', columns, pooled, precision='highest')


def _weights(low, high, at_start, at_end, cells: int, bins: int, aligned: bool):
  """Returns the weight of each cell in each bin of one axis, [R, bins, cells].

  A sample beyond the border of the image takes the outermost cell, as RoIAlign does. Beyond
  an extent that ends before the border there is a margin of zeros.
  """
  clamped = bin_weights(low, high, cells, bins, aligned=aligned)
  around = bin_weights(low + 1, high + 1, cells + 2, bins, aligned=aligned)
  cell = jnp.arange(cells)
  margin = (cell == 0) & ~at_start[:, None]
  margin |= (cell == cells - 1) & ~at_end[:, None]
  return jnp.where(margin[:, None], around[..., 1:-1], clamped)


def paste(
  masks: np.ndarray, boxes: np.ndarray, size: tuple[int, int], grow: bool = False
) -> np.ndarray:
  """Stretches masks over their boxes and thresholds them at 0.5; returns bool [n, H, W].

  Interpolates bilinearly between the centres of cells; outside of its box a mask is 0. This
  is detectron2's `paste_masks_in_image`, in NumPy, one mask at a time.

  Args:
    masks: probabilities [n, m, m].
    boxes: corners [n, 4] in pixels of the image.
    grow: whether a mask and its box first grow by a cell on each side, and the box is
      rounded to whole pixels. This is torchvision's `paste_masks_in_image`.
  """
  if grow:
    masks, cells = np.pad(masks, ((0, 0), (1, 1), (1, 1))), masks.shape[-1]
    low, high = np.split(np.asarray(boxes, np.float32), 2, 1)
    half = (high - low) / 2 * np.float32((cells + 2) / cells)
    centre = (high + low) / 2
    low, high = np.trunc(centre - half), np.trunc(centre + half) + 1
    boxes = np.concatenate([low, high], 1)
  result = np.zeros((len(masks), *size), bool)
  for canvas, mask, box in zip(result, masks, boxes, strict=True):
    left, top, right, bottom = box
    rows, y = _stretch(top, bottom, size[0], len(mask))
    columns, x = _stretch(left, right, size[1], len(mask))
    around = np.pad(mask.astype(np.float32), 1)
    canvas[rows, columns] = _interpolate(_interpolate(around, y).T, x).T >= 0.5
  return result


def _stretch(low, high, pixels, cells):
  """Returns the pixels that a box touches, a slice, and their positions in cells.

  Positions count a margin of one cell on each side of the mask.
  """
  # Pixels outside of the box are left out: there a mask is always below one half.
  first, last = max(int(np.floor(low)), 0), min(int(np.ceil(high)), pixels)
  if not low < high or first >= last:
    return slice(0, 0), np.zeros(0, np.float32)
  centres = np.arange(first, last, dtype=np.float32) + np.float32(0.5)
  place = (centres - low) / (high - low) * cells + 0.5
  return slice(first, last), np.clip(place, 0, cells + 1).astype(np.float32)


def _interpolate(x, place):
  """Interpolates x [n, m] linearly at rows `place` [p]; returns [p, m]."""
  # A matrix product would be slower, because starting its threads takes longer.
  row = np.minimum(place.astype(int), len(x) - 2)
  part = (place - row)[:, None]
  return (1 - part) * x[row] + part * x[row + 1]
