"""A run's folder: removed if the start fails, and the log file in it."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from vit_jax import buckets, distributed, terminal
from vit_jax.errors import RunError
from vit_jax.train import disk
from vit_jax.train.lock import LOCK_FILE
from vit_jax.train.preemption import StopSignal

LOG_FILE = 'log.txt'
# Written once a run is about to make its first step.
_BEGAN = 'metrics.jsonl'


def missing(workdir: str | Path) -> list[Path]:
  """Returns the folders that a run in `workdir` has to make, the outermost last."""
  path = buckets.path(workdir).absolute()
  above = (
    () if buckets.is_url(path) else path.parents
  )  # a bucket has no folders to make
  return [folder for folder in (path, *above) if not folder.exists()]


@contextlib.contextmanager
def left_as_it_was(made: list[Path], stop: StopSignal) -> Iterator[None]:
  """Removes what a run made, if it ends before it began: by an error or a second signal.

  To be entered while holding the lock, so that no other run is in the folder.

  Args:
    made: see `missing`.
  """

  def unmake():
    if not made or not distributed.is_first():
      return
    # Expected errors: the bucket is out of reach, or the folders above have other files.
    with contextlib.suppress(OSError, RunError):
      if (made[0] / _BEGAN).exists():
        return
      if buckets.is_url(made[0]):
        made[0].empty(but=LOCK_FILE)  # still held; released after this
        return
      shutil.rmtree(made[0], ignore_errors=True)
      for folder in made[1:]:
        folder.rmdir()

  stop.before_exit = unmake
  try:
    yield
  except BaseException:
    unmake()
    raise


@contextlib.contextmanager
def noise_to_log(workdir: Path) -> Iterator[None]:
  """Sends what TensorFlow, libjpeg and others write to standard error to log.txt.

  Each process has its own, `log.1.txt` and so on; one that stays empty is removed.
  """
  import jax

  index = '' if distributed.is_first() else f'.{jax.process_index()}'
  local = disk.LocalFolder(workdir)  # in a bucket the log appears when the run ends
  path = local.folder / LOG_FILE.replace('.', f'{index}.')
  try:
    with terminal.noise_to(path):
      yield
  finally:
    with contextlib.suppress(OSError):
      if not path.stat().st_size:
        path.unlink()
    with contextlib.suppress(OSError, RunError):
      local.close()
