"""Ground truth and detections in COCO's JSON format, checked as they are read."""

import json
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.detection.coco import rle
from vit_jax.detection.coco.objects import Detections, Truth
from vit_jax.errors import UserError, one_line


def truth(path: str | os.PathLike, masks: bool = False) -> Truth:
  """Reads a ground truth, such as instances_val2017.json.

  Args:
    masks: whether to read the masks, too; then images need their height and width.

  Raises:
    UserError: for a file that is not of the format; it names the entry.
  """
  file = _load(path)
  if not isinstance(file, dict):
    raise UserError(f'{path}: expected an object with images and annotations.')
  rows = {}
  for key in ('images', 'categories', 'annotations'):
    rows[key] = file.get(key)
    if not isinstance(rows[key], list):
      raise UserError(
        f'{path}: there is no list {key!r}: it has {sorted(map(str, file))}. Ground truth '
        'has images, categories and annotations.'
      )
  images = _Rows(path, 'image', rows['images'])
  categories = _Rows(path, 'category', rows['categories'])
  image_ids, category_ids = images.ids(), categories.ids()
  images = images.sorted_by(image_ids)
  categories = categories.sorted_by(category_ids)
  objects = _Rows(path, 'annotation', rows['annotations'])
  image = objects.places('image_id', 'image', image_ids)
  sizes = images.sizes(**({} if masks else {'default': 0}))
  return Truth(
    name=str(path),
    image_ids=image_ids,
    category_ids=category_ids,
    file_names=[str(x) for x in images.values('file_name', default='')],
    sizes=sizes,
    class_names=[str(x) for x in categories.values('name')],
    image=image,
    category=objects.places('category_id', 'category', category_ids),
    boxes=objects.boxes(**({'default': (0, 0, 0, 0)} if masks else {})),
    areas=objects.numbers('area'),
    crowd=objects.numbers('iscrowd', default=0) != 0,
    masks=objects.masks(sizes[image]) if masks else None,
  )


