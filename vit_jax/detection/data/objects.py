"""The base of sources of images with objects: a box, a class, maybe a mask for each."""

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
SIDE = 112  # cells of a mask, down and across: 4 x 4 for each that a mask head predicts
MASKS = types.MappingProxyType(
  {
    'masks': Feature((None, SIDE, SIDE), 'uint8', located=True),
    'extents': Feature((None, 4), 'float32', located=True),
  }
)
EVERY = types.MappingProxyType({**BOXES, **MASKS})


class Objects(Source):
  """Images with any number of objects, also none.

  An example has 'boxes' float32 [n, 4], top, left, bottom, right from 0 to 1 of the image,
  and 'label' int32 [n], places in `Truth.category_ids`. With masks it also has those of
  `of_masks`. These are for training: they leave out crowds and whatever lies outside of the
  image. `truth` has all objects.
  """

  features = types.MappingProxyType({'image': ImageFeature(), **BOXES})

  @abc.abstractmethod
  def truth(self, masks: bool = False) -> Truth:
    """Returns all objects as annotated, in pixels; its image i is example i.

    Args:
      masks: whether to have their masks as well; ValueError if the source has none.
    """


def of_masks(masks: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the features of an image's n masks, each bool [H, W] and not empty.

  'extents' float32 [n, 4] are the smallest boxes around them: top, left, bottom, right
  from 0 to 1. 'masks' uint8 [n, SIDE, SIDE] divide these boxes into cells: 255 times the
  part of a cell that the mask covers, exact whether a cell is larger or smaller than a
  pixel.
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
  """Returns the means [m, SIDE] of x [n, m] over SIDE equal parts of its first axis."""
  ends = np.arange(SIDE + 1) * (len(x) / SIDE)
  row = np.minimum(ends.astype(int), len(x) - 1)
  before = np.cumsum(x, 0)[row] - x[row]  # the sums of all rows above
  return np.diff(before + (ends - row)[:, None] * x[row], axis=0).T * (SIDE / len(x))
