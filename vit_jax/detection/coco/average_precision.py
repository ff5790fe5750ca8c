"""COCO's twelve numbers, of boxes or masks, as pycocotools' COCOeval computes them.

The detections of an image and category, by falling score, each take the unmatched object
with the largest overlap at or above a threshold. An object that does not count, because it
is a crowd or outside the range of areas, is taken only if no other fits, a crowd by any
number of detections. A detection that takes one counts neither as correct nor as wrong, and
neither does an unmatched detection outside the range of areas.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.detection.coco import rle
from vit_jax.detection.coco.objects import Detections, Truth

KINDS = ('bbox', 'segm')
THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
# In pixels of the original image, both ends inside: 32 x 32, 96 x 96.
AREAS = {
  'all': (0, 1e10),
  'small': (0, 32**2),
  'medium': (32**2, 96**2),
  'large': (96**2, 1e10),
}
LIMITS = (1, 10, 100)  # detections of an image and category, by score
_ALL, _MOST = 0, -1

# name: (of precision or of recall, threshold or all, area, limit).
_NUMBERS = {
  'ap': ('precision', None, 'all', 100),
  'ap50': ('precision', 0, 'all', 100),
  'ap75': ('precision', 5, 'all', 100),
  'ap_small': ('precision', None, 'small', 100),
  'ap_medium': ('precision', None, 'medium', 100),
  'ap_large': ('precision', None, 'large', 100),
  'ar_1': ('recall', None, 'all', 1),
  'ar_10': ('recall', None, 'all', 10),
  'ar_100': ('recall', None, 'all', 100),
  'ar_small': ('recall', None, 'small', 100),
  'ar_medium': ('recall', None, 'medium', 100),
  'ar_large': ('recall', None, 'large', 100),
}
NAMES = tuple(_NUMBERS)


@dataclasses.dataclass(frozen=True)
class Measured:
  """Precision and recall of detections; -1 where there is no truth that counts.

  Attributes:
    precision: float64 [10 thresholds, 101 recalls, K, 4 areas, 3 limits].
    recall: float64 [10 thresholds, K, 4 areas, 3 limits], the highest reached.
  """

  precision: np.ndarray
  recall: np.ndarray

  def numbers(self) -> dict[str, float]:
    """Returns {name: number} of the twelve, in COCO's order; see NAMES."""
    return {name: self._mean(slice(None), *what) for name, what in _NUMBERS.items()}

  def of_category(self, k: int) -> dict[str, float]:
    """Returns the same of one category, by its place in `Truth.category_ids`."""
    one = slice(k, k + 1)
    return {name: self._mean(one, *what) for name, what in _NUMBERS.items()}

  def _mean(self, categories, measure, threshold, area, limit) -> float:
    rows = slice(None) if threshold is None else threshold
    values = getattr(self, measure)[rows][
      ..., categories, list(AREAS).index(area), LIMITS.index(limit)
    ]
    counted = values[values > -1]
    return float(counted.mean()) if counted.size else -1.0


def measure(truth: Truth, found: Detections, kind: str = 'bbox') -> Measured:
  """Returns precision and recall of detections in the images of a ground truth.

  Args:
    kind: 'bbox' compares boxes, and a detection's area is its box's; 'segm' compares masks,
      which both must have, and its area is the mask's. The areas of the truth are as
      annotated.
  """
  assert kind in KINDS, kind
  number = len(truth.category_ids)
  shape = (len(THRESHOLDS), number, len(AREAS), len(LIMITS))
  precision = np.full((shape[0], len(RECALLS), *shape[1:]), -1.0)
  recall = np.full(shape, -1.0)
  wanted = _groups(truth.category, truth.image, np.zeros(len(truth.category)))
  given = _groups(found.category, found.image, -found.scores)
  for k in range(number):
    images = sorted({*wanted.get(k, {}), *given.get(k, {})})
    none = np.zeros(0, np.int64)
    rows = [
      _of_image(
        truth,
        wanted.get(k, {}).get(image, none),
        found,
        given.get(k, {}).get(image, none)[: LIMITS[_MOST]],
        kind,
      )
      for image in images
    ]
    if rows:
      _accumulate(rows, precision[:, :, k], recall[:, k])
  return Measured(precision, recall)


def box_iou(boxes: np.ndarray, truths: np.ndarray, crowd: np.ndarray) -> np.ndarray:
  """Returns float64 [D, G]: intersection over union; over a crowd, over the detection.

  Args:
    boxes, truths: float64 [D, 4] and [G, 4]: left, top, width, height.
    crowd: bool [G].
  """
  low = np.maximum(boxes[:, None, :2], truths[None, :, :2])
  ends = boxes[:, :2] + boxes[:, 2:], truths[:, :2] + truths[:, 2:]
  sides = np.minimum(ends[0][:, None], ends[1][None]) - low
  common = np.where((sides > 0).all(-1), sides[..., 0] * sides[..., 1], 0)
  own, theirs = boxes[:, 2:].prod(1)[:, None], truths[:, 2:].prod(1)[None]
  whole = np.where(crowd[None], own, own + theirs - common)
  return np.divide(common, whole, out=np.zeros_like(common), where=common > 0)


