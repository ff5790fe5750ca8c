"""Masks as pycocotools has them: {'size': [H, W], 'counts': bytes}, run lengths.

The lengths are of the runs of pixels down the first column, down the second, and so on,
the first run of zeros (it may be empty), the next of ones.
"""

import numpy as np

_FAR = 1_000_000  # pixels: pycocotools takes 80 bytes for each of an outline's length


def encode(mask: np.ndarray) -> dict:
  """Returns the run lengths of a mask, bool [H, W]."""
  from pycocotools import mask as mask_lib

  return mask_lib.encode(np.asfortranarray(mask, np.uint8))


def read(segmentation, height: int, width: int) -> dict:
  """Returns the run lengths of a 'segmentation' in COCO's JSON.

  Run lengths and corners are checked first, because pycocotools trusts its input. It
  counts the pixels of an image in 32 bits.

  Args:
    segmentation: polygons [[x, y, x, y, x, y, ...], ...], or {'size', 'counts'} with
      counts as a list or compressed.

  Raises:
    ValueError, TypeError, KeyError, OverflowError: for anything else.
  """
  from pycocotools import mask as mask_lib

  if isinstance(segmentation, dict):
    size, counts = list(segmentation['size']), segmentation['counts']
    if size != [height, width]:
      raise ValueError(f'its size is {size}, the image has {[height, width]}')
    counts = _lengths(counts) if isinstance(counts, str) else list(counts)
    whole = min(counts) >= 0 and not any(n % 1 for n in counts)
    if not whole or sum(counts) != height * width:
      raise ValueError(f'its run lengths do not fill {height} x {width} pixels')
    return mask_lib.frPyObjects({'size': size, 'counts': counts}, height, width)
  corners = [np.array(part, np.float64).reshape(-1, 2) for part in segmentation]
  with np.errstate(over='ignore', invalid='ignore'):  # the length will not be finite
    # From the origin around each polygon.
    steps = [np.diff(part, axis=0, prepend=0, append=part[:1]) for part in corners]
    length = sum(np.abs(each).max(1).sum() for each in steps)
  if not corners or min(map(len, corners)) < 3 or not length <= _FAR:
    raise ValueError(
      f'a polygon has three corners or more, and outlines have {_FAR:,} pixels at most'
    )
  polygons = [part.reshape(-1).tolist() for part in corners]
  return mask_lib.merge(mask_lib.frPyObjects(polygons, height, width))


def _lengths(text: str) -> list[int]:
  """Returns the run lengths of COCO's compressed form.

  A character holds 5 bits above its code of 48, the lowest first, and a sixth where the
  number goes on. From the fourth number on, it is the difference to the last but one.
  """
  lengths, value, shift = [], 0, 0
  for code in text.encode('ascii'):
    value |= (code - 48 & 31) << shift
    shift += 5
    if not code - 48 & 32:
      value -= (value >> shift - 1) << shift  # the highest bit is the sign
      lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
      value = shift = 0
    elif shift > 30:
      raise ValueError('its run lengths are too long')
  return lengths
