"""status.json: how far a run is, and how it ended."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from vit_jax.errors import Preempted
from vit_jax.train import metrics


def write(workdir: Path, **values) -> dict:
  """Writes status.json; returns what it holds."""
  metrics.write_json(workdir / 'status.json', values)
  return values


def checkpoints_of(checkpoints) -> dict[str, int | None]:
  """Returns what is said of a run's checkpoints, of those that are complete.

  Every checkpoint is finite: a state that is not is never saved.
  """
  return {
    'last_good_step': checkpoints.latest(),
    'best_step': checkpoints.best_step(),
  }


def of_finished(workdir: Path, config: dict, checkpoints) -> tuple | None:
  """Returns (status, rows) of a run with nothing left to do, else None."""
  total = config['resolved']['total_steps']
  path = workdir / 'status.json'
  if checkpoints.latest() != total or not path.exists():
    return None
  status = json.loads(path.read_text())
  rows = metrics.read_rows(workdir / 'metrics.jsonl')
  done = metrics.last_values([row for row in rows if row['step'] == total])
  done = {key.split('/')[0] for key in done}
  if status['state'] != 'finished' or not done.issuperset(config['evals']):
    return None
  return status, rows


@contextlib.contextmanager
def on_failure(workdir: Path, checkpoints) -> Iterator[None]:
  """Leaves status.json behind when a run ends by an exception."""
  # The metrics of older steps are read once: now, when all processes take part.
  checkpoints_of(checkpoints)
  try:
    yield
  except Exception as error:
    path = workdir / 'status.json'
    known = json.loads(path.read_text()) if path.exists() else {'step': 0}
    code = getattr(error, 'exit_code', 1)
    state = 'preempted' if isinstance(error, Preempted) else 'failed'
    known |= {'state': state, 'exit': code, 'error': str(error)}
    with contextlib.suppress(OSError):  # such as of a full disk, which `error` reports
      write(workdir, **known | checkpoints_of(checkpoints))
    raise
