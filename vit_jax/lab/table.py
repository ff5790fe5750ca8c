"""Tables of runs: a row for each run, and means over the seeds of a cell."""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax import config as config_lib
from vit_jax.evaluators import declared
from vit_jax.tools.inspect.model import cost
from vit_jax.train import metrics as metrics_lib
from vit_jax.train import status

_MAIN = (r'.+/top1', r'.+/.+_(5|10)shot(_sweep)?')
# Columns of costs, after those of the changes and the seed.
_COSTS = ('parameters', 'trained_parameters', 'gflops', 'examples', 'steps')
_COSTS += ('step_temp_bytes',)


def row(folder: Path, cell: str, changes: Mapping, seed: int) -> dict:
  """Returns the results of a finished run, read from its folder.

  Returns:
    cell; the changes of the cell by config key; seed; parameters; trained_parameters;
    gflops of the forward pass of one image; examples of the training split; steps;
    step_temp_bytes, see `train.status`; the last value of each metric (shares, not
    per cent); seconds of training steps.
  """
  config = config_lib.read(folder)
  resolved, evals = config['resolved'], config['evals']
  costs = cost(config['model'], resolved['image_shape'])
  rows, _ = metrics_lib.read_rows(folder / 'metrics.jsonl')
  starts = status.read_starts(folder) or [{}]
  return {
    'cell': cell,
    **{key: str(value) for key, value in changes.items()},
    'seed': seed,
    'parameters': costs.parameters,
    'trained_parameters': (status.read(folder) or {}).get('trained_parameters'),
    'gflops': costs.operations / 1e9,
    'examples': resolved['num_examples'],
    'steps': rows[-1]['step'],
    'step_temp_bytes': starts[-1].get('step_temp_bytes'),
    **{
      key: value
      for key, value in metrics_lib.last_values(rows).items()
      if key == 'train/loss'
      or not (key.startswith(('time/', 'train/')) or declared(key, evals).detail)
    },
    'seconds': round(_seconds(rows, config['data']['batch_size']), 2),
  }


def _seconds(rows: list[dict], batch_size: int) -> float:
  """Returns the time of all training steps, by the speed in each row."""
  seconds, last = 0.0, 0
  for each in rows:
    if speed := each.get('time/images_per_s'):
      seconds += (each['step'] - last) * batch_size / speed
      last = each['step']
  return seconds


def csv_rows(rows: Sequence[dict]) -> list[list]:
  """Returns a table of runs, the header first; missing values are ''."""
  keys = dict.fromkeys(key for each in rows for key in each)
  last = [key for key in keys if '/' in key] + ['seconds']
  first = [key for key in keys if key not in (*last, 'seed', *_COSTS)]
  header = [*first, 'seed', *_COSTS, *last]
  return [header, *([_text(each.get(key)) for key in header] for each in rows)]


def _text(value):
  if isinstance(value, float):
    return f'{value:.7g}' if math.isfinite(value) else ''
  return '' if value is None else value


class Mean(NamedTuple):
  """A metric of a cell over its seeds; `std` is None for one seed."""

  mean: float
  std: float | None
  number: int

  def text(self, percent: bool = True) -> str:
    """Returns '87.78 ± 1.02', shares in per cent."""
    factor, digits = (100, 2) if percent else (1, 4)
    text = f'{self.mean * factor:.{digits}f}'
    return text if self.std is None else f'{text} ± {self.std * factor:.{digits}f}'


def mean(rows: Sequence[dict], metric: str | None) -> Mean | None:
  """Returns the mean and sample standard deviation of a metric; None without values."""
  values = [each.get(metric, math.nan) for each in rows]
  values = [value for value in values if math.isfinite(value)]
  if not values:
    return None
  std = statistics.stdev(values) if len(values) > 1 else None
  return Mean(statistics.fmean(values), std, len(values))


def metrics(rows: Sequence[dict], evals: dict, first: str | None = None) -> list[str]:
  """Returns the metrics of a table, the main one first.

  Those are top-1 and few-shot accuracies or, without any, all shares.

  Args:
    evals: the config's section.
    first: the main metric, where the runs have it.
  """
  keys = list(dict.fromkeys(key for each in rows for key in each if '/' in key))
  kinds = {key: declared(key, evals) for key in keys}
  shares = [k for k in keys if kinds[k].percent and kinds[k].larger_is_better]
  main = [key for pattern in _MAIN for key in shares if re.fullmatch(pattern, key)]
  main = main or shares or [key for key in keys if not key.startswith('train/')]
  return list(dict.fromkeys([*([first] if first in keys else []), *main]))


