"""Masks as pycocotools has them: {'size': [H, W], 'counts': bytes}, run lengths.

The lengths are of the runs of pixels down the first column, down the second, and so on,
the first run of zeros (it may be empty), the next of ones.
"""

import numpy as np

# Bits of a number in a character of the compressed form; the sixth says that more follow.
_BITS = 5


def encode(mask: np.ndarray) -> dict:
  """Returns the run lengths of a mask, bool [H, W]."""
  from pycocotools import mask as mask_lib

  return mask_lib.encode(np.asfortranarray(mask, np.uint8))


def read(segmentation, height: int, width: int, farthest: int) -> dict:
  """Returns the run lengths of a 'segmentation' in COCO's JSON.

  Everything is checked before it comes to pycocotools, which trusts its input.

  Args:
    segmentation: polygons [[x, y, x, y, x, y, ...], ...], or {'size', 'counts'} with
      counts as a list or compressed.
    farthest: the largest coordinate of a corner.

  Raises:
    ValueError, TypeError, KeyError, OverflowError: for anything else.
  """
  from pycocotools import mask as mask_lib

  if isinstance(segmentation, dict):
    if (size := list(segmentation['size'])) != [height, width]:
      raise ValueError(f'its size is {size}, the image has {[height, width]}')
    counts = segmentation['counts']
    text = isinstance(counts, str)
    counts = _of_string(counts) if text else np.array(counts, np.int64)
    if counts.ndim != 1 or (counts < 0).any() or counts.sum() != height * width:
      raise ValueError(
        f'run lengths of {counts.sum()} pixels, for a mask of {height} x {width}'
      )
    runs = {'size': [height, width], 'counts': counts.tolist()}
    return mask_lib.frPyObjects(runs, height, width)
  parts = [np.array(part, np.float64).reshape(-1, 2) for part in segmentation]
  if not parts or any(len(part) < 3 for part in parts):
    raise ValueError('a polygon has three corners or more')
  if not all((np.abs(part) <= farthest).all() for part in parts):  # NaN compares false
    raise ValueError(f'a corner is not within {farthest:,} pixels')
  polygons = [part.reshape(-1).tolist() for part in parts]
  return mask_lib.merge(mask_lib.frPyObjects(polygons, height, width))


def _of_string(text: str) -> np.ndarray:
  """Returns the counts of the compressed form, pycocotools' `rleFrString`.

  From the fourth on a count is stored as its difference from the one two before it, each
  number in 5 bits per character, the lowest first, in two's complement.
  """
  codes = np.frombuffer(text.encode('ascii', 'replace'), np.uint8).astype(np.int64) - 48
  if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
    raise ValueError('not the text of run lengths')
  last = codes & 32 == 0  # the last character of each number
  number = np.cumsum(last) - last
  start = np.flatnonzero(np.concatenate([[True], last[:-1]]))
  place = _BITS * (np.arange(len(codes)) - start[number])
  if place.max() > 7 * _BITS:
    raise ValueError('a run length of more than 40 bits')
  values = np.add.reduceat((codes & 31) << place, start)
  negative = codes[last] & 16 > 0
  counts = values - np.where(negative, 1 << (place[last] + _BITS), 0)
  for first in (1, 2):  # undoes the differences, those at odd places and at even ones
    counts[first::2] = np.cumsum(counts[first::2])
  return counts
