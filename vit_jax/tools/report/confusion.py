"""Which classes are taken for which, for any number of classes."""

from typing import NamedTuple

import numpy as np


class Confusion(NamedTuple):
  """The cells of a confusion matrix that are not empty.

  Attributes:
    num_classes: K.
    cells: int [m, 3], (true class, predicted class, examples), the largest first.
    counts, right: int [K], examples of each class, and those predicted as it.
    predicted: int [K], examples predicted as each class.
  """

  num_classes: int
  cells: np.ndarray
  counts: np.ndarray
  right: np.ndarray
  predicted: np.ndarray

  def largest(self, most: int = 100) -> np.ndarray:
    """Returns the largest cells off the diagonal, int [at most `most`, 3]."""
    return self.cells[self.cells[:, 0] != self.cells[:, 1]][:most]

  def drawn(self, most: int) -> tuple[np.ndarray, int]:
    """Returns (the largest cells, how many examples are in those left out)."""
    return self.cells[:most], int(self.cells[most:, 2].sum())

  def worst(self, most: int = 20) -> np.ndarray:
    """Returns the classes of lowest accuracy, of those with examples, int [at most most].

    Of equally bad ones those of more examples come first.
    """
    there = np.flatnonzero(self.counts)
    share = self.right[there] / self.counts[there]
    return there[np.lexsort((there, -self.counts[there], share))][:most]


def count(label, predicted, num_classes: int) -> Confusion | None:
  """Returns the confusion of answers; None if no example has one label.

  Args:
    label: int [n], the true class; those below 0, of several labels, are left out.
    predicted: int [n].
  """
  label, predicted = np.asarray(label, np.int64), np.asarray(predicted, np.int64)
  one = label >= 0
  label, predicted = label[one], predicted[one]
  if not len(label):
    return None
  K = max(num_classes, int(max(label.max(), predicted.max())) + 1)
  pairs, sizes = np.unique(label * K + predicted, return_counts=True)
  order = np.lexsort((pairs, -sizes))
  true, answer = np.divmod(pairs[order], K)
  return Confusion(
    K,
    np.stack([true, answer, sizes[order]], 1),
    np.bincount(label, minlength=K),
    np.bincount(label[label == predicted], minlength=K),
    np.bincount(predicted, minlength=K),
  )
