"""COCO's twelve numbers for boxes or masks, by pycocotools (the extra `detection`)."""

import contextlib
import io

import numpy as np

from vit_jax.detection.coco import rle
from vit_jax.detection.coco.objects import Detections, Truth

KINDS = ('bbox', 'segm')
# The twelve numbers in COCO's order. AP: IoU 0.50 to 0.95 or as named, 100 detections per
# image and category; areas below 32 x 32 pixels are small, above 96 x 96 large.
NAMES = ('ap', 'ap50', 'ap75', 'ap_small', 'ap_medium', 'ap_large')
NAMES += ('ar_1', 'ar_10', 'ar_100', 'ar_small', 'ar_medium', 'ar_large')
OF_CLASS = ('ap', 'ap50', 'ap75')


def measure(
  truth: Truth, detections: Detections, kind: str = 'bbox'
) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
  """Measures detections in the images of a ground truth.

  Args:
    kind: 'bbox' compares boxes; 'segm' compares masks, which both must have. The areas
      of the truth are as annotated.

  Returns:
    ({name: number} of the twelve; float64 [K, 3], the numbers OF_CLASS of each category;
    float64 [2, 101], the mean precision of the categories at IoU 0.50 and 0.75, by recall
    0, 0.01, ...). -1 where no object counts.

  Raises:
    UserError: without pycocotools.
  """
  assert kind in KINDS, kind
  rle.library()
  from pycocotools.cocoeval import COCOeval

  with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
    compared = _dataset(truth, truth, kind), _dataset(truth, detections, kind)
    evaluation = COCOeval(*compared, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
  numbers = dict(zip(NAMES, map(float, evaluation.stats), strict=True))
  # All areas, 100 detections: [10 thresholds, 101 recalls, K].
  precision = evaluation.eval['precision'][..., 0, 2]
  # A category without objects has -1 everywhere.
  parts = precision.mean((0, 1)), precision[0].mean(0), precision[5].mean(0)
  counts = (precision >= 0).all((0, 1))  # categories with objects
  curves = precision[[0, 5]][..., counts].sum(-1) / max(1, counts.sum())
  return numbers, np.stack(parts, 1), curves


def _dataset(truth: Truth, objects: Truth | Detections, kind: str):
  """Returns pycocotools' COCO with the objects; places stand for ids."""
  from pycocotools.coco import COCO

  number = len(objects.image)
  columns = {
    'id': range(1, number + 1),  # COCOeval reads the id 0 as "no match"
    'image_id': objects.image.tolist(),
    'category_id': objects.category.tolist(),
    'iscrowd': [0] * number,
  }
  if kind == 'segm':
    columns['segmentation'] = objects.masks
    columns['area'] = rle.areas(objects.masks).astype(float).tolist()
  else:
    columns['bbox'] = objects.boxes.tolist()
    columns['area'] = objects.boxes[:, 2:].prod(1).tolist()
  if isinstance(objects, Truth):
    columns['area'] = objects.areas.tolist()
    columns['iscrowd'] = objects.crowd.astype(int).tolist()
  else:
    columns['score'] = objects.scores.tolist()
  out = COCO()
  out.dataset = {
    'images': [
      {'id': i, 'height': int(height), 'width': int(width)}
      for i, (height, width) in enumerate(truth.sizes)
    ],
    'categories': [{'id': k} for k in range(len(truth.category_ids))],
    'annotations': [
      dict(zip(columns, row, strict=True))
      for row in zip(*columns.values(), strict=True)
    ],
  }
  out.createIndex()
  return out
