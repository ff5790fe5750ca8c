"""Colours of the boxes that the queries of a detector predict."""

import numpy as np


def slot_colours(sizes: np.ndarray, small: float, large: float) -> np.ndarray:
  """Returns colours [..., 3] in [0, 1] by the sizes of boxes, as in figure 7 of DETR.

  Small boxes are green, large wide ones red, large tall ones blue (arXiv 2005.12872); the
  paper gives no formula. Here green falls linearly with the square root of the area, from
  1 at `small` to 0 at `large`. The rest is red for boxes at least twice as wide as tall,
  blue for those at least twice as tall as wide, and in between it is shared by the
  logarithm of width / height. The largest of the three is then made 1.

  Args:
    sizes: [..., 2], widths and heights, as fractions of the image.
    small, large: square roots of areas, small < large.
  """
  sides = np.maximum(np.asarray(sizes, np.float64), 1e-6)
  side = np.sqrt(sides.prod(-1))
  green = np.clip((large - side) / (large - small), 0, 1)
  ratio = np.log2(sides[..., 0] / sides[..., 1])
  red = np.clip((1 + ratio) / 2, 0, 1)
  colours = np.stack([(1 - green) * red, green, (1 - green) * (1 - red)], -1)
  return colours / colours.max(-1, keepdims=True)
