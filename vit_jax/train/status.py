"""status.json: how far a run is, and how it ended."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from vit_jax import distributed, files
from vit_jax.config import DURATIONS
from vit_jax.errors import LockLost, PeerLost, Preempted, Unreachable
from vit_jax.train import disk, metrics, peers, rows
from vit_jax.train.lock import inherited, is_held
from vit_jax.train.patience import Patience


def write(workdir: Path, **values) -> dict:
  """Writes status.json; returns what it holds."""
  metrics.write_json(workdir / 'status.json', values)
  return values


def read(workdir: Path) -> dict | None:
  """Returns what status.json holds; None where it is missing or damaged."""
  path = workdir / 'status.json'
  try:
    if not path.is_file():  # a pipe would be waited for
      return None
    status = json.loads(path.read_bytes())
    whole = type(status['step']) is int and type(status['state']) is str
  except (OSError, ValueError, RecursionError, TypeError, KeyError):
    return None
  return status if whole else None


def state(workdir: Path) -> str | None:
  """Returns the state of a run: running, finished, preempted, failed, or 'interrupted'.

  It is interrupted where status.json says that it is running, but no process holds its
  folder: after a kill, or a power cut. None: there is no status.json to read.
  """
  known = (read(workdir) or {}).get('state')
  return 'interrupted' if known == 'running' and is_held(workdir) is False else known


def checkpoints_of(checkpoints) -> dict[str, int | None]:
  """Returns what status.json says of a run's complete checkpoints.

  Every checkpoint is finite: a state that is not is never saved.
  """
  return {
    'last_good_step': checkpoints.latest(),
    'best_step': checkpoints.best_step(),
  }


def of_finished(workdir: Path, config: dict, checkpoints) -> tuple | None:
  """Returns (status, rows) of a run with nothing left to do, else None."""
  step, end = checkpoints.latest(), config['resolved']['total_steps']
  status, path = read(workdir), workdir / 'status.json'
  known, lost = rows.read_checked(workdir / 'metrics.jsonl')
  if status and 'stopped_early' in status and Patience.of(config).spent(known):
    end = status['step']
  if step != end:
    return None
  if status is None and path.exists():
    distributed.say(f'{path} is damaged: the end of the run is looked at again.')
  done = rows.last_values([row for row in known if row['step'] == end])
  done = {key.split('/')[0] for key in done}
  if not status or status['state'] != 'finished' or lost:
    return None
  return (status, known) if done.issuperset(config['evals']) else None


def already_finished(workdir: Path, config: dict, status: dict) -> str:
  """Returns the message for a run that is already finished, and how to train on."""
  patience = config['checkpoint'].get('patience')
  if patience and 'stopped_early' in status:
    more = f'--config.checkpoint.patience={patience * 2}'
  else:
    key = next(k for k in DURATIONS if config.get(k) is not None)
    more = f'--config.{key}={config[key] * 2} --config.resume_allow={key}'
  return (
    f'This run is finished, at step {status["step"]:,}: nothing is left to train. To go '
    f'on from there, add for instance --workdir={workdir} {more}'
  )


@contextlib.contextmanager
def on_failure(workdir: Path, checkpoints, recorded: str = '') -> Iterator[None]:
  """Leaves status.json behind when a run ends by an exception, or with another process.

  The first process writes it. Of the others one does, where the first has died without
  saying so.

  Args:
    recorded: see `lock.Held`.
  """
  # Reads and caches the metrics of older steps now, while all processes take part.
  checkpoints_of(checkpoints)

  def record(error):
    end = 'preempted' if isinstance(error, Preempted | PeerLost) else 'failed'
    ends = {'state': end, 'exit': getattr(error, 'exit_code', 1), 'error': str(error)}
    if distributed.is_first():
      known = read(workdir) or {'step': 0}
      _write_somehow(workdir, known | ends | checkpoints_of(checkpoints))
    elif isinstance(error, PeerLost):
      with inherited(workdir, recorded) as ours:
        known = read(workdir)
        if ours and known and known['state'] == 'running':
          values = known | ends | checkpoints_of(checkpoints)
          files.replace(workdir / 'status.json', metrics.json_of(values))

  with peers.recorded(record):
    try:
      yield
    except (LockLost, Unreachable):  # it is another run's now, or out of reach
      raise
    except Exception as error:
      peers.settle(error)
      record(error)
      raise


def _write_somehow(workdir: Path, values: dict) -> None:
  # A failure here has the cause that the status reports.
  try:
    write(workdir, **values)
  except Unreachable:
    pass
  except OSError:
    with contextlib.suppress(OSError):
      disk.overwrite(workdir / 'status.json', metrics.json_of(values))
