"""Sources with a file of boxes beside each image: `yolo:` and `voc:`."""

import abc
import math
import os
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from vit_jax import files
from vit_jax.check import INT32
from vit_jax.data import image_file
from vit_jax.data.sources import folder
from vit_jax.detection.coco import rle
from vit_jax.detection.coco.objects import Truth
from vit_jax.detection.data.annotated import Annotated
from vit_jax.errors import BadImage, UserError, one_line

# Most bytes of a file of annotations or of data.yaml. Larger files are not read.
_MOST = 8 << 20
_MOST_YAML = 200_000
# Fractions of an image may be rounded.
_SLACK = 0.01


class _Object(NamedTuple):
  """An object; `box` is left, top, right, bottom, in the units of its format."""

  category: str
  box: tuple[float, float, float, float]
  crowd: bool = False
  polygon: tuple[float, ...] = ()


class _Annotation(NamedTuple):
  size: tuple[int, int]  # height and width
  objects: list[_Object]


class Paired(Annotated):
  """Images, and for each image a file of the same name with its objects.

  An image without such a file has no objects. Images are in a fixed pseudo-random order, by
  a hash of their path, so that train[:90%] is a random part.
  """

  ENDING: str
  # Folders of images and of annotations.
  FOLDERS: tuple[tuple[str, str], ...]

  def find_splits(self, target: str) -> dict[str, tuple[str, ...]]:
    if not os.path.isdir(target):
      raise UserError(f'{self.name}: no such directory: {target!r}.')
    if pair := self._folders_in(target):
      # ROOT/images/SPLIT, or ROOT/images.
      images, annotations = pair
      return {
        split: (path, annotations + path.removeprefix(images))
        for split, path in folder.split_directories(images).items()
      }
    # ROOT/SPLIT/images, or images and annotations side by side.
    return {
      split: self._folders_in(path) or (path, path)
      for split, path in folder.split_directories(target).items()
    }

  def _folders_in(self, root: str) -> tuple[str, str] | None:
    """Returns the folders of images and annotations in a folder, if it has them."""
    for images, annotations in self.FOLDERS:
      if os.path.isdir(os.path.join(root, images)):
        return os.path.join(root, images), os.path.join(root, annotations)
    return None

  def read_truth(self, masks: bool) -> Truth:
    paths, rows = self._rows_of(self._split)
    names = self._class_names()
    position = {name: k for k, name in enumerate(names)}
    unknown = {x.category for row in rows for x in row.objects} - {*position}
    if unknown:
      raise UserError(f'{self.name}: {min(unknown)!r} is not in classes.txt.')
    columns, runs = [], []
    for i, row in enumerate(rows):
      height, width = row.size
      for x in row.objects:
        left, top, right, bottom = x.box
        box = left, top, right - left, bottom - top
        columns.append((i, position[x.category], *box, box[2] * box[3], x.crowd))
        if masks:
          if not x.polygon:
            where = os.path.join(self._folder, paths[i])
            raise UserError(
              f'{self.name}: {where} has boxes without polygons, so no masks: set '
              'masks=False.'
            )
          runs.append(rle.read([list(x.polygon)], height, width))
    table = np.array(columns, np.float64).reshape(-1, 8)
    return Truth(
      image_ids=list(range(len(paths))),
      category_ids=list(range(len(names))),
      file_names=paths,
      sizes=np.array([row.size for row in rows], np.int64).reshape(-1, 2),
      class_names=names,
      image=table[:, 0].astype(np.int64),
      category=table[:, 1].astype(np.int64),
      boxes=table[:, 2:6],
      areas=table[:, 6],
      crowd=table[:, 7].astype(bool),
      masks=runs if masks else None,
    )

  def _rows_of(self, split: str) -> tuple[list[str], list[_Annotation]]:
    """Returns the images of a split, paths below its folder, and their annotations."""
    images, annotations = self._places[split][:2]
    names = self._images_of(split)
    if not names:
      raise UserError(f'{self.name}: no image in {images!r}.')
    rows, found = [], 0
    for name in names:
      path = os.path.join(annotations, os.path.splitext(name)[0] + self.ENDING)
      exists = os.path.exists(path)
      found += exists
      rows.append(self._read(path if exists else None, os.path.join(images, name)))
    if not found:
      raise UserError(
        f'{self.name}: none of {len(names):,} images in {images!r} has a file '
        f'*{self.ENDING} of its name in {annotations!r}.'
      )
    return names, rows

  @abc.abstractmethod
  def _class_names(self) -> list[str]:
    """Returns the names of all classes."""

  @abc.abstractmethod
  def _read(self, path: str | None, image: str) -> _Annotation:
    """Reads an annotation; None: there is none."""


