"""Steps on disk, by Orbax (`orbax_steps`), whose quirks end here.

One step is one folder, `<directory>/<step>`, with an item per tree and the item `meta`.
Orbax writes in the background, commits (by a rename; in a bucket, which has none, by a
last object), and deletes. Its errors are told apart here: a full disk, a damaged step, or
trouble of the machine.
"""

import contextlib
import dataclasses
import gc
import logging
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import jax

from vit_jax import buckets, distributed
from vit_jax.checkpoint.manifest import Damaged
from vit_jax.errors import DiskFull, UserError, disk_is_full

# Free space asked for, in sizes of the state: array files have some overhead, and the
# oldest step is deleted only after the new one is complete.
_DISK_MARGIN = 1.1
# The object that makes a step in a bucket complete (orbax, path/atomicity_types.py).
_COMMIT = 'commit_success.txt'


class Storage:
  """The step folders in a directory, which several processes may share.

  Args:
    directory: a `pathlib.Path` or `BucketPath`; made at the first `write`.
    kept: takes the steps there, returns those to keep; called after every write.
  """

  def __init__(self, directory, kept: Callable[[list[int]], set[int]]):
    self.directory, self._kept = directory, kept
    self._in_bucket = buckets.is_url(directory)
    if self._in_bucket:
      buckets.filesystem()  # sets up the file system that Orbax uses
    self._committed: set[str] = set()
    self._manager = None  # Orbax's
    self._under_way = (0, 0)  # step and bytes of the newest write

  def steps(self) -> list[int]:
    """Returns the complete steps, in no order."""
    if self._in_bucket:  # `is_dir` would be one more request
      found = self.directory.glob('*')
    else:
      found = self.directory.iterdir() if self.directory.is_dir() else ()
    # Unfinished steps on disk and those set aside have a suffix.
    steps = [path for path in found if path.name.isdecimal()]
    return [int(path.name) for path in steps if self._is_committed(path)]

  def _is_committed(self, path) -> bool:
    if not self._in_bucket or path.name in self._committed:
      return True
    if (path / _COMMIT).is_file():
      self._committed.add(path.name)  # it stays so: no further requests
    return path.name in self._committed

  # -- writing ----------------------------------------------------------------------

  def write(self, step: int, items: dict[str, Any], meta: dict) -> None:
    """Starts writing a step and returns, once the one before it is complete.

    Args:
      items: item -> nested dict of arrays, whose buffers may be donated at once.
      meta: JSON.

    Raises:
      DiskFull: there is no room, or there was none for the step before.
    """
    self.wait()
    self._under_way = step, sum(x.nbytes for x in jax.tree.leaves(items))
    self._check_space()
    from vit_jax.checkpoint import orbax_steps

    manager = self._writer()
    with self._write_errors():
      orbax_steps.save(manager, step, items, meta)

  def wait(self) -> None:
    """Blocks until the write under way is complete; raises as `write` does."""
    if self._manager:
      with self._write_errors():
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

  def writing(self) -> bool:
    """Whether a write is under way."""
    return self._manager is not None and self._manager.is_saving_in_progress()

  def close(self) -> None:
    """Waits as `wait` does, and ends Orbax's threads; a later `write` starts new ones."""
    try:
      self.wait()
    finally:
      manager, self._manager = self._manager, None
      if manager:
        with self._write_errors():
          manager.close()

  def abandon(self) -> None:
    """Forgets the write under way: Orbax may wait for minutes for a bucket."""
    self._manager = None

  def _writer(self):
    # Made at the first write: reading needs none, so that a tool that looks into the
    # folder of a run at work does not sweep up the step that is being written.
    if self._manager is None:
      from vit_jax.checkpoint import orbax_steps

      _ignore_late()
      try:
        self._manager = orbax_steps.manager(self.directory, self._kept)
      except OSError as error:
        raise UserError(f'Cannot write checkpoints: {error}.') from error
    return self._manager

  def _check_space(self):
    if self._in_bucket:
      return
    folders = (self.directory, *self.directory.parents)
    free = shutil.disk_usage(next(p for p in folders if p.exists())).free
    if distributed.from_first(free < _DISK_MARGIN * self._under_way[1]):
      raise self._disk_full(free)

  @contextlib.contextmanager
  def _write_errors(self):
    try:
      yield
    except Exception as error:
      if self._in_bucket:
        buckets.raise_if_outage(error, self.directory)
      elif disk_is_full(error):
        raise self._disk_full(shutil.disk_usage(self.directory).free) from error
      raise

  def _disk_full(self, free):
    step, size = self._under_way
    return DiskFull(
      f'Disk full: checkpoint step {step} needs up to {_DISK_MARGIN * size / 1e6:,.1f} '
      f'MB in {self.directory}, where {free / 1e6:,.1f} MB are free. Nothing was '
      f'deleted; the newest complete step is {max(self.steps(), default=None)}. Make '
      'room, or lower config.checkpoint.keep_latest, and rerun the same command.'
    )

  # -- reading ----------------------------------------------------------------------

  def read(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays of some items of a step.

    Args:
      items: item -> nested dict of `jax.ShapeDtypeStruct` with shardings.

    Raises:
      Damaged: an item cannot be read; maybe by this process only, see `together`.
      UserError: reading is not permitted.
      Unreachable: the bucket does not answer, which says nothing about the item.
    """
    return self._restore(step, items)

  def read_meta(self, step: int) -> Any:
    """Returns the JSON that `write` took; raises as `read` does."""
    return self._restore(step, None)['meta']

  def _restore(self, step, items) -> dict:
    from vit_jax.checkpoint import orbax_steps

    path = self.directory / str(step)
    try:
      with _quiet():
        return orbax_steps.restore(path, items)
    except (MemoryError, jax.errors.JaxRuntimeError):
      raise  # the machine's trouble, not the checkpoint's
    except Exception as error:  # Orbax and TensorStore raise a dozen types
      if isinstance(error, PermissionError) or 'PERMISSION_DENIED' in str(error):
        raise UserError(f'Not allowed to read checkpoint {path}: {error}') from error
      if self._in_bucket:
        buckets.raise_if_outage(error, path)
      line = ' '.join(str(error).split())
      raise Damaged(f'{type(error).__name__}: {line[:150]}') from None

  def set_aside(self, step: int):
    """Renames a damaged step; returns its new path."""
    source = self.directory / str(step)
    target, n, failure = source.with_suffix('.corrupt'), 1, None
    while target.exists():
      target, n = source.with_suffix(f'.corrupt{n}'), n + 1
    if jax.process_index() == 0:
      try:
        if self._in_bucket:
          source.rename_folder(target, _COMMIT)
        else:
          os.rename(source, target)
      except OSError as error:
        failure = error
    if not distributed.agree(failure is None):
      raise UserError(f'Cannot set aside damaged checkpoint {source}: {failure}.')
    return target


@contextlib.contextmanager
def together():
  """Makes damage that one process meets damage for all: they take the same next step."""
  damage = None
  try:
    yield
  except Damaged as error:
    damage = error
  if not distributed.agree(damage is None):
    raise damage or Damaged('another process could not read it')


@contextlib.contextmanager
def _quiet():
  # After a failed read, Python reports each abandoned coroutine, and each read that
  # completes later.
  hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
  try:
    yield
  except Exception:
    gc.collect()
    sys.unraisablehook = hook
    _ignore_late()
    hook = sys.unraisablehook
    raise
  finally:
    sys.unraisablehook = hook


def _ignore_late() -> None:
  # Reads and writes that complete after the one that failed has been reported.
  if not isinstance(sys.unraisablehook, _Late):
    sys.unraisablehook = _Late(sys.unraisablehook)


@dataclasses.dataclass
class _Late:
  hook: Callable

  def __call__(self, unraisable):
    if str(unraisable.exc_value) != 'Event loop is closed':
      self.hook(unraisable)


# Orbax logs pages of tracebacks from its threads, and raises the same errors to us;
# its warnings are about its own waiting.
logging.getLogger('absl').addFilter(
  lambda record: record.levelno < logging.WARNING or '/orbax/' not in record.pathname
)
# Orbax's reads and writes run at once, and would each report the full disk, or the
# damaged step, after the first: one line is enough.
logging.getLogger('asyncio').addFilter(
  lambda record: not (record.exc_info and _is_reported(record.exc_info[1]))
)


def _is_reported(error: BaseException) -> bool:
  return disk_is_full(error) or 'tensorstore_spec' in str(error)
