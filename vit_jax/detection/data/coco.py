"""Images and objects in the format of COCO, on disk."""

import concurrent.futures
import io
import os
import re

import numpy as np

from vit_jax.data import image_file
from vit_jax.data.sources import splits
from vit_jax.data.sources.base import fingerprint
from vit_jax.detection.coco import files
from vit_jax.detection.coco.objects import Truth
from vit_jax.detection.data import objects
from vit_jax.errors import BadImage, UserError

_CLASSES = 100_000  # a model has a logit for each number up to the largest id
_ANNOTATIONS = re.compile(r'instances_(\w+)\.json')


class Coco(objects.Objects):
  """`coco:ROOT`, or `coco:ANNOTATIONS.json,IMAGE_FOLDER`.

  ROOT is a folder as COCO is unpacked: annotations/instances_NAME.json beside folders NAME
  of images, for the splits NAME, such as 'val2017'; 'train' and 'val' also work if only
  one split matches. A single file is one split, 'train'. Images are in the order of their ids.

  Every image of the file must be in the folder. One of another size than annotated is a bad
  image. Boxes are cut off at the border of the image; those without an area are left
  out and counted; crowds are not trained on. An image without objects is an example like any
  other. Annotations of an unknown category or image are refused.

  Args:
    target: see above.
    split: a split expression, see `splits`.
    by_id: the label of an object is its category's id, not its place among the sorted
      ids; num_classes is then the largest id + 1. Published DETR weights were trained this way:
      80 categories with ids of up to 90.
  """

  def __init__(self, target: str, split: str, *, by_id: bool = False):
    self.name = f'coco:{target}'
    self._by_id = by_id
    found = _splits(target)
    wanted = splits.parse(split)
    names = {name: _name(name, found, self.name) for name, _, _ in wanted}
    if len({*names.values()}) > 1:
      raise UserError(
        f'{self.name}: the split {split!r} is of several files: take one, or a mixture.'
      )
    self._file, self._folder = found[next(iter(names.values()))]
    whole = files.truth(self._file)
    sizes = dict.fromkeys(names, len(whole.image_ids))
    parts = splits.select(split, sizes, self.name)
    self._rows = np.concatenate([rows for _, rows in parts])
    self._truth = whole.of_images(self._rows)
    self._check()
    self._set_classes()
    self._set_boxes()
    self._pool = concurrent.futures.ThreadPoolExecutor(image_file.READERS)
    truth = self._truth
    arrays = truth.image, truth.category, truth.boxes, truth.crowd, truth.sizes
    self.fingerprint = fingerprint(
      [*truth.file_names, self.class_names, by_id, *(x.tobytes() for x in arrays)]
    )

  def __len__(self) -> int:
    return len(self._truth.image_ids)

  def read(self, indices: np.ndarray) -> list[dict]:
    contents = self._pool.map(self._content, indices)
    return [
      {**content, 'boxes': self._boxes[i], 'label': self._labels[i]}
      for i, content in zip(indices, contents, strict=True)
    ]

  def name_of(self, index: int) -> str:
    return os.path.join(self._folder, self._truth.file_names[index])

  def truth(self, masks: bool = False) -> Truth:
    if not masks:
      return self._truth
    return files.truth(self._file, masks=True).of_images(self._rows)

  @property
  def places(self) -> np.ndarray:
    if not self._by_id:
      return super().places
    out = np.full(self.num_classes, -1)
    ids = self._truth.category_ids
    out[ids] = np.arange(len(ids))
    return out

  def _check(self) -> None:
    """Refuses images without a name, a size or a file."""
    truth = self._truth
    unsized = np.flatnonzero((truth.sizes < 1).any(1))
    nameless = [i for i, name in enumerate(truth.file_names) if not name]
    if len(unsized) or nameless:
      i, lacks = (nameless[0], 'file_name') if nameless else (unsized[0], 'size')
      raise UserError(
        f'{self._file}: the image with id {truth.image_ids[i]!r} has no {lacks}; images '
        'need file_name, height and width.'
      )
    if not os.path.isdir(self._folder):
      raise UserError(f'{self.name}: there is no folder {self._folder!r} of images.')
    there = set(os.listdir(self._folder))
    inner = lambda name: os.path.isfile(os.path.join(self._folder, name))
    missing = [
      name
      for name in truth.file_names
      if name not in there and not (os.sep in name and inner(name))
    ]
    if missing:
      raise UserError(
        f'{self.name}: {len(missing):,} of {len(self):,} images are not in '
        f'{self._folder}, the first is {missing[0]!r}. Download them, or leave them out '
        f'of {os.path.basename(self._file)}.'
      )

  def _set_classes(self) -> None:
    truth = self._truth
    self.class_names, self.num_classes = truth.class_names, len(truth.class_names)
    if not self._by_id:
      return
    ids = truth.category_ids
    if not ids:
      raise UserError(f'{self.name}: {self._file} has no categories.')
    wrong = [i for i in ids if not isinstance(i, int) or not 0 <= i < _CLASSES]
    if wrong:
      raise UserError(
        f'{self.name}: by_id=True needs ids of categories from 0 to {_CLASSES - 1}; '
        f'{self._file} has {wrong[0]!r}.'
      )
    self.num_classes = ids[-1] + 1
    names = dict(zip(ids, truth.class_names, strict=True))
    self.class_names = [names.get(i, '') for i in range(self.num_classes)]

  def _set_boxes(self) -> None:
    truth = self._truth
    boxes, fit = objects.inside(truth.boxes, truth.sizes[truth.image])
    cut, filled = fit.T
    self.remarks = objects.remarks(truth.crowd, cut, filled)
    labels = truth.category
    if self._by_id:
      labels = np.array(truth.category_ids, np.int64)[labels]
    rows = np.flatnonzero(filled & ~truth.crowd)
    rows = rows[np.argsort(truth.image[rows], kind='stable')]
    ends = np.searchsorted(truth.image[rows], np.arange(1, len(self)))
    self._boxes = np.split(boxes[rows], ends)
    self._labels = np.split(labels[rows].astype(np.int32), ends)

  def _content(self, index: int) -> dict:
    from PIL import Image

    try:
      data = image_file.read(self.name_of(index), self.max_file_bytes)
    except BadImage as error:
      return {'error': str(error)}
    try:
      with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
    except Exception:  # `decode.probe` says what is wrong
      return {'image': data}
    want = self._truth.sizes[index].tolist()
    if [height, width] != want:
      return {'error': f'is {height} x {width}, annotated as {want[0]} x {want[1]}'}
    return {'image': data}


def _splits(target: str) -> dict[str, tuple[str, str]]:
  """Returns {split: (file of annotations, folder of images)}."""
  file, comma, folder = target.partition(',')
  if comma:
    return {'train': (os.path.expanduser(file), os.path.expanduser(folder))}
  root = os.path.expanduser(target)
  annotations = os.path.join(root, 'annotations')
  try:
    names = sorted(os.listdir(annotations))
  except OSError:
    names = []
  found = {m[1]: m[0] for m in map(_ANNOTATIONS.fullmatch, names) if m}
  if not found:
    raise UserError(
      f"coco: there is no file annotations/instances_*.json in {root!r}. Expected COCO's "
      'folder, or coco:ANNOTATIONS.json,IMAGE_FOLDER.'
    )
  return {
    name: (os.path.join(annotations, file), os.path.join(root, name))
    for name, file in found.items()
  }


def _name(wanted: str, found: dict, where: str) -> str:
  """Returns the split of that name: 'val2017', or 'val' if there is one with any year."""
  alike = [
    name
    for name in found
    if splits.canonical(name.rstrip('0123456789')) == splits.canonical(wanted)
  ]
  if wanted not in found and len(alike) == 1:
    return alike[0]
  splits.check_name(wanted, found, where)
  return wanted
