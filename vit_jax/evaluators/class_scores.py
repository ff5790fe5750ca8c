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


def means(scores: dict[str, np.ndarray], several: bool = False) -> dict[str, float]:
  """Returns the means over classes, in which each class counts alike, as scikit-learn does.

  Over the classes that occur or are predicted, or over all if images have several labels. A
  precision or recall of nothing counts as 0. `balanced_accuracy` is the mean recall of the
  classes that occur.
  """
  among = np.isfinite(scores['f1']) | several
  out = {f'macro_{k}': float(np.nan_to_num(x[among]).mean()) for k, x in scores.items()}
  if not several:
    out['balanced_accuracy'] = float(np.nanmean(scores['recall']))
  return out


def rank(scores: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
  """Returns how well the scores of each class order the examples, float64 [K].

  `average_precision` is the sum of (R_n - R_n-1) P_n over the distinct scores, without
  interpolation. `auroc` is the probability that an example of the class has a larger score
  than another example; equal scores count a half. Both are NaN without examples of the class,
  and the second without others, too.

  Args:
    scores: [N, K].
    targets: bool [N, K], which classes are labels.
  """
  columns = [_rank(*column) for column in zip(scores.T, targets.T, strict=True)]
  return dict(zip(('average_precision', 'auroc'), np.transpose(columns), strict=True))


def _rank(scores, right) -> tuple[float, float]:
  order = np.argsort(-scores, kind='stable')
  # The last example of each distinct score.
  last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
  hits = np.cumsum(right[order])[last]
  misses = last + 1 - hits
  with np.errstate(invalid='ignore'):
    recall, false_alarms = (np.append(0, x / x[-1]) for x in (hits, misses))
  auroc = np.sum(np.diff(false_alarms) * (recall[1:] + recall[:-1]) / 2)
  return np.sum(np.diff(recall) * hits / (last + 1)), auroc
