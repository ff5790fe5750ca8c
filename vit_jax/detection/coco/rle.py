"""Masks as run lengths, the form in which COCO stores them.

A mask [H, W] is `counts`, int64: the lengths of its runs of pixels down the first column,
down the second, and so on, the first run of zeros (it may be empty), the next of ones.
Nothing here decodes a mask to compare it: areas and intersections follow from the runs.
"""

from collections.abc import Sequence

import numpy as np

_BITS = 5  # of a number in a character of the compressed form; the sixth: more follow


def encode(mask: np.ndarray) -> np.ndarray:
  """Returns the counts of a mask, bool [H, W]."""
  pixels = np.asarray(mask, bool).T.reshape(-1)
  return from_toggles(np.flatnonzero(np.diff(pixels, prepend=False)), pixels.size)


def from_toggles(toggles: np.ndarray, size: int) -> np.ndarray:
  """Returns the counts of a mask of `size` pixels whose value changes at `toggles`.

  Args:
    toggles: ascending indices of pixels, each the first of a new run.
  """
  return np.diff(toggles, prepend=0, append=size)


def decode(counts: np.ndarray, height: int, width: int) -> np.ndarray:
  """Returns a mask, bool [height, width]."""
  pixels = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
  return pixels.reshape(width, height).T


def of_string(text: str) -> np.ndarray:
  """Returns the counts of the compressed form.

  From the fourth on a count is stored as its difference from the one two before it, each
  number in 5 bits per character, the lowest first, in two's complement: pycocotools'
  `rleFrString`.

  Raises:
    ValueError: for text that is not of this form.
  """
  codes = np.frombuffer(text.encode('ascii', 'replace'), np.uint8).astype(np.int64) - 48
  if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
    raise ValueError('not the text of run lengths')
  last = codes & 32 == 0  # of its number
  number = np.cumsum(last) - last
  start = np.flatnonzero(np.concatenate([[True], last[:-1]]))
  place = _BITS * (np.arange(len(codes)) - start[number])
  if place.max() > 7 * _BITS:
    raise ValueError('a run length of more than 40 bits')
  values = np.add.reduceat((codes & 31) << place, start)
  negative = codes[last] & 16 > 0
  counts = values - np.where(negative, 1 << (place[last] + _BITS), 0)
  for first in (1, 2):  # undoes the differences, of odd places and of even ones
    counts[first::2] = np.cumsum(counts[first::2])
  return counts


def to_string(counts: np.ndarray) -> str:
  """Returns the compressed form of counts; the inverse of `of_string`."""
  counts = np.asarray(counts, np.int64)
  numbers = counts.copy()
  numbers[3:] -= counts[1:-2]
  out = []
  for number in numbers.tolist():
    more = True
    while more:
      code, number = number & 31, number >> _BITS
      more = number != (-1 if code & 16 else 0)
      out.append(chr(48 + code + 32 * more))
  return ''.join(out)


def check(counts: np.ndarray, height: int, width: int) -> np.ndarray:
  """Returns counts that fit a size; ValueError for others."""
  if counts.ndim != 1 or (counts < 0).any() or counts.sum() != height * width:
    raise ValueError(
      f'run lengths of {counts.sum()} pixels, for a mask of {height} x {width}'
    )
  return counts


def area(counts: np.ndarray) -> int:
  """Returns the number of ones."""
  return int(counts[1::2].sum())


def union(masks: Sequence[np.ndarray]) -> np.ndarray:
  """Returns the counts of the union of masks of one size."""
  first, *others = masks
  for other in others:
    edges = np.unique(np.concatenate([[0], np.cumsum(first), np.cumsum(other)]))
    starts = edges[:-1]
    inside = _value(first, starts) | _value(other, starts)
    changes = np.flatnonzero(np.diff(inside, prepend=False))
    first = from_toggles(starts[changes], int(edges[-1]))
  return first


def intersections(
  masks: Sequence[np.ndarray], others: Sequence[np.ndarray]
) -> np.ndarray:
  """Returns the pixels that masks have in common, float64 [len(masks), len(others)]."""
  out = np.zeros((len(masks), len(others)))
  lengths = [len(counts) // 2 for counts in masks]
  # Without a one, reduceat below would have nothing to add up.
  rows = [i for i, n in enumerate(lengths) if n]
  if not rows:
    return out
  ends = [np.cumsum(masks[i]) for i in rows]
  starts = np.concatenate([e[0 : 2 * (len(e) // 2) : 2] for e in ends])
  stops = np.concatenate([e[1::2] for e in ends])
  first = np.cumsum([0, *(lengths[i] for i in rows[:-1])])
  for column, counts in enumerate(others):
    # The ones before a pixel: linear within a run, so exact between its ends.
    edges = np.concatenate([[0], np.cumsum(counts)])
    ones = np.concatenate([[0], np.cumsum(counts * (np.arange(len(counts)) % 2))])
    common = np.interp(stops, edges, ones) - np.interp(starts, edges, ones)
    out[rows, column] = np.add.reduceat(common, first)
  return np.rint(out)


def iou(
  masks: Sequence[np.ndarray], truths: Sequence[np.ndarray], crowd: np.ndarray
) -> np.ndarray:
  """Returns float64 [D, G]: as `average_precision.box_iou`, of masks."""
  common = intersections(masks, truths)
  own = np.array([area(m) for m in masks], np.float64)[:, None]
  theirs = np.array([area(m) for m in truths], np.float64)[None]
  whole = np.where(crowd[None], own, own + theirs - common)
  return np.divide(common, whole, out=np.zeros_like(common), where=common > 0)


def _value(counts: np.ndarray, pixels: np.ndarray) -> np.ndarray:
  return np.searchsorted(np.cumsum(counts), pixels, 'right') % 2 == 1
