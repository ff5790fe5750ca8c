"""Base class of sources whose images have objects: boxes, classes, perhaps masks."""

import abc
import types
from collections.abc import Iterable

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
# Cells of a mask, down and across: 4 x 4 for each cell that a mask head predicts.
SIDE = 112
MASKS = types.MappingProxyType(
  {
    'masks': Feature((None, SIDE, SIDE), 'uint8', located=True),
    'extents': Feature((None, 4), 'float32', located=True),
  }
)
EVERY = types.MappingProxyType({**BOXES, **MASKS})


class Objects(Source):
  """Images with any number of objects, including none.

  An example has 'boxes' float32 [n, 4], top, left, bottom, right as fractions of the image,
  and 'label' int32 [n], positions in `Truth.category_ids`. With masks, it also has the
  features that `encode_masks` returns.

  Examples are for training: they leave out crowds and objects outside of the image. `truth`
  returns all objects.
  """

  features = types.MappingProxyType({'image': ImageFeature(), **BOXES})

  @abc.abstractmethod
  def truth(self, masks: bool = False) -> Truth:
    """Returns all objects as annotated, in pixels. Image i is example i.

    Args:
      masks: whether to include masks. Raises ValueError if the source has none.
    """


def encode_masks(masks: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
  """Encodes the n masks of an image, each bool [H, W] and not empty.

  Returns:
    'extents' float32 [n, 4], the smallest boxes around the masks: top, left, bottom, right
    as fractions of the image. 'masks' uint8 [n, SIDE, SIDE]: each extent is divided into
    cells, and a cell holds 255 times the share of it that the mask covers. The share is
    exact, whether a cell is larger or smaller than a pixel.
  """
  shares, boxes = [], []
  for mask in masks:
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    low, high = np.array([(line[0], line[-1] + 1) for line in (rows, columns)]).T
    inside = mask[low[0] : high[0], low[1] : high[1]].astype(np.float64)
    shares.append(_means(_means(inside)))
    boxes.append(np.concatenate([low, high]) / np.tile(mask.shape, 2))
  return {
    'masks': np.round(255 * np.reshape(shares, (-1, SIDE, SIDE))).astype(np.uint8),
    'extents': np.reshape(boxes, (-1, 4)).astype(np.float32),
  }


def _means(x: np.ndarray) -> np.ndarray:
  """Averages x [n, m] over SIDE equal parts of its first axis; returns [m, SIDE]."""
  ends = np.arange(SIDE + 1) * (len(x) / SIDE)
  row = np.minimum(ends.astype(int), len(x) - 1)
  # For each end, the sum of all rows above its row.
  before = np.cumsum(x, 0)[row] - x[row]
  return np.diff(before + (ends - row)[:, None] * x[row], axis=0).T * (SIDE / len(x))
