"""The record of a run: metrics.jsonl (the truth) and TensorBoard events (a mirror).

Rows of metrics.jsonl are functions of the run's state alone, so that a resumed run
writes what an uninterrupted one would have; only keys under `time/` are measurements.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

from vit_jax import distributed, evaluators, files
from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.evaluators.metric import find
from vit_jax.train import disk, events, loggers, rows

TIME = 'time/'


@dataclasses.dataclass(frozen=True)
class Log:
  """The config's `log` section."""

  every: int = 50  # steps between rows
  tensorboard: bool = True
  profile: bool = False  # write a profile of a few steps to WORKDIR/profile
  report: bool = True  # `vit_jax train` writes WORKDIR/report.html at the end
  wandb: Annotated[dict | None, loggers.check(loggers.Wandb)] = None
  mlflow: Annotated[dict | None, loggers.check(loggers.Mlflow)] = None


def write_json(path: Path, value) -> None:
  """Writes a JSON file so that a reader sees the old or the new one, never a half.

  Of several processes the first does. Raises: OSError.
  """
  if not distributed.is_first():
    return
  files.replace(path, json_of(value))


def json_of(value) -> bytes:
  """Returns what `write_json` writes."""
  return (json.dumps(value, indent=1) + '\n').encode()


def larger_is_better(
  key: str, evals: dict, asked_by: str = 'config.checkpoint.best'
) -> bool:
  """Returns the direction of a number such as 'test/loss', by which the best is chosen.

  Args:
    asked_by: what names that number, for messages.

  Raises:
    UserError: if nothing gives such a number, or neither large nor small values are best.
  """
  source, _, name = key.partition('/')
  where = f'source of the metric {asked_by}'
  metrics = evaluators.declarations(choose(where, source, [*evals, 'train']), evals)
  larger = find(metrics, name).larger_is_better
  if larger is None:
    directed = [k for k, m in metrics.items() if m.larger_is_better is not None]
    raise UserError(
      f'{asked_by}={key!r}: nothing says which {name!r} is best. Metrics of {source} of '
      f'which one is: {directed}.{did_you_mean(name, directed)}'
    )
  return larger


class Metrics:
  """Appends rows `{"step": n, name: number}`, each with one write of a whole line.

  In a bucket rows are written at most every ten seconds, events when a checkpoint is.
  """

  def __init__(self, workdir: Path, keep_to: int, tensorboard: bool, mirrors=None):
    """Opens `workdir`/metrics.jsonl, without rows and events past step `keep_to`.

    Of several processes the first writes; the others hold the rows in memory alone.
    """
    self.path = workdir / 'metrics.jsonl'
    self._mirrors = mirrors or loggers.Loggers({}, workdir, {})
    known, lost = rows.read_checked(self.path)
    self.rows = [row for row in known if row['step'] <= keep_to]
    if lost:
      distributed.say(f'{self.path}: {lost} damaged lines are left out.')
    self._file = self._events = None
    self._early = [] if tensorboard and distributed.is_first() else None
    self._events_folder = disk.LocalFolder(workdir)
    if not distributed.is_first():
      return
    events.forget(workdir, keep_to)
    self._file = disk.appended(self.path, ''.join(map(rows.line, self.rows)).encode())

  def write(self, step: int, values: dict) -> None:
    """Adds the row of `values` (numbers) at `step`."""
    row = {'step': step, **{k: _number(v) for k, v in values.items()}}
    self.rows.append(row)
    if self._file is not None:
      self._file.add(rows.line(row).encode())
    if self._early is not None:
      self._early.append(row)
    else:
      self._write_event(row)
    self._mirrors.write(step, {k: v for k, v in row.items() if k != 'step'})

  def open_events(self) -> float:
    """Opens the TensorBoard file, if there is to be one, with the rows written so far.

    Not part of `__init__`, as importing Keras takes two seconds: call it once the first
    step has run. Returns the seconds that it took.
    """
    start = time.perf_counter()
    self._mirrors.open()
    if self._early is not None:
      early, self._early = self._early, None
      self._events = _tensorboard(self._events_folder.folder)
      for row in early:
        self._write_event(row)
    return time.perf_counter() - start

  def _write_event(self, row: dict) -> None:
    if self._events:
      values = {k: v for k, v in row.items() if k != 'step'}
      self._events.write_scalars(row['step'], values)

  def has(self, step: int, prefix: str) -> bool:
    """Whether a row at `step` holds a value whose name starts with `prefix`."""
    return any(
      row['step'] == step and any(k.startswith(prefix) for k in row)
      for row in self.rows
    )

  def flush(self) -> None:
    """Returns once all rows are written, also where writing waits: in a bucket."""
    if self._file is not None:
      self._file.flush()
    if self._events and self._events_folder.remote:
      self._events.flush()
      self._events_folder.push()

  def close(self) -> None:
    self._mirrors.close()
    if self._file is not None:
      self._file.close()
    if self._early:
      self.open_events()
    if self._events:
      self._events.close()
    self._events_folder.close()


def _number(value):
  value = float(value)
  return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _tensorboard(workdir):
  try:
    from clu import metric_writers
  except ImportError as error:
    distributed.say(f"TensorBoard events are off ({error}): pip install 'vit_jax[tf]'.")
    return None
  return metric_writers.SummaryWriter(str(workdir))
