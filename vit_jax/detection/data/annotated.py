"""Base class of sources whose images and annotations are files on disk."""

import abc
import os

import numpy as np

from vit_jax.data import image_file
from vit_jax.data.ops import decode
from vit_jax.data.sources import folder, splits
from vit_jax.data.sources.base import fingerprint
from vit_jax.detection.coco import rle
from vit_jax.detection.coco.objects import Truth, group_by_image
from vit_jax.detection.data import objects
from vit_jax.errors import BadImage


class Annotated(objects.Objects):
  """Images with objects in files. A subclass finds the splits and reads the annotations.

  Every annotated image must be in its folder. An image whose size differs from the
  annotation is a bad image; one without objects is an ordinary example. Boxes are clipped
  at the border of the image. Boxes without an area and crowds are left out; the source's
  remarks count them.

  Args:
    target: where the data is, as the subclass says.
    split: a split expression of one split, see `splits`.
    masks: whether examples also have masks, see `objects.encode_masks`. Objects whose mask
      has no pixel inside the image are then left out and counted.
  """

  SCHEME: str

  def __init__(self, target: str, split: str, *, masks: bool = False):
    name = self._locate(target, split)
    whole = self.read_truth(masks)
    parts = splits.select(split, {name: len(whole.image_ids)}, self.name)
    self._rows = np.concatenate([rows for _, rows in parts])
    self._truth = truth = whole.select(self._rows)
    self._check()
    self.class_names = truth.class_names
    self.num_classes = len(truth.class_names)
    if masks:
      self.features = {**self.features, **objects.MASKS}
    self._set_objects()
    arrays = truth.image, truth.category, truth.boxes, truth.crowd, truth.sizes
    self.fingerprint = fingerprint(
      [
        *truth.file_names,
        self.class_names,
        *(x.tobytes() for x in arrays),
        *(x['counts'] for x in truth.masks or ()),
      ]
    )

  def _locate(self, target: str, split: str) -> str:
    """Finds the files of a split expression; returns the name of its split."""
    self.name = f'{self.SCHEME}:{target}'
    places = self.find_splits(os.path.expanduser(target))
    names = {name for name, _, _ in splits.parse(split)}
    if len(names) > 1:
      raise ValueError(
        f'{self.name}: the split {split!r} needs several files: name one, or use a mixture'
      )
    (name,) = names
    self._split = name if name in places else splits.canonical(name)
    splits.check_name(self._split, places, self.name)
    self._places, self._folder = places, places[self._split][0]
    return name

  @classmethod
  def sample_sizes(cls, target: str, split: str, number: int) -> np.ndarray:
    """Returns [n, 2], the heights and widths of up to `number` images of a split.

    It reads the first images in the order of `_images_of`, and no annotations.
    """
    source = cls.__new__(cls)
    source._locate(target, split)
    names = source._images_of(source._split)[:number]
    sizes = (source._size_of(os.path.join(source._folder, name)) for name in names)
    return np.array([size for size in sizes if size]).reshape(-1, 2)

  def _images_of(self, split: str) -> list[str]:
    """Lists the images in a split's folder, in a fixed pseudo-random order."""
    paths, _ = folder.images_below(self._places[split][0])
    return [path for path, _ in folder.sort_by_hash((path, 0) for path in paths)]

  def _size_of(self, path: str) -> tuple[int, int] | None:
    """Returns the height and width of a file, or None: the decoder reports bad images."""
    try:
      return decode.read_size(image_file.read(path), self.exif)
    except BadImage:
      return None

  def __len__(self) -> int:
    return len(self._truth.image_ids)

  def read(self, indices: np.ndarray) -> list[dict]:
    contents = self._readers.map(self._content, indices)
    return [
      {**content, 'boxes': self._boxes[i], 'label': self._labels[i]}
      for i, content in zip(indices, contents, strict=True)
    ]

  def name_of(self, index: int) -> str:
    return os.path.join(self._folder, self._truth.file_names[index])

  def truth(self, masks: bool = False) -> Truth:
    if not masks or self._truth.masks is not None:
      return self._truth
    return self.read_truth(masks=True).select(self._rows)

  @abc.abstractmethod
  def find_splits(self, target: str) -> dict[str, tuple[str, ...]]:
    """Returns {split: (folder of images, file or folder of annotations, ...)}."""

  @abc.abstractmethod
  def read_truth(self, masks: bool) -> Truth:
    """Returns the truth of all images of the split `self._split`, see `self._places`."""

  def _check(self) -> None:
    """Raises ValueError if an image has no size or no file."""
    truth = self._truth
    if (lacking := (truth.sizes < 1).any(1)).any():
      image_id = truth.image_ids[lacking.argmax()]
      file = self._places[self._split][1]
      raise ValueError(f'{file}: the image with id {image_id} has no size')
    there = set(os.listdir(self._folder)) if os.path.isdir(self._folder) else set()
    path = lambda name: os.path.join(self._folder, name)
    missing = [
      n for n in truth.file_names if n not in there and not os.path.isfile(path(n))
    ]
    if missing:
      raise ValueError(
        f'{self.name}: {len(missing):,} of {len(self):,} images are not in '
        f'{self._folder}, the first is {missing[0]!r}'
      )

  def _set_objects(self) -> None:
    truth = self._truth
    sizes = truth.sizes[truth.image]
    low = truth.boxes[:, 1::-1]  # top, left
    corners = np.concatenate([low, low + truth.boxes[:, 3:1:-1]], 1)
    inside = corners.clip(0, np.tile(sizes, 2))
    filled = (inside[:, 2:] > inside[:, :2]).all(1)
    shown = np.ones_like(filled)
    if truth.masks is not None:
      shown = rle.areas(truth.masks) > 0
    keep = filled & shown & ~truth.crowd
    counts = {
      'objects': len(keep),
      'crowds, not trained on': truth.crowd.sum(),
      'boxes cut off at the border': ((inside != corners).any(1) & keep).sum(),
      'boxes without an area inside the image, left out': (
        ~filled & ~truth.crowd
      ).sum(),
      'masks without a pixel inside the image, left out': (
        filled & ~shown & ~truth.crowd
      ).sum(),
    }
    self.remarks = ', '.join(f'{n:,} {noun}' for noun, n in counts.items() if n)
    rows = np.flatnonzero(keep)
    fractions = (inside / np.tile(sizes, 2)).astype(np.float32)
    self._objects = [
      rows[group] for group in group_by_image(truth.image[rows], len(self))
    ]
    self._boxes = [fractions[group] for group in self._objects]
    self._labels = [truth.category[group].astype(np.int32) for group in self._objects]
    self.lengths = {'boxes': np.array([len(group) for group in self._objects])}

  def _content(self, index: int) -> dict:
    try:
      data = image_file.read(self.name_of(index))
    except BadImage as error:
      return {'error': str(error)}
    if (shape := decode.read_size(data, self.exif)) is None:
      return {'image': data}  # the decoder will report it
    if list(shape) != (expected := self._truth.sizes[index].tolist()):
      size = '{} x {}'.format
      return {'error': f'is {size(*shape)}, annotated as {size(*expected)}'}
    if (masks := self._truth.masks) is None:
      return {'image': data}
    shown = (rle.decode(masks[row]) for row in self._objects[index])
    return {'image': data, **objects.encode_masks(shown)}
