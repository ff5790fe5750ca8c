"""Tables of runs: a row per run, and means over the seeds of each cell."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_jax import config as config_lib
from vit_jax import files
from vit_jax.evaluators import find_metric
from vit_jax.tools import out_folder
from vit_jax.tools.inspect.model import cost
from vit_jax.train import metrics as metrics_lib
from vit_jax.train import status

_MAIN = (r'.+/top1', r'.+/.+_(5|10)shot(_sweep)?')


def row(folder: Path, cell: str, changes: Mapping, seed: int) -> dict:
  """Reads the results of a finished run from its folder.

  They are its changes; its costs, with GFLOPs of the forward pass of one image; the last
  value of each metric, with shares from 0 to 1; and the seconds of its training steps.
  """
  config = config_lib.read(folder)
  resolved, evals = config['resolved'], config['evals']
  costs = cost(config['model'], resolved['image_shape'])
  rows, _ = metrics_lib.read_rows(folder / 'metrics.jsonl')
  return {
    'cell': cell,
    **{key: str(value) for key, value in changes.items()},
    'seed': seed,
    'parameters': costs.parameters,
    'trained_parameters': (status.read(folder) or {}).get('trained_parameters'),
    'gflops': costs.operations / 1e9,
    'examples': resolved['num_examples'],
    'steps': rows[-1]['step'],
    **{
      key: value
      for key, value in metrics_lib.last_values(rows).items()
      if key == 'train/loss'
      or not (key.startswith(('time/', 'train/')) or find_metric(key, evals).detail)
    },
    'seconds': round(_seconds(rows, config['data']['batch_size']), 2),
  }


def _seconds(rows: list[dict], batch_size: int) -> float:
  """Returns the total time of training steps, computed from the speed in each row."""
  seconds, last = 0.0, 0
  for each in rows:
    if speed := each.get('time/images_per_s'):
      seconds += (each['step'] - last) * batch_size / speed
      last = each['step']
  return seconds


def write(out: Path, rows: Sequence[dict], text: str) -> list[Path]:
  """Writes rows to results.csv and a text to table.md; returns both paths.

  A missing value is written as ''.
  """
  paths = [out / 'results.csv', out / 'table.md']
  header = list(dict.fromkeys(key for each in rows for key in each))
  lines = [[each.get(key) for key in header] for each in rows]
  out_folder.write_csv(paths[0], [header, *lines])
  files.replace(paths[1], text)
  return paths


class Mean(NamedTuple):
  """The mean of `number` values; `std` is None for a single value."""

  mean: float
  std: float | None
  number: int

  @classmethod
  def compute(cls, values: Sequence[float]) -> 'Mean':
    """Computes the mean and the sample standard deviation of values."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return cls(statistics.fmean(values), std, len(values))

  def texts(self) -> tuple[str, str]:
    """Returns the mean and the deviation, '' if there is none, with two decimal places."""
    return f'{self.mean:.2f}', '' if self.std is None else f'{self.std:.2f}'

  def text(self, percent: bool = True) -> str:
    """Returns a text such as '87.78 ± 1.02'; a share is multiplied by 100."""
    factor, digits = (100, 2) if percent else (1, 4)
    text = f'{self.mean * factor:.{digits}f}'
    return text if self.std is None else f'{text} ± {self.std * factor:.{digits}f}'


def mean(rows: Sequence[dict], metric: str | None) -> Mean | None:
  """Returns the mean of a metric over the rows with a finite value; None if there are none."""
  values = [each.get(metric, math.nan) for each in rows]
  values = [value for value in values if math.isfinite(value)]
  return Mean.compute(values) if values else None


def metrics(rows: Sequence[dict], evals: dict, first: str | None = None) -> list[str]:
  """Chooses top-1 and few-shot accuracies, otherwise all shares; puts `first` first."""
  keys = list(dict.fromkeys(key for each in rows for key in each if '/' in key))
  kinds = {key: find_metric(key, evals) for key in keys}
  shares = [k for k in keys if kinds[k].percent and kinds[k].larger_is_better]
  main = [key for pattern in _MAIN for key in shares if re.fullmatch(pattern, key)]
  main = main or shares or [key for key in keys if not key.startswith('train/')]
  return list(dict.fromkeys([*([first] if first in keys else []), *main]))


def summary(rows: Sequence[dict], metrics: Sequence[str]) -> list[dict]:
  """Summarises each cell: its name, costs, number of seeds, and metrics {name: Mean}."""
  cells: dict[str, list[dict]] = {}
  for each in rows:
    cells.setdefault(each['cell'], []).append(each)
  copied = ('cell', 'parameters', 'trained_parameters', 'gflops')
  return [
    {
      **{key: runs[0][key] for key in copied},
      'seeds': len(runs),
      'metrics': {key: value for key in metrics if (value := mean(runs, key))},
    }
    for runs in cells.values()
  ]


def cells(records: Sequence[dict], evals: dict) -> list[dict[str, str]]:
  """Makes a row of texts from each record of `summary`; costs appear if they differ."""
  differ = lambda key: len({x[key] for x in records} - {None}) > 1
  costs = (
    ('parameters', 'parameters', ','),
    ('GFLOPs', 'gflops', '.4g'),
    ('trained', 'trained_parameters', ','),
  )
  costs = [cost for cost in costs if differ(cost[1])]
  metrics = list(dict.fromkeys(key for x in records for key in x['metrics']))
  percent = {key: find_metric(key, evals).percent for key in metrics}
  return [
    {
      'cell': x['cell'],
      **{title: f'{x[key]:{form}}' for title, key, form in costs},
      **{
        f'{key}{" (%)" * percent[key]}': (
          x['metrics'][key].text(percent[key]) if key in x['metrics'] else ''
        )
        for key in metrics
      },
      'seeds': str(x['seeds']),
    }
    for x in records
  ]


def markdown(title: str, rows: Sequence[dict[str, str]], notes: Iterable[str]) -> str:
  """Formats rows of texts, which have the same keys, as a table in Markdown."""
  line = lambda texts: f'| {" | ".join(texts)} |'
  rule = line(['---', *['--:'] * (len(rows[0]) - 1)])
  lines = [f'# {title}', '', line(rows[0]), rule, *(line(x.values()) for x in rows)]
  return '\n'.join([*lines, '', *(f'{note}\n' for note in notes)])


# -- benchmarks of tasks in groups ----------------------------------------------------


def score(tasks: Sequence[Sequence[float]]) -> Mean:
  """Averages the results of runs within each task, then over tasks.

  The deviation follows from those of the tasks. It is None if a task has a single run.
  """
  mean, std = statistics.fmean(map(statistics.fmean, tasks)), None
  if all(len(values) > 1 for values in tasks):
    std = math.sqrt(sum(map(statistics.variance, tasks))) / len(tasks)
  return Mean(mean, std, len(tasks))


def scores(
  groups: Mapping[str, str], whole: str, results: Mapping[str, Sequence[float]]
) -> dict[str, Mean]:
  """Returns the score of all tasks, titled `whole`, and of each group.

  `groups` is {task: its group, or ''}. A group that lacks the result of a task has no score.
  """
  members = {whole: list(groups)}
  for task, group in groups.items():
    if group:
      members.setdefault(group, []).append(task)
  return {
    group: score([results[task] for task in tasks])
    for group, tasks in members.items()
    if all(map(results.get, tasks))
  }