class Yolo(Paired):
  """The source `yolo:ROOT`: boxes as text, in the format of Ultralytics.

  Images are in ROOT/images/SPLIT, ROOT/SPLIT/images or ROOT/images, and their labels in the
  folder of the same name with `labels` for `images`. A line of a label is `CLASS X Y WIDTH
  HEIGHT`, the centre and the sides as fractions of the image, or `CLASS X Y X Y X Y ...`, a
  polygon. Names of classes are `names` of ROOT/data.yaml, or the lines of
  ROOT/classes.txt. Images are rotated upright, as EXIF says.
  """

  SCHEME, ENDING, FOLDERS = 'yolo', '.txt', (('images', 'labels'),)
  exif = True

  def find_splits(self, target: str) -> dict[str, tuple[str, ...]]:
    places = super().find_splits(target)
    self._names = _names_of_yolo(target, self.name)
    return places

  def _class_names(self) -> list[str]:
    return self._names

  def _read(self, path: str | None, image: str) -> _Annotation:
    height, width = size = self._size_of(image) or (1, 1)
    lines = _text(path).splitlines() if path else []
    objects = []
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        category, fractions = self._parse(line)
      except ValueError as error:
        raise UserError(f'{path}, line {number}: {error}.') from None
      if len(fractions) == 4:
        x, y, w, h = fractions
        polygon = ()
        low, high = (x - w / 2, y - h / 2), (x + w / 2, y + h / 2)
      else:
        polygon = fractions.reshape(-1, 2)
        low, high = polygon.min(0), polygon.max(0)
        polygon = (polygon * [width, height]).reshape(-1)
      box = low[0] * width, low[1] * height, high[0] * width, high[1] * height
      objects.append(_Object(category, box, polygon=tuple(polygon)))
    return _Annotation(size, objects)

  def _parse(self, line: str) -> tuple[str, np.ndarray]:
    expected = (
      "expected 'CLASS X Y WIDTH HEIGHT' or a polygon, in fractions of the image"
    )
    try:
      category, *fractions = map(float, line.split())
    except ValueError:
      raise ValueError(f'{one_line(line, 60)!r}, {expected}') from None
    if len(fractions) != 4 and (len(fractions) < 6 or len(fractions) % 2):
      raise ValueError(f'{len(fractions)} numbers after the class, {expected}')
    if category not in range(len(self._names)):
      raise ValueError(
        f'the class {category:g}, but {len(self._names)} classes have names, from 0'
      )
    if not all(-_SLACK <= x <= 1 + _SLACK for x in fractions):
      raise ValueError(f'{one_line(line, 60)!r}, {expected}, from 0 to 1')
    return self._names[int(category)], np.array(fractions)


