"""Data sets of TFDS whose images have objects with boxes, such as coco/2017 and voc."""

import io

import numpy as np

from vit_jax.data.sources.tfds import Images, Prepared, classes
from vit_jax.detection.coco.objects import Truth
from vit_jax.detection.data import objects

_CHUNK = 256  # examples per read


def _are_objects(feature) -> bool:
  inner = getattr(feature, 'feature', None)
  return hasattr(inner, 'keys') and {'bbox', 'label'} <= {*inner}


class TfdsObjects(Images, objects.Objects):
  """Images with objects, as TFDS prepared them: 'bbox' and 'label' of each.

  Crowds ('is_crowd') are not trained on. Without 'area', areas are those of the boxes.
  """

  def __init__(self, name: str, split: str, prepared: Prepared, image_key, key: str):
    """Opens a split; ValueError if the feature `key` is not objects."""
    super().__init__(name, split, prepared, image_key)
    features, self._key = prepared.features, key
    if key not in features or not _are_objects(features[key]):
      raise ValueError(
        f'{name}: {key!r} is not a sequence of objects with bbox and label: set '
        f'objects_key={self.find_key(features)!r}'
      )
    self.num_classes, self.class_names = classes(features[key].feature['label'])

  @staticmethod
  def find_key(features) -> str | None:
    """Returns the name of the first feature that is objects with boxes, or None."""
    return next((name for name in features if _are_objects(features[name])), None)

  def _one(self, example: dict) -> dict:
    boxes, labels, crowd, _ = self._objects(example)
    boxes = boxes.clip(0, 1)
    keep = (boxes[:, 2:] > boxes[:, :2]).all(1) & ~crowd
    return {
      'image': example[self._image_key],
      'boxes': boxes[keep].astype(np.float32),
      'label': labels[keep].astype(np.int32),
    }

  def _objects(self, example: dict) -> tuple[np.ndarray, ...]:
    """Returns boxes float64 [n, 4], labels, crowd [n], and areas [n] in pixels or NaN."""
    columns = example[self._key]
    boxes = np.asarray(columns['bbox'], np.float64).reshape(-1, 4)
    crowd = np.asarray(columns.get('is_crowd', [False] * len(boxes)), bool)
    areas = np.asarray(columns.get('area', [np.nan] * len(boxes)), np.float64)
    return boxes, np.asarray(columns['label']).reshape(-1), crowd, areas

  def truth(self, masks: bool = False) -> Truth:
    """Returns all objects; reads every example once, without decoding images."""
    if masks:
      raise ValueError(f'{self.name} has no masks: compare boxes')
    sizes = np.zeros((len(self), 2), np.int64)
    none = np.zeros(0, np.int64)
    # The first row is for a split of which nothing can be read.
    rows = [(none, np.zeros((0, 4)), none, none.astype(bool), np.zeros(0))]
    for start in range(0, len(self), _CHUNK):
      indices = np.arange(start, min(start + _CHUNK, len(self)))
      for i, example in zip(indices, self.examples(indices), strict=True):
        if not isinstance(example, Exception):
          sizes[i] = _size(example[self._image_key])
          boxes, *others = self._objects(example)
          rows.append((np.full(len(boxes), i), boxes, *others))
    image, boxes, labels, crowd, areas = map(np.concatenate, zip(*rows, strict=True))
    boxes = boxes * np.tile(sizes[image], 2)
    sides = boxes[:, 2:] - boxes[:, :2]
    return Truth.of_source(
      self,
      boxes,
      sizes=sizes,
      image=image,
      category=labels.astype(np.int64),
      areas=np.where(np.isnan(areas), sides.prod(1), areas),
      crowd=crowd,
    )


def _size(data: bytes) -> tuple[int, int]:
  """Returns the height and width of an encoded image; zeros for one that is broken."""
  from PIL import Image

  try:
    with Image.open(io.BytesIO(data)) as image:
      return image.height, image.width
  except Exception:  # Pillow raises many types; the image is masked where it is used
    return 0, 0
