"""COCO's twelve numbers for boxes or masks, by pycocotools (the extra `detection`)."""

import contextlib
import dataclasses
import io

import numpy as np

from vit_jax.detection.coco.objects import Detections, Truth
from vit_jax.errors import UserError

KINDS = ('bbox', 'segm')

# COCOeval's order of ranges of areas, and of detections per image and category.
_AREAS = ('all', 'small', 'medium', 'large')
_LIMITS = (1, 10, 100)

# Name: (array, index of the threshold or None for all ten, area, limit).
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
  """Precision and recall of detections; -1 where no object counts.

  Attributes:
    precision: float64 [10 thresholds, 101 recalls, K, 4 areas, 3 limits].
    recall: float64 [10 thresholds, K, 4 areas, 3 limits], the highest reached.
  """

  precision: np.ndarray
  recall: np.ndarray

  def numbers(self) -> dict[str, float]:
    """Returns {name: number} of the twelve, in COCO's order; see NAMES."""
    return self._means(slice(None))

  def of_category(self, k: int) -> dict[str, float]:
    """Returns the twelve numbers of one category, by its place in `category_ids`."""
    return self._means(slice(k, k + 1))

  def _means(self, categories: slice) -> dict[str, float]:
    means = {}
    for name, (array, threshold, area, limit) in _NUMBERS.items():
      values = getattr(self, array)[slice(None) if threshold is None else threshold]
      values = values[..., categories, _AREAS.index(area), _LIMITS.index(limit)]
      counted = values[values > -1]
      means[name] = float(counted.mean()) if counted.size else -1.0
    return means


def measure(truth: Truth, detections: Detections, kind: str = 'bbox') -> Measured:
  """Returns precision and recall of detections in the images of a ground truth.

  Args:
    kind: 'bbox' compares boxes; 'segm' compares masks, which both must have. The areas
      of the truth are as annotated.

  Raises:
    UserError: without pycocotools.
  """
  assert kind in KINDS, kind
  try:
    from pycocotools.cocoeval import COCOeval
  except ImportError:
    raise UserError(
      "COCO's metric needs pycocotools: pip install 'vit_jax[detection]'."
    ) from None
  with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
    compared = _dataset(truth, truth, kind), _dataset(truth, detections, kind)
    evaluation = COCOeval(*compared, kind)
    evaluation.evaluate()
    evaluation.accumulate()
  return Measured(evaluation.eval['precision'], evaluation.eval['recall'])


def _dataset(truth: Truth, objects: Truth | Detections, kind: str):
  """Returns pycocotools' COCO with the objects; places stand for ids."""
  from pycocotools import mask
  from pycocotools.coco import COCO

  annotations = [
    # COCOeval reads the id 0 as "no match".
    {'id': i + 1, 'image_id': image, 'category_id': category}
    for i, (image, category) in enumerate(
      zip(objects.image.tolist(), objects.category.tolist(), strict=True)
    )
  ]
  columns = {}
  if objects.boxes is not None:
    columns['bbox'] = objects.boxes.tolist()
    columns['area'] = objects.boxes[:, 2:].prod(1).tolist()
  if kind == 'segm':
    columns['segmentation'] = list(objects.masks)
    columns['area'] = [float(mask.area(x)) for x in objects.masks]
  if isinstance(objects, Truth):
    columns['area'] = objects.areas.tolist()
    columns['iscrowd'] = objects.crowd.astype(int).tolist()
  else:
    columns['score'] = objects.scores.tolist()
    columns['iscrowd'] = [0] * len(annotations)
  for key, values in columns.items():
    for annotation, value in zip(annotations, values, strict=True):
      annotation[key] = value
  out = COCO()
  out.dataset = {
    'images': [
      {'id': i, 'height': int(height), 'width': int(width)}
      for i, (height, width) in enumerate(truth.sizes)
    ],
    'categories': [{'id': k} for k in range(len(truth.category_ids))],
    'annotations': annotations,
  }
  out.createIndex()
  return out
