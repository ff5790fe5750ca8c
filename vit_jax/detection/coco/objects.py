"""Objects in images, annotated or detected, stored as columns."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Truth:
  """The annotated objects: n objects of K categories in I images.

  Attributes:
    image_ids, category_ids: ids in the file, sorted.
    file_names: names of the images; '' where the file has none.
    sizes: int64 [I, 2], heights and widths; 0 where the file has none.
    image, category: int64 [n], positions in `image_ids` and `category_ids`.
    boxes: float64 [n, 4], left, top, width, height in pixels.
    areas: float64 [n], as annotated, which means the area of the mask.
    crowd: bool [n], whether the annotation is a region with many objects.
    masks: n masks as run lengths, see `rle`; None if they were not read.
  """

  image_ids: list
  category_ids: list
  file_names: list[str]
  sizes: np.ndarray
  class_names: list[str]
  image: np.ndarray
  category: np.ndarray
  boxes: np.ndarray
  areas: np.ndarray
  crowd: np.ndarray
  masks: Sequence[dict] | None = None

  @classmethod
  def from_source(cls, source, boxes, **columns) -> 'Truth':
    """Makes the truth of a source that has no annotation file.

    Args:
      source: gives `num_classes`, `class_names` and the number of images.
      boxes: float64 [n, 4], top, left, bottom, right in pixels.
    """
    top, left, bottom, right = boxes.T
    classes = list(range(source.num_classes))
    return cls(
      image_ids=list(range(len(source))),
      category_ids=classes,
      file_names=[''] * len(source),
      class_names=source.class_names or [str(k) for k in classes],
      boxes=np.stack([left, top, right - left, bottom - top], 1),
      **columns,
    )

  def select(self, rows: np.ndarray) -> 'Truth':
    """Returns the truth of the images at positions `rows`, which may repeat."""
    groups = group_by_image(self.image, len(self.image_ids))
    objects = [groups[i] for i in rows]
    keep = np.concatenate([np.zeros(0, np.int64), *objects])
    return dataclasses.replace(
      self,
      image_ids=[self.image_ids[i] for i in rows],
      file_names=[self.file_names[i] for i in rows],
      sizes=self.sizes[rows],
      image=np.repeat(np.arange(len(objects)), [len(part) for part in objects]),
      category=self.category[keep],
      boxes=self.boxes[keep],
      areas=self.areas[keep],
      crowd=self.crowd[keep],
      masks=None if self.masks is None else [self.masks[i] for i in keep],
    )


@dataclasses.dataclass(frozen=True)
class Detections:
  """The n objects that a detector predicts; columns as in `Truth`.

  Attributes:
    scores: float64 [n].
    boxes: None if the detections have masks only.
  """

  image: np.ndarray
  category: np.ndarray
  scores: np.ndarray
  boxes: np.ndarray | None = None
  masks: Sequence[dict] | None = None


def group_by_image(image: np.ndarray, number: int) -> list[np.ndarray]:
  """Returns the positions of the objects of each of `number` images, in ascending order.

  Args:
    image: int [n], the image of each object.
  """
  order = np.argsort(image, kind='stable')
  return np.split(order, np.searchsorted(image[order], np.arange(1, number)))
