"""Numbers of a run's page: calibration, confusion, confidence intervals, seeds."""

import json
import math
import statistics
from typing import NamedTuple

import numpy as np

from vit_jax import evaluators
from vit_jax.tools.report.folder import Run
from vit_jax.train.metrics import TIME, last_values

BINS = 15  # as in Guo et al. 2017


class Calibration(NamedTuple):
  """Examples by confidence, the probability of the predicted class.

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

  def rows(self) -> list[int]:
    """Returns the bins that have examples."""
    return np.flatnonzero(self.counts).tolist()


def calibrate(confidence, right, bins: int = BINS) -> Calibration | None:
  """Measures the calibration of answers; None if no confidence is finite.

  Args:
    confidence: float [n] in [0, 1]; values that are not finite are left out.
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

  def largest(self, most: int) -> np.ndarray:
    """Returns the largest cells off the diagonal, int [<= most, 3]."""
    return self.cells[self.cells[:, 0] != self.cells[:, 1]][:most]

  def worst(self, most: int = 20) -> np.ndarray:
    """Returns the classes of lowest accuracy among those with examples, int [<= most].

    Of classes that are equally bad the one with more examples comes first.
    """
    classes = np.flatnonzero(self.counts)
    share = self.right[classes] / self.counts[classes]
    return classes[np.lexsort((classes, -self.counts[classes], share))][:most]


def confuse(label, predicted, num_classes: int) -> Confusion | None:
  """Counts confusions; None if every example has several labels.

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


# Sections in which runs of the same experiment may differ.
_NEUTRAL = ('seed', 'log', 'resume_allow', 'resolved', 'checkpoint')


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
  """Returns the confidence interval of a share of n examples, 95 % by default.

  The score interval of Wilson 1927 (doi 10.1080/01621459.1927.10502953).
  """
  if n < 1 or not math.isfinite(share):
    return 0.0, 1.0
  middle = (share + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / n / 2) ** 2)
  return max(0.0, middle - half), min(1.0, middle + half)


def results(run: Run) -> dict[str, tuple[str, str]]:
  """Returns {name: (value, spread)} of a run's last numbers, as texts.

  The spread is the standard deviation over the seeds of a few-shot evaluation, or the
  `wilson` interval of an accuracy whose number of examples is known; otherwise ''.
  """
  values = last_values(run.rows)
  texts = {}
  for name, value in values.items():
    metric = evaluators.declared(name, run.evals)
    if name.startswith((TIME, 'train/')) or metric.detail:
      continue
    spread, n = '', values.get(f'{name.rpartition("/")[0]}/examples')
    if metric.std and name + metric.std in values:
      spread = f'± {metric.text(values[name + metric.std])} over seeds'
    elif metric.percent and n:
      low, high = wilson(value, int(n))
      spread = f'{low:.1%} to {high:.1%}'
    texts[name] = metric.text(value), spread
  if 'train/loss' in values:
    texts['train/loss'] = f'{values["train/loss"]:.4g}', ''
  return texts


def repeats(runs: list[Run]) -> list[list[Run]]:
  """Returns the groups of two or more runs whose configs differ by the seed alone."""
  groups: dict[str, list[Run]] = {}
  for run in runs:
    config = {k: v for k, v in run.config.items() if k not in _NEUTRAL}
    groups.setdefault(json.dumps(config, sort_keys=True), []).append(run)
  return [group for group in groups.values() if len(group) > 1]


def over_seeds(group: list[Run]) -> dict[str, str]:
  """Returns {name: 'mean ± sample standard deviation'} of the numbers that all runs have."""
  values = [last_values(run.rows) for run in group]
  texts = {}
  for name in results(group[0]):
    if all(name in v for v in values):
      metric = evaluators.declared(name, group[0].evals)
      numbers = [v[name] for v in values]
      mean, std = statistics.fmean(numbers), _std(numbers)
      texts[name] = f'{metric.text(mean)} ± {metric.text(std)}'
  return texts


def _std(numbers: list[float]) -> float:
  if not all(map(math.isfinite, numbers)):
    return math.nan
  return statistics.stdev(numbers)


def differences(runs: list[Run]) -> dict[str, list[str]]:
  """Returns {key of the config: its value in each run, as text} of keys that differ."""
  flats = [_flat(run.config) for run in runs]
  keys = dict.fromkeys(key for flat in flats for key in flat)
  absent = '—'
  rows = {key: [flat.get(key, absent) for flat in flats] for key in keys}
  return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _flat(value, prefix: str = '') -> dict[str, str]:
  texts = {}
  for key, item in value.items():
    if prefix == '' and key in ('resolved', 'resume_allow'):
      continue
    if isinstance(item, dict):
      texts |= _flat(item, f'{prefix}{key}.')
    else:
      texts[prefix + key] = item if isinstance(item, str) else json.dumps(item)
  return texts
