"""COCO's twelve numbers for boxes or masks, computed by pycocotools."""

import contextlib
import io

import numpy as np

from vit_jax.detection.coco import rle
from vit_jax.detection.coco.objects import Detections, Truth

KINDS = ('bbox', 'segm')
# The twelve numbers in COCO's order. Unless the name says otherwise, AP is the mean over IoU
# 0.50 to 0.95, with 100 detections per image and category. Areas below 32 x 32 pixels are
# small, and areas above 96 x 96 are large.
NAMES = ('ap', 'ap50', 'ap75', 'ap_small', 'ap_medium', 'ap_large')
NAMES += ('ar_1', 'ar_10', 'ar_100', 'ar_small', 'ar_medium', 'ar_large')
# The numbers that are also measured for each category.
OF_CLASS = ('ap', 'ap50', 'ap75')


def measure(
  truth: Truth, detections: Detections, kind: str = 'bbox'
) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
  """Measures detections against a ground truth.

  Args:
    truth: the annotated objects. Areas are taken from the annotations.
    kind: 'bbox' compares boxes; 'segm' compares masks, which both sides must have.

  Returns:
    ({name: number} for the twelve NAMES; float64 [K, 3], the numbers OF_CLASS for each
    category; float64 [2, 101], precision averaged over categories, at IoU 0.50 and 0.75,
    for recall 0, 0.01, ...). A number is -1 if there is no object to measure it with.
  """
  assert kind in KINDS, kind
  rle.library()
  from pycocotools.cocoeval import COCOeval

  with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
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
  """Builds pycocotools' COCO object. Ids are positions in the columns."""
  from pycocotools.coco import COCO

  number = len(objects.image)
  columns = {
    # Count from 1, because COCOeval reads the id 0 as "no match".
    'id': range(1, number + 1),
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
