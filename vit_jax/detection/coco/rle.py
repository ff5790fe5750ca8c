"""Masks as run lengths, in the format of pycocotools.

A mask is {'size': [H, W], 'counts': bytes}.
Pixels are read down the first column, then down the second, and so on. The lengths are
those of runs of equal pixels. The first run is of zeros (it may be empty), the next is of
ones, and so on.
"""

from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError

# Maximum number of characters that a number has in the compressed form.
_CHARACTERS = 7
# Maximum length of outlines in pixels, because pycocotools takes 80 bytes for each pixel.
_FAR = 1_000_000


def encode(mask: np.ndarray) -> dict:
  """Encodes a mask, bool [H, W], as run lengths, without pycocotools."""
  columns = np.flatnonzero(mask.any(0))
  first, last = (columns[0], columns[-1] + 1) if len(columns) else (0, 0)
  pixels = mask[:, first:last].T.reshape(-1)
  toggles = np.flatnonzero(np.diff(pixels, prepend=False, append=False))
  toggles = (toggles + first * len(mask)).tolist()
  ends = [n for n in toggles if n < mask.size] + [mask.size]
  lengths = np.diff(ends, prepend=0).tolist()
  codes = bytearray()
  for i, length in enumerate(lengths):
    value, more = length - (lengths[i - 2] if i > 2 else 0), True
    while more:
      code, value = value & 31, value >> 5
      more = value != (-1 if code & 16 else 0)
      codes.append(code + 48 + 32 * more)
  return {'size': [*mask.shape], 'counts': bytes(codes)}


def decode(runs: dict) -> np.ndarray:
  """Decodes run lengths to a mask, bool [H, W]; the inverse of `encode`."""
  height, width = runs['size']
  counts = runs['counts']
  lengths = _lengths(counts.encode() if isinstance(counts, str) else counts)
  pixels = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
  return pixels.reshape(width, height).T


def areas(masks: Sequence[dict]) -> np.ndarray:
  """Counts the pixels of each mask, int64 [n]."""
  # Count one mask at a time, because pycocotools 2.0.11 fails for more than 255.
  return np.array([library().area(mask) for mask in masks], np.int64)


def read(segmentation, height: int, width: int) -> dict:
  """Reads a 'segmentation' of COCO's JSON as run lengths.

  Checks run lengths and corners first, because pycocotools trusts its input and counts
  pixels in 32 bits.

  Args:
    segmentation: polygons [[x, y, x, y, x, y, ...], ...], or {'size', 'counts'} with
      counts as a list or compressed.

  Raises:
    ValueError, TypeError, KeyError, OverflowError: for anything else.
  """
  mask_lib = library()
  if isinstance(segmentation, dict):
    size, counts = list(segmentation['size']), segmentation['counts']
    if size != [height, width]:
      raise ValueError(f'its size is {size}, but the image has {[height, width]}')
    counts = (
      _lengths(counts.encode('ascii')) if isinstance(counts, str) else list(counts)
    )
    whole = min(counts) >= 0 and not any(n % 1 for n in counts)
    if not whole or sum(counts) != height * width:
      raise ValueError(f'its run lengths do not fill {height} x {width} pixels')
    return mask_lib.frPyObjects({'size': size, 'counts': counts}, height, width)
  corners = [np.array(part, np.float64).reshape(-1, 2) for part in segmentation]
  # Overflow makes the length infinite or NaN, which the check below refuses.
  with np.errstate(over='ignore', invalid='ignore'):
    # Steps from the origin to the first corner, then around each polygon.
    steps = [np.diff(part, axis=0, prepend=0, append=part[:1]) for part in corners]
    length = sum(np.abs(each).max(1).sum() for each in steps)
  if not corners or min(map(len, corners)) < 3 or not length <= _FAR:
    raise ValueError(
      f'expected polygons of at least three corners, and outlines of at most {_FAR:,} pixels'
    )
  polygons = [part.reshape(-1).tolist() for part in corners]
  return mask_lib.merge(mask_lib.frPyObjects(polygons, height, width))


def _lengths(text: bytes) -> list[int]:
  """Decodes COCO's compressed run lengths.

  A number takes one or more characters, lowest bits first. A character is 48 plus 5 bits
  of the number, plus 32 if another character follows. From the fourth number on, the
  difference to the number two places before is stored.
  """
  codes = np.frombuffer(text, np.uint8).astype(np.int64) - 48
  last = np.flatnonzero(codes & 32 == 0)
  first = np.concatenate([[0], last[:-1] + 1])
  sizes = last - first + 1 if len(last) else np.array([len(codes)])
  if sizes.sum() < len(codes) or sizes.max() > _CHARACTERS or not len(last):
    raise ValueError('its run lengths are incomplete or too long')
  place = np.arange(len(codes)) - np.repeat(first, sizes)
  lengths = np.add.reduceat((codes & 31) << 5 * place, first)
  # The highest bit of a number is its sign.
  lengths -= (lengths >> 5 * sizes - 1) << 5 * sizes
  for start in (1, 2):
    lengths[start::2] = np.cumsum(lengths[start::2])
  return lengths.tolist()


def library():
  """Imports pycocotools' module of masks; raises UserError without the package."""
  try:
    from pycocotools import mask
  except ImportError:
    raise UserError(
      "COCO's masks and metric need pycocotools: pip install 'vit_jax[detection]'."
    ) from None
  return mask
