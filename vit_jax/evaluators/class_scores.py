"""Precision, recall and F1 of each class."""

import numpy as np


def class_scores(right, examples, predicted) -> dict[str, np.ndarray]:
  """Returns the scores of each class, float64 [K], under their names.

  `precision` is the share of the predictions that are right, `recall` the share of the
  examples, and `f1` their harmonic mean. A share of nothing is NaN.

  Args:
    right: [K], how many examples of a class are predicted as that class.
    examples: [K], how many examples have the class.
    predicted: [K], how many examples are predicted as the class.
  """
  right, examples, predicted = (
    np.asarray(x, float) for x in (right, examples, predicted)
  )
  with np.errstate(invalid='ignore'):
    return {
      'precision': right / predicted,
      'recall': right / examples,
      'f1': 2 * right / (examples + predicted),
    }


def means(scores: dict[str, np.ndarray]) -> dict[str, float]:
  """Returns the means over the classes that occur, in which each class counts alike."""
  recall, f1 = scores['recall'], scores['f1']
  return {
    'balanced_accuracy': float(np.mean(recall[np.isfinite(recall)])),
    'macro_f1': float(np.mean(f1[np.isfinite(f1)])),
  }
