"""What a process that trains needs around `run.train`: `vit_jax train`, tools that train."""

import gc
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from vit_jax import cli
from vit_jax.errors import DataError, DiskFull, Unreachable
from vit_jax.train import arguments

_cut_off: list[bool] = []  # not empty once a write has failed for good


def train(
  config: dict, workdir: str | os.PathLike, command: str, spec: str
) -> tuple[dict, list[dict]]:
  """Runs `run.train` with the compilation cache; returns what it returns.

  Args:
    spec: 'NAME:ARGS' of the config, for what to try without its data.

  Raises: as `run.train`.
  """
  from vit_jax.train import run, runtime

  runtime.enable_compilation_cache()
  try:
    return run.train(config, workdir, command)
  except (DiskFull, Unreachable):
    _cut_off.append(True)
    raise
  except DataError as error:
    text = str(error)
    if instead := arguments.without_data(spec, config):
      # No full stop behind a command: it would be copied with it.
      text += (
        f' Meanwhile, {instead}' if text.endswith('.') else f'; meanwhile, {instead}'
      )
    raise DataError(text) from error


def _collect_sooner(phase: str, info: dict) -> None:
  """Lets the collections after the first come sooner; called by `gc`."""
  gc.callbacks.remove(_collect_sooner)
  gc.set_threshold(100_000)


def run_and_exit(main: Callable[[list[str]], int]) -> NoReturn:
  """Runs a command that trains, and ends the process with its exit code; see `cli.run`."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # TensorFlow's start-up notes
  # Imports and traces make half a million objects, and no garbage to look for.
  gc.set_threshold(1_000_000)
  gc.callbacks.append(_collect_sooner)
  code = cli.run(main)
  if _cut_off:
    # Orbax's threads may wait forever for a file that could not be written.
    sys.stdout.flush()
    os._exit(code)
  sys.exit(code)
