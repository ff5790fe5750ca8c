"""Stores steps with Orbax: one subfolder per step, with an item per tree and JSON `meta`.

Orbax writes in the background and commits a step by a rename, or in a bucket, which has
none, by a last object. It deletes steps by preservation policies. This module sorts its
errors, of a dozen types, into three kinds: a full disk, a damaged step, or trouble of the
machine.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from vit_jax import distributed, files
from vit_jax.errors import DiskFull, RunError, UserError, disk_is_full

# Orbax writes this object last: a step in a bucket is complete if it exists (orbax,
# path/atomicity_types.py).
_COMMIT = 'commit_success.txt'


class Damaged(Exception):
  """This step cannot be restored as it was saved; the text says why."""


class _Manager(ocp.CheckpointManager):
  """Orbax's manager, but it does not poll for preemption; `train.process` does.

  Orbax would poll with the number of the step that it saves, even from its background
  thread. A poll with an old number would move the agreed step into the past, and no process
  would stop.
  """

  def reached_preemption(self, step: int) -> bool:
    return False


class _Best:
  """A policy that preserves the best step. Orbax's BestN forgets metrics at a restart."""

  def __init__(self, best: Callable[[Sequence[int]], int | None]):
    self._best = best

  def should_preserve(self, checkpoints, *, context):
    best = self._best([info.step for info in checkpoints])
    return [info.step == best for info in checkpoints]


