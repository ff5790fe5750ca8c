"""TFDS data sets whose images have objects with boxes, such as coco/2017 and voc."""

import numpy as np

from vit_jax.data.ops import decode
from vit_jax.data.sources.tfds import Images, Prepared, classes
from vit_jax.detection.coco.objects import Truth
from vit_jax.detection.data import objects

_CHUNK = 256  # examples per read


def _are_objects(feature) -> bool:
  inner = getattr(feature, 'feature', None)
  return hasattr(inner, 'keys') and {'bbox', 'label'} <= {*inner}


class TfdsObjects(Images, objects.Objects):
  """Images with objects from a data set that TFDS prepared.

  Each object has 'bbox' and 'label'. Examples leave out crowds ('is_crowd'). If objects have
  no 'area', the area of the box stands for it.
  """

  def __init__(self, name: str, split: str, prepared: Prepared, image_key, key: str):
    """Opens a split; raises ValueError if the feature `key` does not hold objects."""
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
    """Finds the first feature that holds objects with boxes; returns its name or None."""
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
    """Returns boxes float64 [n, 4], labels [n], crowd [n], and areas [n] or NaN."""
    columns = example[self._key]
    boxes = np.asarray(columns['bbox'], np.float64).reshape(-1, 4)
    crowd = np.asarray(columns.get('is_crowd', [False] * len(boxes)), bool)
    areas = np.asarray(columns.get('area', [np.nan] * len(boxes)), np.float64)
    return boxes, np.asarray(columns['label']).reshape(-1), crowd, areas

  def truth(self, masks: bool = False) -> Truth:
    """Returns all objects. Reads every example once, but decodes no image."""
    if masks:
      raise ValueError(f'{self.name} has no masks: compare only boxes')
    sizes = np.zeros((len(self), 2), np.int64)
    none = np.zeros(0, np.int64)
    # Begin with an empty row, because there may be no others to concatenate.
    rows = [(none, np.zeros((0, 4)), none, none.astype(bool), np.zeros(0))]
    for start in range(0, len(self), _CHUNK):
      indices = np.arange(start, min(start + _CHUNK, len(self)))
      for i, example in zip(indices, self.examples(indices), strict=True):
        if not isinstance(example, Exception):
          # Zeros if it is broken: the image is masked where it is used.
          sizes[i] = decode.read_size(example[self._image_key], exif=False) or (0, 0)
          boxes, *others = self._objects(example)
          rows.append((np.full(len(boxes), i), boxes, *others))
    image, boxes, labels, crowd, areas = map(np.concatenate, zip(*rows, strict=True))
    boxes = boxes * np.tile(sizes[image], 2)
    sides = boxes[:, 2:] - boxes[:, :2]
    return Truth.from_source(
      self,
      boxes,
      sizes=sizes,
      image=image,
      category=labels.astype(np.int64),
      areas=np.where(np.isnan(areas), sides.prod(1), areas),
      crowd=crowd,
    )
