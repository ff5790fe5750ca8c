"""Ground truth and detections in COCO's JSON format, checked as they are read."""

import json
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vit_jax.detection.coco import rle
from vit_jax.detection.coco.objects import Detections, Truth
from vit_jax.errors import UserError, one_line

_FAR = 100_000  # pixels: an outline takes memory in proportion to its length
_FARTHEST = 1e9  # pixels: areas of such boxes are finite


def truth(path: str | os.PathLike, masks: bool = False) -> Truth:
  """Reads a ground truth, such as instances_val2017.json.

  Args:
    masks: whether to read the masks, too; then images need their height and width.

  Raises:
    UserError: for a file that is not of the format; it names the entry.
  """
  file = _load(path)
  lists = ('images', 'categories', 'annotations')
  if not isinstance(file, dict) or not all(
    isinstance(file.get(k), list) for k in lists
  ):
    raise UserError(f'{path}: expected an object with the lists {", ".join(lists)}.')
  side = _Field(_side, f'a whole number of pixels up to {_FAR:,}')
  sides = {key: side if masks else side._replace(default=0) for key in _SIDES}
  images = _columns(
    path,
    'image',
    file['images'],
    {'file_name': _Field(str, 'a text', ''), **sides},
    'id',
  )
  categories = _columns(
    path, 'category', file['categories'], {'name': _Field(str, 'a text')}, 'id'
  )
  sizes = np.array([images[key] for key in _SIDES], np.int64).reshape(2, -1).T
  fields = {
    'image_id': _place('image', images['id']),
    'category_id': _place('category', categories['id']),
    'bbox': _BOX if not masks else _BOX._replace(default=(0, 0, 0, 0)),
    'area': _NUMBER,
    'iscrowd': _NUMBER._replace(default=0),
  }
  objects = _columns(path, 'annotation', file['annotations'], fields)
  return Truth(
    name=str(path),
    image_ids=images['id'],
    category_ids=categories['id'],
    file_names=images['file_name'],
    sizes=sizes,
    class_names=categories['name'],
    image=np.array(objects['image_id'], np.int64),
    category=np.array(objects['category_id'], np.int64),
    boxes=np.array(objects['bbox'], np.float64).reshape(-1, 4),
    areas=np.array(objects['area'], np.float64),
    crowd=np.array(objects['iscrowd'], np.float64) != 0,
    masks=_masks(path, 'annotation', file['annotations'], objects, sizes)
    if masks
    else None,
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
    raise UserError(
      f'{path}: expected a list of detections, each with image_id, category_id, score and '
      f'{"segmentation" if masks else "bbox"}.'
    )
  fields = {
    'image_id': _place('image', truth.image_ids, truth.name),
    'category_id': _place('category', truth.category_ids, truth.name),
    'score': _NUMBER,
    **({} if masks else {'bbox': _BOX}),
  }
  objects = _columns(path, 'detection', rows, fields)
  return Detections(
    image=np.array(objects['image_id'], np.int64),
    category=np.array(objects['category_id'], np.int64),
    scores=np.array(objects['score'], np.float64),
    boxes=None if masks else np.array(objects['bbox'], np.float64).reshape(-1, 4),
    masks=_masks(path, 'detection', rows, objects, truth.sizes) if masks else None,
  )


def rows(truth: Truth, detections: Detections) -> list[dict]:
  """Returns boxes that were detected in the form that `detections` reads."""
  return [
    {
      'image_id': truth.image_ids[image],
      'category_id': truth.category_ids[category],
      'bbox': box.tolist(),
      'score': float(score),
    }
    for image, category, box, score in zip(
      detections.image,
      detections.category,
      detections.boxes,
      detections.scores,
      strict=True,
    )
  ]


def _load(path) -> Any:
  try:
    with open(path, encoding='utf-8') as file:
      return json.load(file)
  except (OSError, ValueError, RecursionError) as error:
    reason = getattr(error, 'strerror', None) or one_line(error)
    kind = '' if isinstance(error, OSError) else 'not JSON: '
    raise UserError(f'{path}: {kind}{reason}.') from None


class _Field(NamedTuple):
  """How the value under a key is read; without a default it must be there."""

  read: Callable
  expected: str
  default: Any = None


_BAD_VALUE = (TypeError, ValueError, OverflowError, KeyError)


def _columns(path, what: str, rows: list, fields: dict, sort_by: str = '') -> dict:
  """Returns {key: values} of the rows, in the order of the unique ids `sort_by` if set."""
  order = range(len(rows))
  if sort_by:
    ids = _ids(path, what, rows)
    order = sorted(order, key=ids.__getitem__)
  columns = {key: [] for key in fields}
  for i in order:
    row = _object(path, what, i, rows[i])
    for key, (read, expected, default) in fields.items():
      if key not in row and default is None:
        raise _error(path, what, i, row, f'has no {key!r}')
      try:
        columns[key].append(read(row.get(key, default)))
      except _BAD_VALUE:
        shown = one_line(repr(row[key]), 60)
        raise _error(
          path, what, i, row, f'has {key!r} {shown}; expected {expected}'
        ) from None
  return columns | ({'id': sorted(ids)} if sort_by else {})


def _ids(path, what: str, rows: list) -> list:
  """Returns the `id` of every row; each must be there once, and be of one type."""
  ids: list = []
  for i, row in enumerate(rows):
    if 'id' not in _object(path, what, i, row):
      raise _error(path, what, i, row, "has no 'id'")
    kind = str if isinstance(rows[0]['id'], str) else int
    if type(row['id']) is not kind:
      expected = 'a text, as the first' if kind is str else 'a whole number'
      shown = one_line(repr(row['id']), 60)
      raise _error(path, what, i, row, f'has the id {shown}; expected {expected}')
    ids.append(row['id'])
  if len(set(ids)) < len(ids):
    i = next(i for i, one in enumerate(ids) if one in ids[:i])
    raise _error(path, what, i, rows[i], f'has the id {ids[i]!r} of another')
  return ids


def _masks(path, what: str, rows: list, objects: dict, sizes: np.ndarray) -> list[dict]:
  """Returns the 'segmentation' of each row as run lengths."""
  masks = []
  for i, (row, image) in enumerate(zip(rows, objects['image_id'], strict=True)):
    if 'segmentation' not in row:
      raise _error(path, what, i, row, "has no 'segmentation'")
    try:
      masks.append(rle.read(row['segmentation'], *map(int, sizes[image]), _FAR))
    except _BAD_VALUE as error:
      problem = (
        f"has a 'segmentation' that is not a mask: {one_line(error, 100)}; expected "
        "polygons [[x, y, x, y, x, y, ...], ...] or {'size': [H, W], 'counts': ...}"
      )
      raise _error(path, what, i, row, problem) from None
  return masks


def _object(path, what: str, i: int, row) -> dict:
  if not isinstance(row, dict):
    raise UserError(f'{path}: {what} {i} is {one_line(repr(row), 60)}, not an object.')
  return row


def _error(path, what: str, i: int, row: dict, problem: str) -> UserError:
  name = f' (id {row["id"]!r})' if 'id' in row else ''
  return UserError(f'{path}: {what} {i}{name} {problem}.')


def _number(value) -> float:
  if not math.isfinite(value):
    raise ValueError
  return float(value)


def _side(value) -> int:
  if not isinstance(value, int) or not 0 <= value <= _FAR:
    raise ValueError
  return value


def _box(value) -> list[float]:
  left, top, width, height = map(_number, value)
  if width < 0 or height < 0 or max(abs(left), abs(top), width, height) > _FARTHEST:
    raise ValueError
  return [left, top, width, height]


def _place(what: str, ids: list, where: str = 'the file') -> _Field:
  """Returns the field of an id that is one of `ids`; it is read as its place in them."""
  place = {value: i for i, value in enumerate(ids)}
  most = f', ... {ids[-1]!r}' if len(ids) > 5 else ''
  shown = ', '.join(map(repr, ids[:5])) + most
  return _Field(
    place.__getitem__,
    f'the id of one of the {len(ids):,} {what} entries of {where}: {shown}',
  )


_SIDES = ('height', 'width')
_NUMBER = _Field(_number, 'a finite number')
_BOX = _Field(
  _box, '[left, top, width, height] in pixels, below 1e9, sides of 0 or more'
)
