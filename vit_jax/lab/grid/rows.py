"""The rows of a grid: results of its runs, and means over the seeds of a cell."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from vit_jax import config as config_lib
from vit_jax.evaluators import declared
from vit_jax.lab.grid.cells import Run
from vit_jax.tools.inspect import cost
from vit_jax.train import environment, metrics, status

# Columns of every row beside the changes of its cell and the metrics.
COSTS = ('parameters', 'trained_parameters', 'gflops', 'examples', 'steps')
COSTS += ('step_temp_bytes',)


def of_run(run: Run) -> dict:
  """Returns the results of a finished run, from its folder alone.

  Returns:
    cell; the changes of the cell by config key; seed; parameters, of the model;
    trained_parameters, see `vit_jax.tune`; gflops, forward, of one image; examples, of the
    training split; steps; step_temp_bytes, see `train.environment`; the last value of each
    metric as metrics.jsonl has it (shares, not per cent); seconds, of training steps.
  """
  config = config_lib.read(run.folder)
  resolved = config['resolved']
  found = cost.of(config['model'], resolved['image_shape'])
  known, _ = metrics.read_rows(run.folder / 'metrics.jsonl')
  values = metrics.last_values(known)
  return {
    'cell': run.cell.name,
    **{key: _text(value) for key, value in run.cell.changes.items()},
    'seed': run.seed,
    'parameters': found.parameters,
    **{key: value for key, value in _status(run).items() if key in COSTS},
    'gflops': found.operations / 1e9,
    'examples': resolved['num_examples'],
    'steps': known[-1]['step'],
    'step_temp_bytes': _temp_bytes(run),
    **{k: v for k, v in values.items() if _is_result(k, config['evals'])},
    'seconds': round(_seconds(known, config['data']['batch_size']), 2),
  }


def _temp_bytes(run: Run) -> int | None:
  starts = environment.read(run.folder)
  return starts[-1].get('step_temp_bytes') if starts else None


def _status(run: Run) -> dict:
  return status.read(run.folder) or {}


def _is_result(key: str, evals: dict) -> bool:
  of_training = key.startswith(('time/', 'train/')) and key != 'train/loss'
  return not of_training and not declared(key, evals).detail


def _text(value) -> str:
  if isinstance(value, dict):  # a section
    return ' '.join(f'{key}={_text(item)}' for key, item in value.items())
  return str(value)


def _seconds(known: list[dict], batch_size: int) -> float:
  """Returns how long the steps took, by their speed in each row."""
  seconds, last = 0.0, 0
  for row in known:
    if speed := row.get('time/images_per_s'):
      seconds += (row['step'] - last) * batch_size / speed
      last = row['step']
  return seconds


def columns(rows: Sequence[dict]) -> list[str]:
  """Returns the columns of a table of runs: what was changed, what it cost and gave."""
  found = dict.fromkeys(key for row in rows for key in row)
  last = [key for key in found if '/' in key] + ['seconds']
  first = [key for key in found if key not in (*last, 'seed', *COSTS)]
  return [*first, 'seed', *COSTS, *last]


def table(rows: Sequence[dict]) -> list[list]:
  """Returns rows of cells, the header first; a value that is not there is ''."""
  header = columns(rows)
  return [header, *([_cell(row.get(key, '')) for key in header] for row in rows)]


def _cell(value):
  if isinstance(value, float):
    return f'{value:.7g}' if math.isfinite(value) else ''
  return value


@dataclasses.dataclass(frozen=True)
class Mean:
  """A metric of a cell over its seeds; `std` is None for one seed."""

  mean: float
  std: float | None
  number: int

  def text(self, percent: bool = True) -> str:
    """Returns '87.78 ± 1.02', of shares in per cent."""
    factor, digits = (100, 2) if percent else (1, 4)
    text = f'{self.mean * factor:.{digits}f}'
    return text if self.std is None else f'{text} ± {self.std * factor:.{digits}f}'


def mean(rows: Sequence[dict], metric: str) -> Mean | None:
  """Returns the mean of a metric over rows, and their sample standard deviation.

  None: no row has it.
  """
  values = [row[metric] for row in rows if math.isfinite(row.get(metric, math.nan))]
  if not values:
    return None
  std = statistics.stdev(values) if len(values) > 1 else None
  return Mean(statistics.fmean(values), std, len(values))
