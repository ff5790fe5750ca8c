"""Whether a model is right as often as its probabilities say."""

from typing import NamedTuple

import numpy as np

BINS = 15  # as in Guo et al. 2017


class Calibration(NamedTuple):
  """Examples by their confidence, the probability of the class they were given.

  Attributes:
    edges: [bins + 1], from 0 to 1.
    counts: int [bins], examples whose confidence is in (edges[i], edges[i + 1]].
    confidence, accuracy: [bins], means over them; nan where there are none.
    ece: expected calibration error, the mean of |accuracy - confidence| by bin weighted
      by counts (Naeini et al. 2015; Guo et al. 2017, arXiv 1706.04599, equation 3).
    mean_confidence, mean_accuracy: over all examples.
  """

  edges: np.ndarray
  counts: np.ndarray
  confidence: np.ndarray
  accuracy: np.ndarray
  ece: float
  mean_confidence: float
  mean_accuracy: float


def measure(confidence, right, bins: int = BINS) -> Calibration | None:
  """Returns the calibration of answers; None if none has a finite confidence.

  Args:
    confidence: float [n] in [0, 1]; those that are not finite are left out.
    right: bool [n].
  """
  confidence, right = np.asarray(confidence, float), np.asarray(right, float)
  finite = np.isfinite(confidence)
  confidence, right = confidence[finite], right[finite]
  if not len(confidence):
    return None
  edges = np.linspace(0, 1, bins + 1)
  where = np.clip(np.searchsorted(edges, confidence) - 1, 0, bins - 1)
  counts = np.bincount(where, minlength=bins)
  with np.errstate(invalid='ignore'):
    means, accuracy = (
      np.bincount(where, weights=values, minlength=bins) / counts
      for values in (confidence, right)
    )
  gaps = np.abs(accuracy - means)[counts > 0]
  return Calibration(
    edges,
    counts,
    means,
    accuracy,
    float(gaps @ counts[counts > 0] / len(confidence)),
    float(confidence.mean()),
    float(right.mean()),
  )
