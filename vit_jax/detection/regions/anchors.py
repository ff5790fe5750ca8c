"""Anchors: boxes of a few sizes and aspect ratios around every position of a map.

"Faster R-CNN", arXiv 1506.01497, section 3.1.1; one size for each level of a pyramid in
arXiv 1612.03144, section 4.1.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def cell(
  sizes: Sequence[float], ratios: Sequence[float], rounded: bool = False
) -> np.ndarray:
  """Returns the anchors around one position, [A, 4] corners relative to it.

  Args:
    sizes: square roots of the areas, in pixels. In the result, the ratio changes faster than
      the size.
    ratios: heights divided by widths.
  """
  s, r = np.meshgrid(np.float64(sizes), np.float64(ratios), indexing='ij')
  half = np.stack([s / np.sqrt(r), s * np.sqrt(r)], -1).reshape(-1, 2) / 2
  corners = np.concatenate([-half, half], 1)
  return (corners.round() if rounded else corners).astype(np.float32)


def anchors(
  grid: tuple[int, int],
  strides: tuple[float, float],
  cell: np.ndarray,
  offset: float = 0.0,
) -> jax.Array:
  """Returns the anchors of a level, float32 [h w A, 4], ordered by row, column and `cell`.

  A program computes them, because some 200,000 anchors would be most of its text.

  Args:
    strides: pixels between two positions, vertically and horizontally.
    cell: [A, 4], the anchors around one position, from the function `cell`.
    offset: position within a cell of the map: 0 for the corner, 0.5 for the centre.
  """
  y, x = (
    (jnp.arange(n, dtype=jnp.float32) + offset)[:, None] * stride
    for n, stride in zip(grid, strides, strict=True)
  )
  # Flat rows: TPUs need long code to merge axes as short as the last ones of [h, w, A, 4].
  along = lambda k: (x + cell[:, k]).reshape(1, -1)  # [1, w A]
  beside = lambda k: y + jnp.tile(cell[:, k], grid[1])  # [h, w A]
  corners = along(0), beside(1), along(2), beside(3)
  shape = grid[0], grid[1] * len(cell)
  return jnp.stack([jnp.broadcast_to(c, shape).reshape(-1) for c in corners], -1)
