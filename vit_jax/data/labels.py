"""The form of labels in the batches of a run, decided at its start.

Either `ClassIndex`, int32 [B], or `MultiHot`, float32 [B, K]: the latter if a source has
several labels an image, or the pipeline has an op for labels. See `Batches.spec`.
"""

from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.data.features import LabelFeature


def form(feature: LabelFeature, op: Callable | None, num_classes: int):
  """Returns the form of a source's labels, given the pipeline's op for labels."""
  if op is not None:
    return op(num_classes)
  return MultiHot(num_classes) if feature.several else ClassIndex()


class ClassIndex:
  """One class per image, as an integer; 0 where there is no image."""

  shape, dtype = (), np.dtype(np.int32)

  def __call__(self, labels: Sequence, weights: Sequence) -> np.ndarray:
    """Returns int32 [n] of n labels, each an int or None."""
    return np.array([0 if label is None else label for label in labels], np.int32)


class MultiHot:
  """`on` at each class that is a label of the image, `off` at the others."""

  dtype = np.dtype(np.float32)

  def __init__(self, num_classes: int, on: float = 1.0, off: float = 0.0):
    self.shape = (num_classes,)
    self._on, self._off = np.float32(on), np.float32(off)

  def __call__(self, labels: Sequence, weights: Sequence) -> np.ndarray:
    """Returns float32 [n, K] of n labels, each an int, some ints or None.

    Args:
      weights: for each label float [k], or None: on is off + weight (on - off).
    """
    out = np.full((len(labels), *self.shape), self._off, np.float32)
    for row, label, weight in zip(out, labels, weights, strict=True):
      if label is not None:
        on = self._on if weight is None else self._off + (self._on - self._off) * weight
        row[np.asarray(label, np.int64)] = on
    return out
