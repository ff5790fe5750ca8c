"""The folder of a run: locks it for one run at a time, and removes it if the start fails."""

import contextlib
import datetime
import fcntl
import functools
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
# A folder that has one of these is the folder of a run.
_OF_A_RUN = {LOCK_FILE, 'config.json', 'metrics.jsonl', 'status.json', 'checkpoints'}


@contextlib.contextmanager
def session(workdir, stop) -> Iterator[Path]:
  """Locks the folder of a run while it runs, and yields its absolute path.

  A folder that did not exist is removed again if the run ends before its first step. Errors
  of the file system are explained.

  Args:
    stop: `process.StopSignal`, whose second signal ends the run at once.
  """
  with explain_errors(workdir):
    existed = files.path(workdir).exists()
    with lock(workdir) as path:
      if not existed:
        stop.before_exit = functools.partial(_remove_unless_begun, path)
      try:
        yield path
      except BaseException:
        stop.before_exit()
        raise


@contextlib.contextmanager
def lock(workdir) -> Iterator[Path]:
  """Locks `workdir` for this run, makes it if needed, and yields its absolute path.

  The kernel releases the lock when the process ends, in whatever way. A bucket has no locks;
  there the scheduler has to take care that a folder has one run.

  Raises:
    UserError: if another run holds the folder, if it holds other files than those of a run,
      or if it cannot be made or written to.
  """
  workdir = files.path(workdir)
  if files.is_url(workdir):
    _check_is_free(workdir)
    yield workdir
    return
  workdir = workdir.absolute()
  failure, file = None, None
  # Before JAX is initialised, there is no second process. Do not ask for the process index
  # then: that would start the devices, which fails while another run holds them.
  several = jax.distributed.is_initialized()
  if not several or jax.process_index() == 0:
    try:
      file = _take(workdir)
    except RunError as error:
      failure = error
  if several:
    # If process 0 could not lock the folder, the others must not wait for it forever.
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
  # The file stays, because deleting it would race with the next run.
  with file or contextlib.nullcontext():
    yield workdir


def is_held(workdir) -> bool | None:
  """Whether a run holds a folder now; None if that is unknown, as in a bucket."""
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
  """Locks the lock file, writes a line about this process, and returns the open file."""
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
  """Raises UserError if a folder holds other files than a run's or a scheduler's logs."""
  try:
    names = {path.name for path in workdir.iterdir()}
  except OSError:
    # It does not exist yet, or a later error says why it cannot be read.
    return
  others = {n for n in names if not re.fullmatch(r'\..*|.*\.(log|out|err)', n)}
  if others and not names & _OF_A_RUN:
    raise UserError(
      f'workdir {workdir} holds {min(others)!r} and no run: choose another --workdir.'
    )


def _lock(file) -> None:
  # Try again, because `is_held` takes the lock for a moment.
  for _ in range(4):
    with contextlib.suppress(BlockingIOError):
      return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    time.sleep(0.05)
  fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_unless_begun(workdir: Path) -> None:
  """Removes the folder of a run that has not begun its first step."""
  # The current error is the one to report.
  with contextlib.suppress(Exception):
    if distributed.is_first() and not (workdir / 'metrics.jsonl').exists():
      workdir.rmtree() if files.is_url(workdir) else shutil.rmtree(workdir)
      if workdir.parent.name == 'runs':
        # It may be empty now; if it is not, this fails.
        workdir.parent.rmdir()


@contextlib.contextmanager
def noise_to_log(workdir: Path) -> Iterator[None]:
  """Sends the standard error of TensorFlow, libjpeg and other libraries to log.txt.

  Further processes write log.1.txt and so on. A file that stays empty is removed.
  """
  index = '' if distributed.is_first() else f'.{jax.process_index()}'
  # In a bucket, the log appears when the run ends.
  local = LocalFolder(workdir)
  path = local.folder / LOG_FILE.replace('.', f'{index}.')
  try:
    with terminal.noise_to(path):
      yield
  finally:
    with contextlib.suppress(OSError):
      if not path.stat().st_size:
        path.unlink()
    # The bucket may be out of reach.
    with contextlib.suppress(Exception):
      local.close()


class LocalFolder:
  """A folder on disk for libraries that cannot write to a bucket, to which it is copied.

  Attributes:
    folder: `target` itself, or a temporary folder if `target` is in a bucket.
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
    """Copies the files to the bucket and removes the temporary folder."""
    try:
      self.push()
    finally:
      if self._remote:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def explain_errors(workdir) -> Iterator[None]:
  """Raises `DiskFull` or `Unreachable` instead of the system error that has this cause."""
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
