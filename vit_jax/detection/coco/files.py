"""Ground truth and detections in COCO's JSON format, checked as they are read."""

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.detection.coco import rle
from vit_jax.detection.coco.objects import Detections, Truth
from vit_jax.errors import UserError, one_line

_FAR = 100_000  # pixels: the largest side of an image, and coordinate of a polygon
_FARTHEST = 1e9  # pixels: areas of boxes within it are finite
_LISTS = ('images', 'categories', 'annotations')


def truth(path: str | os.PathLike, masks: bool = False) -> Truth:
  """Reads a ground truth, such as instances_val2017.json.

  Args:
    masks: whether to read the masks, too; then images need their height and width.

  Raises:
    UserError: for a file that is not of the format; it names the entry.
  """
  file = _load(path)
  if not isinstance(file, dict) or not all(
    isinstance(file.get(k), list) for k in _LISTS
  ):
    raise UserError(f'{path}: expected an object with the lists {", ".join(_LISTS)}.')
  images = _by_id(
    *(path, 'image', file['images']),
    lambda row: (row['id'], str(row.get('file_name', '')), _size(row)),
  )
  categories = _by_id(
    *(path, 'category', file['categories']), lambda row: (row['id'], str(row['name']))
  )
  image_ids, file_names, sizes = _columns(images, 3)
  category_ids, class_names = _columns(categories, 2)
  place_of_image, place_of_category = _place(image_ids), _place(category_ids)

  def read(row):
    image = place_of_image(row, 'image_id')
    return (
      image,
      place_of_category(row, 'category_id'),
      _box(row) if 'bbox' in row or not masks else [0.0] * 4,
      _number(row, 'area'),
      bool(row.get('iscrowd', False)),
      rle.read(row['segmentation'], *sizes[image], _FAR) if masks else None,
    )

  objects = _read(path, 'annotation', file['annotations'], read)
  image, category, boxes, areas, crowd, runs = _columns(objects, 6)
  return Truth(
    name=str(path),
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


def detections(
  path: str | os.PathLike, truth: Truth, masks: bool = False
) -> Detections:
  """Reads detections, a list of {image_id, category_id, score, bbox or segmentation}.

  Args:
    truth: the ground truth of the same images.
    masks: whether their masks are read, rather than their boxes.

  Raises:
    UserError: for a file that is not of the format, or an image or a category that the
      ground truth does not have; it names the entry.
  """
  rows = _load(path)
  if not isinstance(rows, list):
    raise UserError(f'{path}: expected a list of detections.')
  place_of_image, place_of_category = (
    _place(truth.image_ids),
    _place(truth.category_ids),
  )
  sizes = truth.sizes.tolist()

  def read(row):
    image = place_of_image(row, 'image_id')
    region = rle.read(row['segmentation'], *sizes[image], _FAR) if masks else _box(row)
    return image, place_of_category(row, 'category_id'), _number(row, 'score'), region

  image, category, scores, regions = _columns(_read(path, 'detection', rows, read), 4)
  return Detections(
    image=np.array(image, np.int64),
    category=np.array(category, np.int64),
    scores=np.array(scores, np.float64),
    boxes=None if masks else np.array(regions, np.float64).reshape(-1, 4),
    masks=regions if masks else None,
  )


def rows(truth: Truth, detections: Detections) -> list[dict]:
  """Returns detected boxes in the form that `detections` reads."""
  columns = detections.image, detections.category, detections.boxes, detections.scores
  return [
    {
      'image_id': truth.image_ids[image],
      'category_id': truth.category_ids[category],
      'bbox': box.tolist(),
      'score': float(score),
    }
    for image, category, box, score in zip(*columns, strict=True)
  ]


def _load(path) -> Any:
  try:
    with open(path, encoding='utf-8') as file:
      return json.load(file)
  except (OSError, ValueError, RecursionError) as error:
    reason = getattr(error, 'strerror', None) or f'not JSON: {one_line(error)}'
    raise UserError(f'{path}: {reason}.') from None


def _read(path, noun: str, rows: list, read: Callable) -> list[tuple]:
  """Returns `read(row)` of every row; UserError names the row for which it fails."""
  values = []
  for i, row in enumerate(rows):
    try:
      values.append(read(row))
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
      name = f' (id {row["id"]!r})' if isinstance(row, dict) and 'id' in row else ''
      reason = f'no {error}' if isinstance(error, KeyError) else one_line(error, 200)
      raise UserError(f'{path}: {noun} {i}{name} is not valid: {reason}.') from None
  return values


def _by_id(path, noun: str, rows: list, read: Callable) -> list[tuple]:
  """`_read`, in the order of the ids that rows begin with, which must be unique."""
  values = _read(path, noun, rows, read)
  if len({str(value[0]) for value in values}) < len(values):
    raise UserError(f'{path}: several of the {noun} entries have the same id.')
  kinds = {type(value[0]).__name__ for value in values}
  if len(kinds) > 1 or not kinds <= {'int', 'str'}:
    raise UserError(f'{path}: the {noun} ids are {sorted(kinds)}, expected one type.')
  return sorted(values)


def _columns(rows: list[tuple], number: int) -> list[list]:
  return [[row[i] for row in rows] for i in range(number)]


def _number(row: dict, key: str) -> float:
  value = float(row[key])
  if not np.isfinite(value):
    raise ValueError(f'{key} is {value}, expected a finite number')
  return value


def _size(row: dict) -> tuple[int, int]:
  sides = row.get('height', 0), row.get('width', 0)
  if not all(isinstance(n, int) and 0 <= n <= _FAR for n in sides):
    raise ValueError(
      f'its height and width are {sides}, expected up to {_FAR:,} pixels'
    )
  return sides


def _box(row: dict) -> list[float]:
  box = [float(x) for x in row['bbox']]
  within = all(abs(x) <= _FARTHEST for x in box)  # NaN is not
  if len(box) != 4 or not within or min(box[2:]) < 0:
    raise ValueError(
      f'bbox is {row["bbox"]}, expected [left, top, width, height] in pixels, up to 1e9'
    )
  return box


def _place(ids: list) -> Callable[[dict, str], int]:
  """Returns the function (row, key) -> the place of the row's id in `ids`."""
  places = {value: i for i, value in enumerate(ids)}

  def place(row: dict, key: str) -> int:
    if row[key] not in places:
      shown = ', '.join(map(repr, ids[:5])) + (
        f', ... {ids[-1]!r}' if len(ids) > 5 else ''
      )
      raise ValueError(f'{key} {row[key]!r} is not one of {len(ids):,}: {shown}')
    return places[row[key]]

  return place
