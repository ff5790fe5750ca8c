"""Declarations of the features in a source's examples, and the forms of labels in batches.

A source for classification declares, or inherits,

  {'image': ImageFeature(), 'label': LabelFeature()}

and one of several boxes in each image, with a class for each box,

  {'image': ImageFeature(), 'boxes': Feature((None, 4), 'float32', located=True),
   'label': Feature((None,))}
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Feature:
  """An array.

  Attributes:
    shape: of one example's array. None as the first length: examples differ, and `pp` has
      to end in a pad_to(NAME=LENGTH). (None, None): uint8 for every pixel of an encoded
      image, in its upright size.
    dtype: a NumPy dtype.
    located: whether it holds positions in the image, from 0 to 1 of its height and width;
      then an op that moves pixels must move these too.
    classes: names of the classes of its integers, if they differ from those of the labels.
  """

  shape: tuple[int | None, ...] = ()
  dtype: str = 'int32'
  located: bool = False
  classes: tuple[str, ...] | None = None

  @property
  def is_ragged(self) -> bool:
    return self.shape[:1] == (None,) and not self.is_pixel_map

  @property
  def is_pixel_map(self) -> bool:
    return self.shape == (None, None)


@dataclasses.dataclass(frozen=True)
class ImageFeature:
  """The image that ops work on: uint8 of one shape (H, W, C), or encoded bytes (None)."""

  shape: tuple[int, int, int] | None = None


@dataclasses.dataclass(frozen=True)
class LabelFeature:
  """The class of an image as a whole, or its classes if there may be `several`."""

  several: bool = False


def own_classes(features: Mapping, name: str) -> list[str] | None:
  """Returns the classes that the feature `name` declares; None: those of the labels."""
  classes = getattr(features.get(name), 'classes', None)
  return list(classes) if classes else None


# --- forms of labels ---------------------------------------------------------------------
# MultiHot if a source has several labels an image.


class ClassIndex:
  """One class per image, as an integer; 0 where there is no image."""

  shape, dtype = (), np.dtype(np.int32)

  def __call__(self, labels: Sequence, weights: Sequence) -> np.ndarray:
    """Returns int32 [n] of n labels, each an int or None."""
    return np.array([0 if label is None else label for label in labels], np.int32)


class MultiHot:
  """1 at each class that is a label of the image, 0 at the others."""

  dtype = np.dtype(np.float32)

  def __init__(self, num_classes: int):
    self.shape = (num_classes,)

  def __call__(self, labels: Sequence, weights: Sequence) -> np.ndarray:
    """Returns float32 [n, K] of n labels, each an int, some ints or None.

    Args:
      weights: for each label float [k] in place of 1, or None.
    """
    out = np.zeros((len(labels), *self.shape), np.float32)
    for row, label, weight in zip(out, labels, weights, strict=True):
      if label is not None:
        row[np.asarray(label, np.int64)] = 1 if weight is None else weight
    return out
