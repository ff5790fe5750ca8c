"""Declarations of the features in a source's examples, and the forms of labels in batches.

A source for classification declares, or inherits,

  {'image': ImageFeature(), 'label': LabelFeature()}

and a source whose images hold several boxes, with a class for each box, declares

  {'image': ImageFeature(), 'boxes': Feature((None, 4), 'float32', located=True),
   'label': Feature((None,))}
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Feature:
  """A feature whose value is an array.

  Attributes:
    shape: shape of one example's array. If the first length is None, it differs between
      examples, and `pp` has to end in pad_to(NAME=LENGTH). (None, None) is a map of uint8,
      one value for every pixel of an encoded image in its upright size.
    dtype: a NumPy dtype.
    located: whether the values are positions, as fractions of the image's height and
      width. An op that moves pixels must then move these positions too.
    classes: names of the classes that its integers stand for, if not those of the labels.
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
  """The image that ops work on: uint8 of shape (H, W, C), or bytes if the shape is None."""

  shape: tuple[int, int, int] | None = None


@dataclasses.dataclass(frozen=True)
class LabelFeature:
  """The class of a whole image, or its classes if an image may have `several`."""

  several: bool = False


@dataclasses.dataclass(frozen=True)
class TextFeature:
  """The captions of an image, a list of texts. They are read if `pp` has `tokenize`."""


def own_classes(features: Mapping, name: str) -> list[str] | None:
  """Returns the class names of a feature; None if its classes are those of the labels."""
  classes = getattr(features.get(name), 'classes', None)
  return list(classes) if classes else None


# --- forms of labels ---------------------------------------------------------------------
# A batch has MultiHot labels if the source has several labels per image, else ClassIndex.


class ClassIndex:
  """One class per image, as an integer; 0 where there is no image."""

  shape, dtype = (), np.dtype(np.int32)

  def __call__(self, labels: Sequence, weights: Sequence) -> np.ndarray:
    """Returns int32 [n] of n labels, each an int or None."""
    return np.array([0 if label is None else label for label in labels], np.int32)


class MultiHot:
  """Multi-hot labels: 1 at each class that is a label of the image, 0 at the others."""

  dtype = np.dtype(np.float32)

  def __init__(self, num_classes: int):
    self.shape = (num_classes,)

  def __call__(self, labels: Sequence, weights: Sequence) -> np.ndarray:
    """Returns float32 [n, K] of n labels, each an int, some ints or None.

    Args:
      weights: one for each label. None: its values are 1; float [k]: the values of its k
        ints.
    """
    out = np.zeros((len(labels), *self.shape), np.float32)
    for row, label, weight in zip(out, labels, weights, strict=True):
      if label is not None:
        row[np.asarray(label, np.int64)] = 1 if weight is None else weight
    return out