class Storage:
  """The steps in a directory, which several processes may share.

  Args:
    directory: a path on disk or in a bucket; made at the first `write`.
    latest: number of newest steps to preserve.
    every: multiples of this number of steps are preserved for good; None: no such steps.
    best: function of some steps that returns the one to preserve as the best, or None.
  """

  def __init__(
    self,
    directory: Path,
    latest: int,
    every: int | None,
    best: Callable[[Sequence[int]], int | None],
  ):
    self.directory, self._remote = directory, files.is_url(directory)
    preserved = [policies.LatestN(latest), _Best(best)]
    if every:
      preserved.append(policies.EveryNSteps(every))
    self._policy = policies.AnyPreservationPolicy(preserved)
    self._manager: _Manager | None = None
    # The step of the newest write.
    self._step = 0

  def steps(self) -> list[int]:
    """Returns the complete steps in ascending order; some may turn out to be damaged."""
    try:
      paths = list(self.directory.iterdir())
    except FileNotFoundError:
      return []
    # The names of unfinished steps on disk, and of steps set aside, have a suffix.
    steps = [path for path in paths if path.name.isdecimal()]
    if self._remote:
      steps = [path for path in steps if (path / _COMMIT).exists()]
    return sorted(int(path.name) for path in steps)

  def write(self, step: int, items: dict[str, Any], meta: dict) -> None:
    """Waits for the previous write, starts to write a step, and returns.

    Args:
      items: {item: nested dict of arrays}, whose buffers may be donated at once.

    Raises:
      DiskFull: if there was no room for the previous step.
    """
    self.wait()
    self._step = step
    if self._manager is None:
      # Make the manager at the first write, because it deletes unfinished steps: a tool may
      # be reading the folder while the run still writes to it.
      _drop_late_errors()
      options = ocp.CheckpointManagerOptions(
        preservation_policy=self._policy,
        cleanup_tmp_directories=True,
        # Otherwise Orbax reads all steps, including damaged ones.
        lightweight_initialize=True,
      )
      try:
        self._manager = _Manager(self.directory, options=options)
      except OSError as error:
        if disk_is_full(error):
          raise
        raise UserError(f'Cannot write checkpoints: {error}.') from error
    args = {item: ocp.args.StandardSave(tree) for item, tree in items.items()}
    args['meta'] = ocp.args.JsonSave(meta)
    with self._write_errors():
      # The caller has decided to save, so Orbax must not decide again.
      self._manager.save(step, args=ocp.args.Composite(**args), force=True)

  def wait(self) -> None:
    """Waits until the current write is complete; raises the same errors as `write`."""
    if self._manager:
      with self._write_errors():
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

  def close(self) -> None:
    """Waits for the current write, and ends Orbax's threads; a later `write` starts new ones.

    Without it, a write that is not complete when Python exits is lost.
    """
    if self._manager is None:
      return
    try:
      self.wait()
    finally:
      manager, self._manager = self._manager, None
      with self._write_errors():
        manager.close()

  def abandon(self) -> None:
    """Gives up the current write, because Orbax may wait minutes for a bucket."""
    self._manager = None

  @contextlib.contextmanager
  def _write_errors(self) -> Iterator[None]:
    try:
      with files.outages(self.directory):
        yield
    except Exception as error:
      if not disk_is_full(error):
        raise
      raise DiskFull(
        f'Disk full: no room for checkpoint step {self._step} in {self.directory}. '
        'Nothing was deleted; the newest complete step is '
        f'{max(self.steps(), default=None)}. Make room, or lower '
        'config.checkpoint.keep_latest, and rerun the same command.'
      ) from error

  def read(self, step: int, items: dict[str, Any] | None = None) -> dict[str, Any]:
    """Reads items of a step.

    Args:
      items: {item: nested dict of `jax.ShapeDtypeStruct` with shardings}; None: only
        `meta`.

    Raises:
      Damaged: if an item cannot be read, maybe by this process only, see `together`.
      UserError: if reading is not permitted.
      Unreachable: if the bucket does not answer, which says nothing about the item.
    """
    path = self.directory / str(step)
    if items is None:
      args = {'meta': ocp.args.JsonRestore()}
    else:
      args = {item: ocp.args.StandardRestore(tree) for item, tree in items.items()}
    _drop_late_errors()
    try:
      with (
        files.outages(path),
        ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer,
      ):
        return dict(checkpointer.restore(path, ocp.args.Composite(**args)).items())
    except (MemoryError, jax.errors.JaxRuntimeError, RunError):
      # The machine or the network failed, which says nothing about the checkpoint.
      raise
    except Exception as error:
      if isinstance(error, PermissionError) or 'PERMISSION_DENIED' in str(error):
        raise UserError(f'Not allowed to read checkpoint {path}: {error}') from error
      line = ' '.join(str(error).split())
      raise Damaged(f'{type(error).__name__}: {line[:150]}') from None

  def set_aside(self, step: int) -> Path:
    """Renames a damaged step; returns its new path."""
    source = self.directory / str(step)
    target, n, failure = source.with_suffix('.corrupt'), 1, None
    while target.exists():
      target, n = source.with_suffix(f'.corrupt{n}'), n + 1
    if jax.process_index() == 0:
      try:
        source.rename(target)
      except OSError as error:
        failure = error
    if not distributed.agree(failure is None):
      raise UserError(f'Cannot set aside damaged checkpoint {source}: {failure}.')
    return target


@contextlib.contextmanager
def together() -> Iterator[None]:
  """Context manager: damage that one process finds is raised in all processes."""
  damage = None
  try:
    yield
  except Damaged as error:
    damage = error
  if not distributed.agree(damage is None):
    raise damage or Damaged('another process could not read it')


# -- Orbax reads and writes arrays concurrently, and also logs the errors that it raises --


def _drop_late_errors() -> None:
  """Keeps Python from printing errors of Orbax's other operations after one was raised."""
  hook = sys.unraisablehook
  if getattr(hook, 'drops_late_errors', False):
    return

  def report(unraisable):
    if not _is_late(unraisable.exc_value):
      hook(unraisable)

  report.drops_late_errors = True
  sys.unraisablehook = report


def _is_late(error: BaseException | None) -> bool:
  text = str(error)
  closed = text == 'Event loop is closed'
  return closed or 'tensorstore_spec' in text or bool(error and disk_is_full(error))


logging.getLogger('absl').addFilter(
  lambda record: record.levelno < logging.WARNING or '/orbax/' not in record.pathname
)
logging.getLogger('asyncio').addFilter(
  lambda record: not (record.exc_info and _is_late(record.exc_info[1]))
)
