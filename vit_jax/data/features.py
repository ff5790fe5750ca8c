"""Declarations of the features in a source's examples.

A source for classification declares, or inherits,

  {'image': ImageFeature(), 'label': LabelFeature()}

and one of several boxes in each image, with a class for each box,

  {'image': ImageFeature(), 'boxes': Feature((None, 4), 'float32', located=True),
   'label': Feature((None,))}
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Feature:
  """An array.

  Attributes:
    shape: of one example's array. None as the first length: examples differ, and `pp` has
      to end in a pad_to(NAME=LENGTH).
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
  def ragged(self) -> bool:
    return self.shape[:1] == (None,)


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
