"""Masks as pycocotools has them: {'size': [H, W], 'counts': bytes}, run lengths.

The lengths are of the runs of pixels down the first column, down the second, and so on,
the first run of zeros (it may be empty), the next of ones.
"""

import warnings

import numpy as np


def encode(mask: np.ndarray) -> dict:
  """Returns the run lengths of a mask, bool [H, W]."""
  from pycocotools import mask as mask_lib

  return mask_lib.encode(np.asfortranarray(mask, np.uint8))


def decode(runs: dict) -> np.ndarray:
  """Returns the mask, bool [H, W]; ValueError for run lengths beyond its last pixel."""
  from pycocotools import mask as mask_lib

  with warnings.catch_warnings():  # its arrays do not know NumPy 2's `copy`
    warnings.simplefilter('ignore', DeprecationWarning)
    return mask_lib.decode(runs).astype(bool)


def read(segmentation, height: int, width: int, farthest: int) -> dict:
  """Returns the run lengths of a 'segmentation' in COCO's JSON.

  Run lengths and corners are checked first, because pycocotools trusts its input.

  Args:
    segmentation: polygons [[x, y, x, y, x, y, ...], ...], or {'size', 'counts'} with
      counts as a list or compressed.
    farthest: the largest coordinate of a corner; an outline takes memory in proportion to
      its length.

  Raises:
    ValueError, TypeError, KeyError, OverflowError: for anything else.
  """
  from pycocotools import mask as mask_lib

  if isinstance(segmentation, dict):
    size, counts = list(segmentation['size']), segmentation['counts']
    if size != [height, width]:
      raise ValueError(f'its size is {size}, the image has {[height, width]}')
    if isinstance(counts, str):
      runs = {'size': size, 'counts': counts.encode('ascii')}
      decode(runs)
      return runs
    counts = np.array(counts, np.int64)
    if counts.ndim != 1 or (counts < 0).any() or counts.sum() != height * width:
      raise ValueError(f'run lengths that are not those of {height} x {width} pixels')
    runs = {'size': size, 'counts': counts.tolist()}
    return mask_lib.frPyObjects(runs, height, width)
  corners = [np.array(part, np.float64).reshape(-1, 2) for part in segmentation]
  if not corners or min(map(len, corners)) < 3:
    raise ValueError('a polygon has three corners or more')
  if not all(
    (np.abs(part) <= farthest).all() for part in corners
  ):  # NaN is not, either
    raise ValueError(f'a corner is not within {farthest:,} pixels')
  polygons = [part.reshape(-1).tolist() for part in corners]
  return mask_lib.merge(mask_lib.frPyObjects(polygons, height, width))