class Voc(Paired):
  """The source `voc:ROOT`: boxes as XML, in the format of Pascal VOC and LabelImg.

  ROOT is a folder of VOC, with JPEGImages, Annotations and the splits of ImageSets/Main. Or
  the images and XML files are in ROOT, or in folders ROOT/SPLIT, side by side or in folders
  named images and annotations. Classes are the lines of ROOT/classes.txt, or the sorted
  names in all XML files. Objects marked `difficult` count as crowds: they are not trained
  on, and finding them is neither right nor wrong. Pixels are counted from 1.
  """

  SCHEME, ENDING = 'voc', '.xml'
  FOLDERS = (('JPEGImages', 'Annotations'), ('images', 'annotations'))

  def find_splits(self, target: str) -> dict[str, tuple[str, ...]]:
    self._root = target
    lists = os.path.join(target, 'ImageSets', 'Main')
    # Files such as aeroplane_train.txt are of one class.
    names = sorted(os.listdir(lists)) if os.path.isdir(lists) else []
    names = [name for name in names if name.endswith('.txt') and '_' not in name]
    if not names:
      return super().find_splits(target)
    images, annotations = (os.path.join(target, name) for name in self.FOLDERS[0])
    return {
      name.removesuffix('.txt'): (images, annotations, os.path.join(lists, name))
      for name in names
    }

  def _images_of(self, split: str) -> list[str]:
    if len(self._places[split]) < 3:
      return super()._images_of(split)
    images, _, chosen = self._places[split]
    paths = {os.path.splitext(path)[0]: path for path in folder.images_below(images)[0]}
    stems = _text(chosen).split()
    if missing := [stem for stem in stems if stem not in paths]:
      raise UserError(
        f'{self.name}: {len(missing):,} of {len(stems):,} images of {chosen} are not in '
        f'{images!r}, the first is {one_line(missing[0], 60)!r}.'
      )
    return [paths[stem] for stem in stems]

  def _class_names(self) -> list[str]:
    if names := _listed_names(self._root):
      return names
    rows = (row for split in self._places for row in self._rows_of(split)[1])
    return sorted({x.category for row in rows for x in row.objects})

  def _read(self, path: str | None, image: str) -> _Annotation:
    root = _parse_xml(path) if path else ElementTree.Element('annotation')
    try:
      size = (
        int(root.findtext('size/height', '0')),
        int(root.findtext('size/width', '0')),
      )
      if math.prod(size) > INT32:
        raise ValueError(f'its size is {size}, expected pixels')
      if min(size) < 1:
        size = self._size_of(image) or (1, 1)
      return _Annotation(size, [_voc_object(x) for x in root.iter('object')])
    except ValueError as error:
      raise UserError(f'{path}: {one_line(error, 100)}.') from None


def _voc_object(element: ElementTree.Element) -> _Object:
  name = (element.findtext('name') or '').strip()
  sides = ('xmin', 'ymin', 'xmax', 'ymax')
  box = [float(element.findtext(f'bndbox/{side}', 'nan')) for side in sides]
  if not name or not np.isfinite(box).all():
    raise ValueError(f'an object needs a name and bndbox with {", ".join(sides)}')
  left, top, right, bottom = box
  difficult = element.findtext('difficult', '0').strip() == '1'
  return _Object(name, (max(left - 1, 0), max(top - 1, 0), right, bottom), difficult)


class _NoDoctype(ElementTree.TreeBuilder):
  """Stops at a document type, before its entities could expand to gigabytes."""

  def doctype(self, name, pubid, system):
    raise ValueError('it has a document type, which annotations do not need')


def _parse_xml(path: str) -> ElementTree.Element:
  data = _bytes(path)
  with files.reading(path, LookupError):
    return ElementTree.fromstring(data, ElementTree.XMLParser(target=_NoDoctype()))


def _names_of_yolo(root: str, source: str) -> list[str]:
  path = os.path.join(root, 'data.yaml')
  if not os.path.exists(path):
    if names := _listed_names(root):
      return names
    raise UserError(
      f'{source}: {root!r} has no data.yaml or classes.txt with the names of the classes.'
    )
  import yaml

  text = _text(path, _MOST_YAML)
  with files.reading(path, yaml.YAMLError):
    content = yaml.safe_load(text)
  names = content.get('names') if isinstance(content, dict) else None
  if isinstance(names, dict) and list(names) == list(range(len(names))):
    names = list(names.values())
  valid = isinstance(names, list) and all(
    isinstance(x, str | int | float) for x in names
  )
  if not valid or not names:
    raise UserError(f"{path}: expected 'names', a list of the classes, or 0: NAME, ...")
  return _unique([str(name) for name in names], path)


def _listed_names(root: str) -> list[str]:
  """Returns the lines of ROOT/classes.txt; no names without that file."""
  path = os.path.join(root, 'classes.txt')
  if not os.path.exists(path):
    return []
  return _unique([line.strip() for line in _text(path).rstrip().splitlines()], path)


def _unique(names: list[str], path: str) -> list[str]:
  if len({*names}) < len(names) or not all(names):
    raise UserError(f'{path}: each class needs a name of its own.')
  return names


def _text(path: str, most: int = _MOST) -> str:
  data = _bytes(path, most)
  with files.reading(path):
    return data.decode('utf-8')


def _bytes(path: str, most: int = _MOST) -> bytes:
  try:
    return image_file.read(path, most)
  except BadImage as error:
    raise UserError(f'{path}: {error}.') from None
