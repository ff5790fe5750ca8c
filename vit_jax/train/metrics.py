"""metrics.jsonl: the record of a run, one row `{"step": n, name: number}` to a line.

Rows are functions of the run's state alone, so that a resumed run writes what an
uninterrupted one would have; only keys under `time/` are measurements. TensorBoard,
Weights & Biases and MLflow get copies.
"""

import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Annotated

from vit_jax import distributed, evaluators, files
from vit_jax.check import Period
from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.evaluators.base import find
from vit_jax.train import loggers
from vit_jax.train.workdir import LocalFolder

TIME = 'time/'
# Seconds between two writes in a bucket, where an object is replaced as a whole.
_BUCKET_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Log:
  """The config's `log` section."""

  every: Period = 50  # steps between rows
  tensorboard: bool = True
  profile: bool = False  # write a profile of a few steps to WORKDIR/profile
  report: bool = True  # `vit_jax train` writes WORKDIR/report.html at the end
  wandb: Annotated[dict | None, loggers.check(loggers.Wandb)] = None
  mlflow: Annotated[dict | None, loggers.check(loggers.Mlflow)] = None


def write_json(path: Path, value) -> None:
  """Replaces a JSON file; of several processes the first does. Raises: OSError."""
  if distributed.is_first():
    files.replace(path, json.dumps(value, indent=1) + '\n')


def larger_is_better(
  key: str, evals: dict, asked_by: str = 'config.checkpoint.best'
) -> bool:
  """Returns the direction of a number such as 'test/loss', by which the best is chosen.

  Args:
    asked_by: the option that names the number, for errors.
  """
  source, _, name = key.partition('/')
  where = f'source of the metric {asked_by}'
  metrics = evaluators.declarations(choose(where, source, [*evals, 'train']), evals)
  larger = find(metrics, name).larger_is_better
  if larger is None:
    directed = [k for k, m in metrics.items() if m.larger_is_better is not None]
    raise UserError(
      f'{asked_by}={key!r}: nothing says which {name!r} is best. One of {directed}.'
      f'{did_you_mean(name, directed)}'
    )
  return larger


def read_rows(path: Path) -> tuple[list[dict], int]:
  """Returns (rows, number of damaged lines, which are left out); ([], 0) without a file.

  A torn last line, which a kill leaves behind, is left out and not counted.
  """
  try:
    *lines, torn = path.read_bytes().split(b'\n')
  except FileNotFoundError:
    return [], 0
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}. Move it away.') from error
  rows, damaged = [], 0
  for number, text in enumerate([*lines, torn]):
    row = _parse(text)
    # A run writes steps in order and no row twice: anything else is damage.
    last = rows[-1] if rows else None
    if row is None or (last and (row['step'] < last['step'] or row == last)):
      damaged += number < len(lines)
    else:
      rows.append(row)
  return rows, damaged


def _parse(line: bytes) -> dict | None:
  try:
    row = json.loads(line)
    step = row.pop('step')
    values = {k: math.nan if v is None else v for k, v in row.items()}
    whole = all(type(v) in (int, float) and not abs(v) > 1e308 for v in values.values())
    return {'step': step, **values} if whole and type(step) is int else None
  except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
    return None


def line(row: dict) -> bytes:
  """Returns a row as it is written: JSON, with null for NaN and infinities."""
  finite = {k: v if math.isfinite(v) else None for k, v in row.items()}
  return json.dumps(finite, allow_nan=False).encode() + b'\n'


def last_values(rows: list[dict]) -> dict[str, float]:
  """Returns the last value of every name in rows."""
  values: dict[str, float] = {}
  for row in rows:
    values |= {k: v for k, v in row.items() if k != 'step'}
  return values


class Metrics:
  """Appends rows, each with one write of a whole line; in a bucket at most every 10 s.

  Of several processes the first writes; the others hold the rows in memory alone.

  Attributes:
    rows: all rows of the file, also those from before the run was resumed.
  """

  def __init__(self, workdir: Path, step: int, tensorboard: bool, loggers=None):
    """Opens `workdir`/metrics.jsonl, without rows and events past `step`."""
    self.path = workdir / 'metrics.jsonl'
    rows, damaged = read_rows(self.path)
    self.rows = [row for row in rows if row['step'] <= step]
    if damaged:
      distributed.say(f'{self.path}: {damaged} damaged lines are left out.')
    first = distributed.is_first()
    self._remote = files.is_url(workdir)
    self._file = self._events = None
    self._loggers, self._events_folder = loggers, LocalFolder(workdir)
    self._start = step if tensorboard and first else None  # None: no TensorBoard
    self._written = None  # (number of rows, when) of the last write of all of them
    if first:
      self._replace()
    if first and not self._remote:
      self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

  def _replace(self) -> None:
    files.replace(self.path, b''.join(map(line, self.rows)))
    self._written = len(self.rows), time.monotonic()

  def write(self, step: int, values: dict) -> None:
    """Adds the row of `values` (numbers) at `step`."""
    values = {name: _number(value) for name, value in values.items()}
    self.rows.append({'step': step, **values})
    if self._file is not None:
      data = line(self.rows[-1])
      while data:  # a write may be partial: only the next one fails
        data = data[os.write(self._file, data) :]
    elif self._written and time.monotonic() - self._written[1] >= _BUCKET_SECONDS:
      self._replace()
    if self._start is not None:
      self._events = self._events or _event_writer(
        self._events_folder.folder, self._start
      )
      self._events.write_scalars(step, values)
    if self._loggers:
      self._loggers.write(step, values)

  def flush(self) -> None:
    """Writes all rows and events that wait, as they do in a bucket."""
    if self._remote and self._written and self._written[0] < len(self.rows):
      self._replace()
    if self._remote and self._events:
      self._events.flush()
      self._events_folder.push()

  def close(self) -> None:
    if self._loggers:
      self._loggers.close()
    self.flush()
    if self._file is not None:
      os.close(self._file)
    if self._events:
      self._events.close()
    self._events_folder.close()


def _number(value):
  value = float(value)
  return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _event_writer(folder: Path, step: int):
  """Returns clu's writer of TensorBoard's events, or one that needs no TensorFlow.

  A run that was killed may have written events past `step`, where it resumes. The session
  log tells TensorBoard to drop them. Opened with the first row, as TensorFlow takes
  seconds to import.
  """
  from tensorboard.compat.proto.event_pb2 import Event, SessionLog
  from tensorboard.plugins.scalar.summary_v2 import scalar_pb
  from tensorboard.summary.writer.event_file_writer import EventFileWriter

  class Events(EventFileWriter):
    def add(self, **fields):
      self.add_event(Event(wall_time=time.time(), **fields))

    def write_scalars(self, step, values):
      for name, value in values.items():
        self.add(step=step, summary=scalar_pb(name, value))

  events = Events(str(folder))
  events.add(step=step + 1, session_log=SessionLog(status=SessionLog.START))
  try:
    from clu.metric_writers import SummaryWriter  # imports TensorFlow
  except ImportError:
    return events
  events.close()
  return SummaryWriter(str(folder))