def _groups(category, image, order) -> dict[int, dict[int, np.ndarray]]:
  """Returns {category: {image: rows by `order`, equal ones as they came}}."""
  rows = np.lexsort((order, image, category))
  keys = np.stack([category[rows], image[rows]], 1)
  starts = np.flatnonzero((np.diff(keys, axis=0, prepend=-1) != 0).any(1))
  out: dict[int, dict[int, np.ndarray]] = {}
  for part in np.split(rows, starts[1:]) if len(rows) else ():
    out.setdefault(int(category[part[0]]), {})[int(image[part[0]])] = part
  return out


def _of_image(truth, g, found, d, kind):
  """Returns (scores [D], taken [A, T, D], ignored [A, T, D], counted truths int [A])."""
  crowd = truth.crowd[g]
  low, high = np.array(list(AREAS.values())).T[..., None]
  ignored = crowd | (truth.areas[g] < low) | (truth.areas[g] > high)  # [A, G]
  if kind == 'bbox':
    iou, area = _boxes(truth, g, found, d, crowd)
  else:
    iou, area = _masks(truth, g, found, d, crowd)
  match = _match(iou, ignored, crowd)  # [A, T, D]
  taken = match >= 0
  outside = ((area < low) | (area > high))[:, None]  # [A, 1, D]
  of_match = np.take_along_axis(
    np.concatenate([ignored, np.zeros((len(ignored), 1), bool)], 1)[:, None],
    match,  # -1 is the column that was added
    axis=2,
  )
  skipped = np.where(taken, of_match, outside)
  return found.scores[d], taken, skipped, (~ignored).sum(1)


def _boxes(truth, g, found, d, crowd):
  iou = box_iou(found.boxes[d], truth.boxes[g], crowd)
  return iou, found.boxes[d, 2:].prod(1)


def _masks(truth, g, found, d, crowd):
  masks = [found.masks[i] for i in d]
  iou = rle.iou(masks, [truth.masks[i] for i in g], crowd)
  return iou, np.array([rle.area(m) for m in masks], np.float64)


def _match(iou: np.ndarray, ignored: np.ndarray, crowd: np.ndarray) -> np.ndarray:
  """Returns int [A, T, D]: the truth that each detection takes, or -1.

  Args:
    iou: [D, G], detections by falling score.
    ignored: bool [A, G]. Where two overlap alike, the later is taken.
  """
  D, G = iou.shape
  out = np.full((len(ignored), len(THRESHOLDS), D), -1)
  if not G or not (iou >= THRESHOLDS[0]).any():
    return out
  free = np.ones((*out.shape[:2], G), bool)
  enough = np.minimum(THRESHOLDS, 1 - 1e-10)[:, None]  # as pycocotools
  counts = ~ignored[:, None]  # [A, 1, G]
  for d in np.flatnonzero(iou.max(1) >= THRESHOLDS[0]):
    possible = (iou[d] >= enough) & (free | crowd)  # [A, T, G]
    got = possible.any(-1)
    better = possible & counts
    possible = np.where(better.any(-1, keepdims=True), better, possible)
    best = G - 1 - np.where(possible, iou[d], -1)[..., ::-1].argmax(-1)
    out[..., d] = np.where(got, best, -1)
    a, t = np.nonzero(got)
    free[a, t, best[a, t]] = False
  return out


def _accumulate(rows: Sequence[tuple], precision: np.ndarray, recall: np.ndarray):
  """Writes one category's precision [T, R, A, M] and recall [T, A, M]."""
  scores = np.concatenate([row[0] for row in rows])
  rank = np.concatenate([np.arange(len(row[0])) for row in rows])
  taken, skipped = (np.concatenate([row[i] for row in rows], 2) for i in (1, 2))
  number = np.sum([row[3] for row in rows], 0)  # [A]
  for m, limit in enumerate(LIMITS):
    kept = np.flatnonzero(rank < limit)
    order = kept[np.argsort(-scores[kept], kind='stable')]
    for a in np.flatnonzero(number):
      t, s = taken[a][:, order], skipped[a][:, order]
      right = np.cumsum(t & ~s, 1, dtype=np.float64)
      wrong = np.cumsum(~t & ~s, 1, dtype=np.float64)
      reached = right / number[a]  # [T, D]
      exact = right / (wrong + right + np.spacing(1))
      best = np.maximum.accumulate(exact[:, ::-1], 1)[:, ::-1]
      recall[:, a, m] = reached[:, -1] if len(order) else 0
      for i in range(len(THRESHOLDS)):
        at = np.searchsorted(reached[i], RECALLS, 'left')
        precision[i, :, a, m] = np.append(best[i], 0)[at]
