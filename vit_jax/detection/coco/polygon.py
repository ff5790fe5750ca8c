"""Polygons to masks, pixel for pixel as pycocotools does it (`rleFrPoly`).

COCO's ground truth is polygons, and the areas and intersections of its masks depend on how
their edges fall on pixels, so the metric asks for this rule and no other:

  The corners are rounded to a grid of 5 x 5 points a pixel, the edges to points of that
  grid, one for each step along the longer side. Wherever the outline goes from one column
  of points to the next at the centre of a column of pixels, the mask changes its value from
  the first pixel there whose centre is not above the outline.
"""

import numpy as np

from vit_jax.detection.coco import rle

_SCALE = 5


def counts(corners: np.ndarray, height: int, width: int) -> np.ndarray:
  """Returns the run lengths of a polygon's mask; parts outside the image are cut off.

  Args:
    corners: float [n, 2], x and y, in pixels; (0, 0) is the image's top left corner.
  """
  x, y = _outline(_whole(_SCALE * np.asarray(corners, np.float64) + 0.5))
  steps = np.flatnonzero(np.diff(x))
  column = np.minimum(x[steps], x[steps + 1])
  row = np.minimum(y[steps], y[steps + 1])
  centre = (column - _SCALE // 2) % _SCALE == 0
  column = (column - _SCALE // 2) // _SCALE
  keep = centre & (column >= 0) & (column < width)
  row = np.ceil(np.clip((row[keep] + 0.5) / _SCALE - 0.5, 0, height))
  pixels, times = np.unique(column[keep] * height + _whole(row), return_counts=True)
  toggles = pixels[(times % 2 == 1) & (pixels < height * width)]
  return rle.from_toggles(toggles, height * width)


def _outline(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns (x, y), the points of the grid along the closed outline, both ends of edges."""
  start, end = corners, np.roll(corners, -1, axis=0)
  span = np.abs(end - start)
  length = span.max(1)  # steps of an edge
  along = (span[:, 0] < span[:, 1]).astype(int)  # its longer side: 0 is x, 1 is y
  edge = np.repeat(np.arange(len(corners)), length + 1)
  step = np.arange(len(edge)) - np.repeat(
    np.cumsum(length + 1) - length - 1, length + 1
  )
  # An edge is walked from its lower end, whichever way the outline runs: rounding must
  # not depend on the way.
  rows = np.arange(len(corners))
  back = start[rows, along] > end[rows, along]
  low, high = np.where(back[:, None], [end, start], [start, end])
  step = np.where(back[edge], length[edge] - step, step)
  slope = (high - low) / np.maximum(length, 1)[:, None]
  points = low[edge] + slope[edge] * step[:, None]
  # Of the longer side exact; the other is rounded.
  longer = np.arange(2) == along[edge, None]
  points = np.where(longer, low[edge] + step[:, None], _whole(points + 0.5))
  return points[:, 0], points[:, 1]


def _whole(x: np.ndarray) -> np.ndarray:
  return x.astype(np.int64)  # towards zero
