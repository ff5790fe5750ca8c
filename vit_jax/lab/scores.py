"""Means over the tasks of a benchmark, and over its groups of tasks."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Score(NamedTuple):
  """A mean.

  Attributes:
    mean: each task counts the same, whatever the number of its runs.
    std: standard deviation of that mean, from those of the tasks over their runs; None
      where a task has one run only.
  """

  mean: float
  std: float | None


def of(runs: Sequence[Sequence[float]]) -> Score:
  """Returns the score of tasks, each with the results of its runs."""
  mean = statistics.fmean(statistics.fmean(values) for values in runs)
  if any(len(values) < 2 for values in runs):
    return Score(mean, None)
  variance = sum(statistics.variance(values) for values in runs)
  return Score(mean, math.sqrt(variance) / len(runs))


def groups_of(tasks: Mapping[str, str], whole: str) -> dict[str, list[str]]:
  """Returns {group: its tasks}, `whole` with all of them first.

  Args:
    tasks: {task: its group}. Where there is one group only, it is `whole`.
  """
  groups: dict[str, list[str]] = {whole: list(tasks)}
  if len(set(tasks.values())) > 1:
    for task, group in tasks.items():
      groups.setdefault(group, []).append(task)
  return groups


def of_groups(
  groups: Mapping[str, Sequence[str]], found: Mapping[str, Sequence[float]]
) -> dict[str, Score]:
  """Returns {group: its score}, of those groups of which every task has results.

  Args:
    groups: {group: its tasks}.
    found: {task: results of its runs}.
  """
  return {
    group: of([found[task] for task in tasks])
    for group, tasks in groups.items()
    if all(found.get(task) for task in tasks)
  }
