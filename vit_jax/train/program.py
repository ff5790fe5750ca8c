"""A process that trains: `vit_jax train`, and tools that train. Light to import."""

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
  """Runs `run.train` with the compilation cache; returns its (status, rows).

  Args:
    spec: 'NAME:ARGS' of the config, to suggest a run that needs no data.

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
      text = f'{text.rstrip(".")}. Meanwhile, {instead}'
    raise DataError(text) from error


def run_and_exit(main: Callable[[list[str]], int]) -> NoReturn:
  """Runs a command that trains, and ends the process with its exit code; see `cli.run`."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # TensorFlow's start-up notes
  code = cli.run(main)
  if _cut_off:
    # Orbax's threads may wait forever for a file that could not be written.
    sys.stdout.flush()
    os._exit(code)
  sys.exit(code)
