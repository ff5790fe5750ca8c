"""status.json says how far a run is and how it ended; environment.json lists its starts."""

import contextlib
import datetime
import functools
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax

from vit_jax import distributed, machine
from vit_jax.config import DURATIONS
from vit_jax.errors import Preempted, Unreachable
from vit_jax.train import metrics, process
from vit_jax.train.evaluations import stop_reason
from vit_jax.train.workdir import is_held
from vit_jax.version import __version__

FILE, STARTS = 'status.json', 'environment.json'
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
# environment.json keeps this many starts, the newest.
_NEWEST = 100


# -- status.json -----------------------------------------------------------------------


def write(workdir: Path, **values) -> dict:
  """Writes status.json and returns its values."""
  metrics.write_json(workdir / FILE, values)
  return values


def read(workdir: Path) -> dict | None:
  """Returns the values of status.json, or None if it is missing or damaged."""
  try:
    status = json.loads((workdir / FILE).read_bytes())
    whole = type(status['step']) is int and type(status['state']) is str
  except (OSError, ValueError, RecursionError, TypeError, KeyError):
    return None
  return status if whole else None


def state(workdir: Path) -> str | None:
  """Returns the state of a run: running, finished, preempted, failed or interrupted.

  A run is 'interrupted' if status.json says that it is running but no process holds its
  folder, as after a kill or a power cut. None if there is no readable status.json.
  """
  written = (read(workdir) or {}).get('state')
  interrupted = written == 'running' and is_held(workdir) is False
  return 'interrupted' if interrupted else written


def checkpoints_of(checkpoints) -> dict[str, int | None]:
  """Returns the entries of status.json about checkpoints.

  All checkpoints are good, because a state that is not finite is not saved.
  """
  return {'last_good_step': checkpoints.latest(), 'best_step': checkpoints.best_step()}


def read_finished(workdir: Path, config: dict, checkpoints) -> tuple | None:
  """Returns the (status, rows) of a run that has nothing left to do, else None."""
  status, path = read(workdir), workdir / FILE
  rows, damaged = metrics.read_rows(workdir / 'metrics.jsonl')
  early = status and 'stopped_early' in status and stop_reason(config, rows)
  end = status['step'] if early else config['resolved']['total_steps']
  if checkpoints.latest() != end:
    return None
  if status is None and path.exists():
    distributed.say(f'{path} is damaged: the end of the run is checked again.')
  done = {key.split('/')[0] for row in rows if row['step'] == end for key in row}
  whole = status and status['state'] == 'finished' and not damaged
  return (status, rows) if whole and done.issuperset(config['evals']) else None


def already_finished(workdir: Path, config: dict, status: dict) -> str:
  """Returns the message for a finished run, which says how to continue training."""
  if 'stopped_early' in status and (patience := config['checkpoint'].get('patience')):
    more = f'--config.checkpoint.patience={patience * 2}'
  else:
    key = next(k for k in DURATIONS if config.get(k) is not None)
    more = f'--config.{key}={config[key] * 2} --config.resume_allow={key}'
  return (
    f'This run is finished, at step {status["step"]:,}. To train on, add for instance '
    f'--workdir={workdir} {more}'
  )


@contextlib.contextmanager
def record_failure(workdir: Path, checkpoints) -> Iterator[None]:
  """Writes status.json if an exception ends the run."""
  # Reads and caches the metrics of older steps now, while all processes take part.
  checkpoints_of(checkpoints)
  try:
    yield
  except Unreachable:
    raise
  except Exception as error:
    process.settle(error)
    state = 'preempted' if isinstance(error, Preempted) else 'failed'
    end = {'state': state, 'exit': getattr(error, 'exit_code', 1), 'error': str(error)}
    values = (read(workdir) or {'step': 0}) | end | checkpoints_of(checkpoints)
    # On a full disk the file may not fit. The exit code and the error say the same.
    with contextlib.suppress(OSError):
      write(workdir, **values)
    raise


# -- environment.json ------------------------------------------------------------------


def record_start(
  workdir: Path,
  step: int,
  command: str | None,
  params: dict,
  trained: dict,
  temp_bytes: int,
  kernels: dict,
) -> None:
  """Adds a start to environment.json: the command, versions, machine and parameters.

  Args:
    step: the step at which the run starts.
    command: the command line; None if the run was started from Python.
    params, trained: all parameters and the trained ones; shapes are enough.
    temp_bytes: memory of a step on one device, without the state and the batch.
    kernels: 'used', the names of fused kernels, and 'verified', see `kernels.verify`.
  """
  devices = jax.devices()
  start = {
    'step': step,
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'command': command,
    'vit_jax': __version__,
    'git': _commit(),
    'python': platform.python_version(),
    'packages': {name: importlib.metadata.version(name) for name in _PACKAGES},
    'system': f'{platform.system()} {platform.machine()}',
    'platform': devices[0].platform,
    'device': devices[0].device_kind,
    'devices': len(devices),
    'processes': jax.process_count(),
    'cores': machine.cores(),
    'memory_bytes': machine.memory(),
    'parameters': {
      'parts': {key: count(tree) for key, tree in params.items()},
      'trained': count(trained),
    },
    'step_temp_bytes': temp_bytes,
    'kernels': kernels,
  }
  metrics.write_json(workdir / STARTS, [*read_starts(workdir), start][-_NEWEST:])


def read_starts(workdir: Path) -> list[dict]:
  """Returns the starts, oldest first; [] if the file is missing or damaged."""
  try:
    starts = json.loads((workdir / STARTS).read_bytes())
    return [x for x in starts if type(x['step']) is int]
  except (OSError, ValueError, RecursionError, TypeError, KeyError):
    return []


def count(tree) -> int:
  """Returns the number of parameters in a tree of arrays or shapes."""
  return sum(x.size for x in jax.tree.leaves(tree))


@functools.cache
def _commit() -> str | None:
  """Returns the commit of this checkout, with '+' if files differ; None if there is no git."""
  checkout = Path(__file__).parents[2]
  options = '--always', '--abbrev=40', '--exclude=*', '--dirty=+'
  if not (checkout / '.git').exists():
    return None
  # An error means that git is missing, or that the folder belongs to another user.
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    command = ['git', '-C', str(checkout), 'describe', *options]
    return subprocess.check_output(command, text=True, timeout=5).strip()
  return None
