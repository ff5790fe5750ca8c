"""COCO's twelve numbers for boxes or masks, by pycocotools (the extra `detection`)."""

import contextlib
import io

import numpy as np

from vit_jax.detection.coco.objects import Detections, Truth
from vit_jax.errors import UserError

KINDS = ('bbox', 'segm')
# The twelve numbers in COCO's order, and a title for each: IoU, area, detections per image
# and category.
TITLES = {
  'ap': 'AP  IoU 0.50:0.95, 100 detections',
  'ap50': 'AP  IoU 0.50',
  'ap75': 'AP  IoU 0.75',
  'ap_small': 'AP  below 32 x 32 pixels',
  'ap_medium': 'AP  32 x 32 to 96 x 96 pixels',
  'ap_large': 'AP  above 96 x 96 pixels',
  'ar_1': 'AR  1 detection',
  'ar_10': 'AR  10 detections',
  'ar_100': 'AR  100 detections',
  'ar_small': 'AR  below 32 x 32 pixels',
  'ar_medium': 'AR  32 x 32 to 96 x 96 pixels',
  'ar_large': 'AR  above 96 x 96 pixels',
}
OF_CLASS = ('ap', 'ap50', 'ap75')


def measure(
  truth: Truth, detections: Detections, kind: str = 'bbox'
) -> tuple[dict[str, float], np.ndarray]:
  """Measures detections in the images of a ground truth.

  Args:
    kind: 'bbox' compares boxes; 'segm' compares masks, which both must have. The areas
      of the truth are as annotated.

  Returns:
    ({name: number} of the twelve, float64 [K, 3], the numbers OF_CLASS of each category);
    -1 where no object counts.

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
    evaluation.summarize()
  numbers = dict(zip(TITLES, map(float, evaluation.stats), strict=True))
  # All areas, 100 detections: [10 thresholds, 101 recalls, K].
  precision = evaluation.eval['precision'][..., 0, 2]
  # A category without objects has -1 everywhere.
  parts = precision.mean((0, 1)), precision[0].mean(0), precision[5].mean(0)
  return numbers, np.stack(parts, 1)


def _dataset(truth: Truth, objects: Truth | Detections, kind: str):
  """Returns pycocotools' COCO with the objects; places stand for ids."""
  from pycocotools import mask
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
    columns['area'] = [float(mask.area(x)) for x in objects.masks]
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
