"""A run's folder: locked for one run at a time, and left as it was if a start fails."""

import contextlib
import datetime
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from vit_jax import distributed, files, terminal
from vit_jax.errors import DiskFull, RunError, UserError, disk_is_full, one_line

LOCK_FILE, LOG_FILE = 'run.lock', 'log.txt'
# A folder with one of these is that of a run.
_OF_A_RUN = {LOCK_FILE, 'config.json', 'metrics.jsonl', 'status.json', 'checkpoints'}


@contextlib.contextmanager
def lock(workdir) -> Iterator[Path]:
  """Holds `workdir` for this run; makes it if need be. Yields its absolute path.

  The kernel drops the lock when the process ends, however it ends. A bucket has no locks:
  there one run per folder is up to the scheduler.

  Raises:
    UserError: another run holds it, it is not a run's, or it cannot be made or written.
  """
  workdir = files.path(workdir)
  if files.is_url(workdir):
    _check_is_free(workdir)
    yield workdir
    return
  workdir = workdir.absolute()
  failure, file = None, None
  # Before JAX is initialised there can be no second process, and asking for the
  # process index would start the devices, which the run that holds them refuses.
  several = jax.distributed.is_initialized()
  if not several or jax.process_index() == 0:
    try:
      file = _take(workdir)
    except RunError as error:
      failure = error
  if several:  # a process whose leader was refused must not wait for it forever
    if distributed.broadcast_first(failure is not None) and failure is None:
      failure = UserError(f'Process 0 could not lock {workdir}; its message says why.')
    same = distributed.agree((workdir / LOCK_FILE).exists())
    if failure is None and not same:
      failure = UserError(
        f'workdir {workdir} is not the same folder for all processes: give one on a file '
        'system that they share.'
      )
  if failure:
    raise failure
  # The file stays: to unlink it would race with the next run.
  with file or contextlib.nullcontext():
    yield workdir


def is_held(workdir) -> bool | None:
  """Whether a run is in a folder now; None if that is unknown, as in a bucket."""
  path = files.path(workdir) / LOCK_FILE
  if files.is_url(path) or not path.is_file():
    return None
  try:
    with open(path, 'rb') as file:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:
    return None
  return False


def _take(workdir: Path):
  """Returns the open lock file, locked; it holds a line about this process."""
  path = workdir / LOCK_FILE
  _check_is_free(workdir)
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    file = open(path, 'a+', encoding='utf-8', errors='replace')  # noqa: SIM115
  except OSError as error:
    raise UserError(
      f'Cannot write to workdir {workdir}: {error.strerror}. Choose another --workdir.'
    ) from error
  try:
    _lock(file)
  except BlockingIOError:
    file.seek(0)
    holder = file.read().strip() or 'a process that has just started'
    file.close()
    raise UserError(
      f'Another run holds workdir {workdir}: {one_line(holder)}. Wait for it, stop it (it '
      'saves on SIGTERM), or choose another --workdir.'
    ) from None
  except OSError as error:
    distributed.say(
      f'cannot lock {path} ({error.strerror}): make sure no other run uses it.'
    )
  started = datetime.datetime.now().astimezone().isoformat(timespec='seconds')
  file.truncate(0)
  file.write(f'process {os.getpid()} on {socket.gethostname()}, since {started}\n')
  file.flush()
  return file


def _check_is_free(workdir: Path) -> None:
  """Raises UserError for a folder of other things than a scheduler's logs."""
  try:
    names = {path.name for path in workdir.iterdir()}
  except OSError:  # not there yet, or another error is about to say why
    return
  others = {n for n in names if not re.fullmatch(r'\..*|.*\.(log|out|err)', n)}
  if others and not names & _OF_A_RUN:
    raise UserError(
      f'workdir {workdir} holds {min(others)!r} and no run: choose another --workdir.'
    )


def _lock(file) -> None:
  for _ in range(4):  # `is_held` has the lock for a moment
    with contextlib.suppress(BlockingIOError):
      return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    time.sleep(0.05)
  fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def remove_unless_begun(workdir: Path, existed: bool, stop) -> Iterator[None]:
  """Removes the folder if the run ends before its first step; a run's lock is held.

  Args:
    existed: whether the folder was there before this run, which then leaves it.
    stop: `process.StopSignal`, whose second signal ends the run at once.
  """

  def remove():
    if existed or not distributed.is_first():
      return
    with contextlib.suppress(Exception):  # the error under way is the one to report
      if not (workdir / 'metrics.jsonl').exists():
        workdir.rmtree() if files.is_url(workdir) else shutil.rmtree(workdir)

  stop.before_exit = remove
  try:
    yield
  except BaseException:
    remove()
    raise


@contextlib.contextmanager
def noise_to_log(workdir: Path) -> Iterator[None]:
  """Sends the standard error of TensorFlow, libjpeg and others to log.txt.

  Each process has its own, `log.1.txt` and so on; one that stays empty is removed.
  """
  index = '' if distributed.is_first() else f'.{jax.process_index()}'
  local = LocalFolder(workdir)  # in a bucket the log appears when the run ends
  path = local.folder / LOG_FILE.replace('.', f'{index}.')
  try:
    with terminal.noise_to(path):
      yield
  finally:
    with contextlib.suppress(OSError):
      if not path.stat().st_size:
        path.unlink()
    with contextlib.suppress(Exception):  # the bucket may be out of reach
      local.close()


class LocalFolder:
  """A folder for libraries that write to disk alone; copied if its place is a bucket.

  Attributes:
    folder: `target` itself, or a temporary folder if that is in a bucket.
  """

  def __init__(self, target: Path):
    self.folder, self._target, self._remote = target, target, files.is_url(target)
    if self._remote:
      self.folder = Path(tempfile.mkdtemp(prefix='vit_jax-'))

  def push(self) -> None:
    """Copies the files to the bucket."""
    for path in self.folder.rglob('*') if self._remote else ():
      if path.is_file():
        target = self._target / str(path.relative_to(self.folder))
        files.replace(target, path.read_bytes())

  def close(self) -> None:
    """Copies as `push` does, and removes the temporary folder."""
    try:
      self.push()
    finally:
      if self._remote:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def explain_errors(workdir) -> Iterator[None]:
  """Raises `DiskFull` or `Unreachable` in place of errors that mean one."""
  try:
    with files.outages(workdir):
      yield
  except RunError:
    raise
  except Exception as error:
    if not disk_is_full(error):
      raise
    raise DiskFull(
      f'Disk full: {one_line(error)}. Older files of {workdir} are intact: make room, and '
      'rerun the same command.'
    ) from error