def summary(rows: Sequence[dict], metrics: Sequence[str]) -> list[dict]:
  """Returns a record for each cell.

  Returns:
    cell, parameters, trained_parameters, gflops, seeds (their number), metrics
    {name: Mean}.
  """
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


def plain(record: dict) -> dict:
  """Returns a record of `summary` as JSON has it."""
  means = {key: value._asdict() for key, value in record['metrics'].items()}
  return {**record, 'metrics': means}


def cells(
  title: str, records: Sequence[dict], more: Mapping, evals: dict, notes: Sequence[str]
) -> str:
  """Returns the table of cells as Markdown; costs are shown where they differ.

  Args:
    records: see `summary`.
    more: further columns, see `markdown`.
  """
  columns = {'cell': lambda x: x['cell']}
  if len({x['parameters'] for x in records}) > 1:
    columns['parameters'] = lambda x: f'{x["parameters"]:,}'
  if len({x['gflops'] for x in records}) > 1:
    columns['GFLOPs'] = lambda x: f'{x["gflops"]:.4g}'
  if len({x['trained_parameters'] for x in records} - {None}) > 1:
    columns['trained'] = lambda x: f'{x["trained_parameters"]:,}'
  for key in dict.fromkeys(key for x in records for key in x['metrics']):
    percent = declared(key, evals).percent
    columns[f'{key}{" (%)" if percent else ""}'] = lambda x, key=key, percent=percent: (
      x['metrics'][key].text(percent) if key in x['metrics'] else ''
    )
  columns['seeds'] = lambda x: str(x['seeds'])
  return markdown(title, records, {**columns, **more}, notes)


def markdown(
  title: str, records: Sequence, columns: Mapping[str, Callable[[Any], str]], notes
) -> str:
  """Returns a table as Markdown, below a title and above lines of notes.

  Args:
    columns: {title: record -> text}; all but the first are aligned to the right.
  """
  line = lambda texts: f'| {" | ".join(texts)} |'
  lines = [
    f'# {title}',
    '',
    line(columns),
    line(['---', *['--:'] * (len(columns) - 1)]),
  ]
  lines += [line([text(record) for text in columns.values()]) for record in records]
  return '\n'.join([*lines, '', *(f'{note}\n' for note in notes)])


# -- benchmarks of tasks in groups ----------------------------------------------------


class Score(NamedTuple):
  """A mean over tasks, each counting the same, and its standard deviation.

  The deviation follows from those of the tasks over their runs; None where one has a
  single run.
  """

  mean: float
  std: float | None


def score(tasks: Sequence[Sequence[float]]) -> Score:
  """Returns the score of tasks, each with the results of its runs."""
  mean = statistics.fmean(map(statistics.fmean, tasks))
  if any(len(values) < 2 for values in tasks):
    return Score(mean, None)
  return Score(mean, math.sqrt(sum(map(statistics.variance, tasks))) / len(tasks))


def scores(
  groups: Mapping[str, str], whole: str, results: Mapping[str, Sequence[float]]
) -> dict[str, Score]:
  """Returns the scores of all tasks and of each group, where no task is missing.

  Args:
    groups: {task: its group}.
    whole: name of the group of all tasks.
    results: {task: results of its runs}.
  """
  return {
    group: score([results[task] for task in tasks])
    for group, tasks in grouped(groups, whole).items()
    if all(results.get(task) for task in tasks)
  }


def grouped(groups: Mapping[str, str], whole: str) -> dict[str, list[str]]:
  """Returns {group: its tasks}, `whole` with all of them first."""
  tasks = {whole: list(groups)}
  for task, group in groups.items():
    if group:
      tasks.setdefault(group, []).append(task)
  return tasks


def texts(values: Sequence[float]) -> tuple:
  """Returns (mean, standard deviation or '', number of runs) as cells of a table."""
  std = f'{statistics.stdev(values):.2f}' if len(values) > 1 else ''
  return f'{statistics.mean(values):.2f}', std, len(values)
