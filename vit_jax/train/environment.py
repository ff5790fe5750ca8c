"""environment.json: the command, versions and machine of each start of a run."""

import contextlib
import datetime
import functools
import importlib.metadata
import json
import math
import platform
import subprocess
from pathlib import Path

import jax

from vit_jax import distributed, machine
from vit_jax.train import metrics
from vit_jax.version import __version__

FILE = 'environment.json'
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
_LIMIT = 100  # starts in the file, the newest


def record(
  workdir: Path,
  step: int,
  command: str | None,
  params: dict,
  trained: dict,
  temp_bytes: int,
  kernels: dict,
) -> None:
  """Adds this start to the file; of several processes only the first does.

  Args:
    step: the step that the run starts from.
    command: the command line; None: it was started from Python.
    params, trained: all parameters, and the trained ones; shapes are enough.
    temp_bytes: memory of a step on one device, besides the state and the batch.
    kernels: 'used', names of fused kernels, and 'verified', see `kernels.verify`.

  Raises: OSError.
  """
  if not distributed.is_first():
    return
  devices = jax.devices()
  entry = {
    'step': step,
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'command': command,
    'vit_jax': __version__,
    'git': _commit(),
    'python': platform.python_version(),
    'packages': _versions(),
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
  metrics.write_json(workdir / FILE, [*read(workdir), entry][-_LIMIT:])


def read(workdir: Path) -> list[dict]:
  """Returns the starts, oldest first; [] where the file is missing or damaged."""
  try:
    starts = json.loads((workdir / FILE).read_bytes())
    return [x for x in starts if type(x['step']) is int]
  except (OSError, ValueError, RecursionError, TypeError, KeyError):
    return []


def count(tree) -> int:
  """Returns the number of parameters in a tree of arrays or shapes."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@functools.cache
def _versions() -> dict[str, str]:
  versions = {}
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return versions


@functools.cache
def _commit() -> str | None:
  """Returns the commit of this checkout, with '+' if files differ; None without git."""
  checkout = Path(__file__).parents[2]
  command = ['git', '-C', str(checkout), 'describe', '--always', '--abbrev=40']
  command += ['--exclude=*', '--dirty=+']
  try:
    if (checkout / '.git').exists():
      return subprocess.check_output(command, text=True, timeout=5).strip()
  except (OSError, subprocess.SubprocessError):  # no git, or not its owner's
    pass
  return None
