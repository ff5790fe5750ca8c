"""Reads ground truth and writes detections, in COCO's JSON formats."""

import json
import math
import os
from collections.abc import Callable

import numpy as np

from vit_jax.check import INT32
from vit_jax.detection.coco import rle
from vit_jax.detection.coco.objects import Detections, Truth
from vit_jax.errors import UserError, one_line


def truth(path: str | os.PathLike, masks: bool = False) -> Truth:
  """Reads a ground truth, such as instances_val2017.json.

  Args:
    masks: whether to read masks as well. They need each image's height and width.

  Raises:
    UserError: the file has another format. The error names the entry.
  """
  try:
    with open(path, encoding='utf-8') as file:
      content = json.load(file)
  except (OSError, ValueError, RecursionError) as error:
    reason = getattr(error, 'strerror', None) or f'not JSON: {one_line(error)}'
    raise UserError(f'{path}: {reason}.') from None
  rows = lambda key, read: _rows(path, content, key, read)
  images = rows(
    'images', lambda row: (_id(row), str(row.get('file_name', '')), _size(row))
  )
  categories = rows('categories', lambda row: (_id(row), str(row['name'])))
  image_ids, file_names, sizes = _columns(sorted(images), 3)
  category_ids, class_names = _columns(sorted(categories), 2)
  for noun, ids in (('images', image_ids), ('categories', category_ids)):
    if len({*ids}) < len(ids):
      raise UserError(f'{path}: several {noun} have the same id.')
  image_places, places = _places(image_ids), _places(category_ids)

  def read(row):
    image = _place(row, 'image_id', image_places)
    return (
      image,
      _place(row, 'category_id', places),
      _box(row),
      _area(row),
      bool(row.get('iscrowd', False)),
      rle.read(row['segmentation'], *sizes[image]) if masks else None,
    )

  objects = rows('annotations', read)
  image, category, boxes, areas, crowd, runs = _columns(objects, 6)
  return Truth(
    image_ids=image_ids,
    category_ids=category_ids,
    file_names=file_names,
    sizes=np.array(sizes, np.int64).reshape(-1, 2),
    class_names=class_names,
    image=np.array(image, np.int64),
    category=np.array(category, np.int64),
    boxes=np.array(boxes, np.float64).reshape(-1, 4),
    areas=np.array(areas, np.float64),
    crowd=np.array(crowd, bool),
    masks=runs if masks else None,
  )


def results(truth: Truth, detections: Detections) -> list[dict]:
  """Returns detections in COCO's format of results, with masks if there are any."""
  columns = detections.image, detections.category, detections.boxes, detections.scores
  rows = [
    {
      'image_id': truth.image_ids[image],
      'category_id': truth.category_ids[category],
      'bbox': box.tolist(),
      'score': float(score),
    }
    for image, category, box, score in zip(*columns, strict=True)
  ]
  for row, mask in zip(rows, detections.masks or (), strict=False):
    row['segmentation'] = {**mask, 'counts': mask['counts'].decode()}
  return rows


def _rows(path, content, key: str, read: Callable) -> list[tuple]:
  """Reads every row of a list; raises UserError naming the row that cannot be read."""
  rows = content.get(key) if isinstance(content, dict) else None
  if not isinstance(rows, list):
    raise UserError(f'{path}: expected an object with the list {key!r}.')
  values = []
  for i, row in enumerate(rows):
    try:
      values.append(read(row))
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
      name = f' (id {row["id"]!r})' if isinstance(row, dict) and 'id' in row else ''
      reason = f'no {error}' if isinstance(error, KeyError) else one_line(error, 200)
      raise UserError(f'{path}: {key}[{i}]{name} is not valid: {reason}.') from None
  return values


def _columns(rows: list[tuple], number: int) -> list[list]:
  return [[row[i] for row in rows] for i in range(number)]


def _places(ids: list) -> dict[int, int]:
  return {value: i for i, value in enumerate(ids)}


def _place(row: dict, key: str, places: dict[int, int]) -> int:
  if row[key] not in places:
    raise ValueError(f'{key} {row[key]!r} is not one of {one_line([*places], 60)}')
  return places[row[key]]


def _id(row: dict) -> int:
  if not isinstance(row['id'], int):
    raise ValueError(f'its id is {row["id"]!r}, expected a whole number')
  return row['id']


def _finite(row: dict, key: str, values) -> list[float]:
  numbers = [float(x) for x in values]
  if not np.isfinite(numbers).all():
    raise ValueError(f'{key} is {row[key]}, expected finite numbers')
  return numbers


def _size(row: dict) -> tuple[int, int]:
  sides = row.get('height', 0), row.get('width', 0)
  if not all(isinstance(n, int) and n >= 0 for n in sides) or math.prod(sides) > INT32:
    raise ValueError(f'its height and width are {sides}, expected whole pixels')
  return sides


def _area(row: dict) -> float:
  (area,) = _finite(row, 'area', [row['area']])
  if area < 0:
    raise ValueError(f'its area is {area}, expected 0 pixels or more')
  return area


def _box(row: dict) -> list[float]:
  box = _finite(row, 'bbox', row['bbox'])
  if len(box) != 4 or min(box[2:]) < 0:
    raise ValueError(
      f'bbox is {row["bbox"]}, expected [left, top, width, height] in pixels'
    )
  return box
