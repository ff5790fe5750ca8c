"""The results of the experiments, as claims need them."""

import csv
import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit_jax.train import metrics


class Seen:
  """The numbers below the folder of a paper.

  What is missing, such as the result of an experiment that failed, raises `Missing`.
  """

  def __init__(self, out: Path):
    self.out = out

  @functools.cache  # noqa: B019  one object, as long as the process
  def cells(self, experiment: str) -> dict[str, dict[str, list[float]]]:
    """Returns {cell: {column: the numbers of its seeds}} of an ablation."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in self._read(experiment, 'results.csv'):
      cell = found.setdefault(row['cell'], {})
      for column, value in row.items():
        number = _number(value)
        if number is not None:
          cell.setdefault(column, []).append(number)
    return found

  def is_ablation(self, experiment: str) -> bool:
    """Whether it has a table of cells."""
    return (self.out / experiment / 'results.csv').exists()

  def last(self, run: str, metric: str) -> float:
    """Returns the last value of a metric of a run of its own."""
    known, _ = metrics.read_rows(self._file(run, 'metrics.jsonl'))
    values = metrics.last_values(known)
    if metric not in values:
      raise Missing(f'{run} has no {metric}')
    return values[metric]

  def mean(self, experiment: str, cell: str, metric: str) -> float:
    """Returns the mean over the seeds of a cell."""
    try:
      return statistics.fmean(self.cells(experiment)[cell][metric])
    except KeyError:
      raise Missing(f'{experiment} has no {metric} of {cell}') from None

  def figure(self, name: str) -> list[dict[str, str]]:
    """Returns the rows of the numbers of a figure."""
    return self._read('figures', f'{name}.csv')

  def _read(self, *path: str) -> list[dict[str, str]]:
    with self._file(*path).open(newline='', encoding='utf-8') as file:
      return list(csv.DictReader(file))

  def _file(self, *path: str) -> Path:
    file = self.out.joinpath(*path)
    if not file.exists():
      raise Missing(f'{"/".join(path)} was not made')
    return file


class Missing(Exception):
  """An experiment that a claim needs has no result."""


def noise(shares: Sequence[float], examples: int) -> float:
  """Returns how far two accuracies may differ by chance: two standard errors.

  Of the difference of two proportions, each measured on so many examples (normal
  approximation, the examples drawn independently); of training's own randomness it
  knows nothing.

  Args:
    shares: the two, from 0 to 1.
    examples: of the test set.
  """
  # At 0 or 1 the approximation would say 0: half an example is added on either side.
  p = [(share * examples + 0.5) / (examples + 1) for share in shares]
  return 2 * math.sqrt(sum(share * (1 - share) for share in p) / examples)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
  """Returns Spearman's rank correlation of two sequences; ties have their mean rank."""
  from jax.scipy.stats import rankdata

  ranks = [np.asarray(rankdata(np.asarray(values))) for values in (x, y)]
  return float(np.corrcoef(*ranks)[0, 1])


def _number(text: str) -> float | None:
  try:
    value = float(text)
  except ValueError:
    return None
  return value if math.isfinite(value) else None