def detections(
  path: str | os.PathLike, truth: Truth, masks: bool = False
) -> Detections:
  """Reads detections, a list of {image_id, category_id, score, bbox or segmentation}.

  Args:
    truth: of the same images.
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
  objects = _Rows(path, 'detection', rows)
  image = objects.places('image_id', 'image', truth.image_ids, truth.name)
  return Detections(
    image=image,
    category=objects.places('category_id', 'category', truth.category_ids, truth.name),
    scores=objects.numbers('score'),
    boxes=None if masks else objects.boxes(),
    masks=objects.masks(truth.sizes[image]) if masks else None,
  )


def rows(truth: Truth, found: Detections) -> list[dict]:
  """Returns boxes that were detected as `detections` reads them, for json.dump."""
  return [
    {
      'image_id': truth.image_ids[image],
      'category_id': truth.category_ids[category],
      'bbox': box.tolist(),
      'score': float(score),
    }
    for image, category, box, score in zip(
      found.image, found.category, found.boxes, found.scores, strict=True
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


class _Rows:
  """Entries of one list of a file. Values are checked together, errors name the first."""

  def __init__(self, path, what: str, rows: list, numbers: list[int] | None = None):
    """Takes entries; `numbers`: their places in the file, if not in its order."""
    self._path, self._what, self._rows, self._numbers = path, what, rows, numbers
    for i, row in enumerate(rows):
      if not isinstance(row, dict):
        raise self._error(i, f'is {one_line(repr(row), 60)}, not an object')

  def sorted_by(self, ids: list) -> '_Rows':
    place = {key: i for i, key in enumerate(ids)}
    order = sorted(range(len(self._rows)), key=lambda i: place[self._rows[i]['id']])
    return _Rows(self._path, self._what, [self._rows[i] for i in order], order)

  def ids(self) -> list:
    """Returns the sorted `id`s; each must be there once, and be of one type."""
    values = self.values('id')
    kind = str if values and isinstance(values[0], str) else int
    for i, value in enumerate(values):
      if type(value) is not kind:
        expected = 'a text, as the first' if kind is str else 'a whole number'
        shown = one_line(repr(value), 60)
        raise self._error(i, f'has the id {shown}; expected {expected}')
    seen = set()
    for i, value in enumerate(values):
      if value in seen:
        raise self._error(i, f'has the id {value!r} of another')
      seen.add(value)
    return sorted(values)

  def values(self, key: str, **default) -> list:
    """Returns the values under a key; a `default` stands for those that are missing."""
    if default:
      return [row.get(key, default['default']) for row in self._rows]
    try:
      return [row[key] for row in self._rows]
    except KeyError:
      i = next(i for i, row in enumerate(self._rows) if key not in row)
      raise self._error(i, f'has no {key!r}') from None

  def numbers(self, key: str, **default) -> np.ndarray:
    """Returns float64 [n], finite; see `values`."""
    return self._array(key, self.values(key, **default), _number, ())

  def sizes(self, **default) -> np.ndarray:
    """Returns heights and widths, int64 [n, 2]; see `values`."""
    sides = [
      self._array(key, self.values(key, **default), _side, ())
      for key in ('height', 'width')
    ]
    return np.stack(sides, 1).astype(np.int64)

  def boxes(self, **default) -> np.ndarray:
    """Returns 'bbox', float64 [n, 4] with sides of 0 or more; `default` as of `values`."""
    return self._array('bbox', self.values('bbox', **default), _box, (4,))

  def _array(self, key, values, one: Callable, shape) -> np.ndarray:
    try:
      return np.array([one(x) for x in values], np.float64).reshape(-1, *shape)
    except _NOT_A_NUMBER:
      for i, value in enumerate(values):
        try:
          one(value)
        except _NOT_A_NUMBER:
          shown = one_line(repr(value), 60)
          raise self._error(
            i, f'has {key!r} {shown}; expected {_EXPECTED[one]}'
          ) from None
      raise

  def places(self, key: str, what: str, ids: list, where: str = '') -> np.ndarray:
    """Returns int64 [n], the places of ids in a list of them."""
    place = {value: i for i, value in enumerate(ids)}
    values = self.values(key)
    try:
      return np.array([place[value] for value in values], np.int64)
    except (KeyError, TypeError):
      known = lambda x: isinstance(x, int | str) and x in place
      i = next(i for i, x in enumerate(values) if not known(x))
      most = f', ... {ids[-1]!r}' if len(ids) > 5 else ''
      shown = ', '.join(map(repr, ids[:5])) + most
      raise self._error(
        i,
        f'names the unknown {what} {one_line(repr(values[i]), 60)}; '
        f'{where or "the file"} has {len(ids):,}: {shown or "none"}',
      ) from None

  def masks(self, sizes: np.ndarray) -> list[dict]:
    """Returns 'segmentation' as run lengths, in images of sizes int [n, 2]."""
    out = []
    for i, value in enumerate(self.values('segmentation')):
      height, width = map(int, sizes[i])
      try:
        out.append(rle.read(value, height, width, _FAR))
      except (*_NOT_A_NUMBER, KeyError) as error:
        raise self._error(
          i,
          f"has a 'segmentation' that is not a mask: {one_line(error, 100)}; expected "
          "polygons [[x, y, x, y, x, y, ...], ...] or {'size': [H, W], 'counts': ...}",
        ) from None
    return out

  def _error(self, i: int, problem: str) -> UserError:
    row = self._rows[i]
    named = f' (id {row["id"]!r})' if isinstance(row, dict) and 'id' in row else ''
    number = self._numbers[i] if self._numbers else i
    return UserError(f'{self._path}: {self._what} {number}{named} {problem}.')


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


_NOT_A_NUMBER = (TypeError, ValueError, OverflowError)
_FAR = 100_000  # an outline takes memory in proportion to its length
_FARTHEST = 1e9  # areas of such boxes are finite
_EXPECTED = {
  _number: 'a finite number',
  _side: f'a whole number of pixels up to {_FAR:,}',
  _box: '[left, top, width, height] in pixels, below 1e9, sides of 0 or more',
}
