"""What sources of images with objects share: a box and a class for each object."""

import abc
import types

import numpy as np

from vit_jax.data.features import Feature, ImageFeature
from vit_jax.data.sources.base import Source
from vit_jax.detection.coco.objects import Truth

BOXES = types.MappingProxyType(
  {
    'boxes': Feature((None, 4), 'float32', located=True),
    'label': Feature((None,)),
  }
)


class Objects(Source):
  """Images with any number of objects, also none.

  An example has 'boxes' float32 [n, 4], top, left, bottom, right from 0 to 1 of the image,
  and 'label' int32 [n]. These are for training: crowds, of which nobody has drawn the
  members, are not among them, nor what lies outside of the image. `truth` has all.

  Attributes:
    remarks: what was found in the boxes, for the line that describes the data.
  """

  features = types.MappingProxyType({'image': ImageFeature(), **BOXES})

  @abc.abstractmethod
  def truth(self, masks: bool = False) -> Truth:
    """Returns all objects as annotated, in pixels; its image i is example i.

    Args:
      masks: whether to have their masks as well.

    Raises:
      UserError: for masks that the source does not have.
    """

  @property
  def places(self) -> np.ndarray:
    """Returns int [num_classes]: the place in `Truth.category_ids` of a class, or -1."""
    return np.arange(self.num_classes)


def inside(boxes: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns what of boxes is inside their images, and how they fit.

  Args:
    boxes: float [n, 4], left, top, width, height in pixels.
    sizes: int [n, 2], heights and widths of their images.

  Returns:
    (float32 [n, 4], top, left, bottom, right from 0 to 1, bool [n, 2]: whether a part of
    the box was cut off, and whether an area is left).
  """
  low, high = boxes[:, 1::-1], boxes[:, 1::-1] + boxes[:, 3:1:-1]
  kept = np.clip(low, 0, sizes), np.clip(high, 0, sizes)
  cut = ((kept[0] != low) | (kept[1] != high)).any(1)
  filled = (kept[1] > kept[0]).all(1)
  # Sizes of 0 are those of images without objects.
  fractions = np.concatenate(kept, 1) / np.maximum(np.tile(sizes, 2), 1)
  return fractions.astype(np.float32), np.stack([cut, filled], 1)


def remarks(crowd: np.ndarray, cut: np.ndarray, filled: np.ndarray) -> str:
  """Returns '860,001 objects; 10,777 crowds, 12 boxes cut off at the border, ...'.

  Args:
    crowd, cut, filled: bool [n], of all objects; see `inside`.
  """
  counts = {
    'crowds, not trained on': crowd.sum(),
    'boxes cut off at the border of the image': (cut & filled & ~crowd).sum(),
    'boxes without an area inside the image, left out': (~filled & ~crowd).sum(),
  }
  found = ', '.join(f'{n:,} {what}' for what, n in counts.items() if n)
  return f'{len(crowd):,} objects' + (f': {found}' if found else '')
