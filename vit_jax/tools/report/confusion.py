"""Which classes a model confuses, for any number of classes."""

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
    """Returns the largest cells off the diagonal, int [<= most, 3]."""
    return self.cells[self.cells[:, 0] != self.cells[:, 1]][:most]

  def drawn(self, most: int) -> tuple[np.ndarray, int]:
    """Returns (the `most` largest cells, the number of examples in the others)."""
    return self.cells[:most], int(self.cells[most:, 2].sum())

  def worst(self, most: int = 20) -> np.ndarray:
    """Returns the classes of lowest accuracy among those with examples, int [<= most].

    Of classes that are equally bad the one with more examples comes first.
    """
    there = np.flatnonzero(self.counts)
    share = self.right[there] / self.counts[there]
    return there[np.lexsort((there, -self.counts[there], share))][:most]


def count(label, predicted, num_classes: int) -> Confusion | None:
  """Returns the confusion of answers; None if every example has several labels.

  Args:
    label: int [n], the true class; examples with several labels have -1 and are left out.
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
