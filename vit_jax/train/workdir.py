"""A run's folder: locked for one run at a time, and left as it was if a start fails."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from vit_jax import distributed, files, terminal
from vit_jax.errors import DiskFull, InUse, RunError, UserError, disk_is_full, one_line

LOCK_FILE, LOG_FILE = 'run.lock', 'log.txt'
_TAKEN = (errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def lock(workdir) -> Iterator[Path]:
  """Holds `workdir` for this run; makes it if need be. Yields its absolute path.

  The kernel drops the lock when the process ends, however it ends. A bucket has no locks:
  there one run per folder is up to the scheduler.

  Raises:
    UserError: another run holds it, or it cannot be made or written.
  """
  workdir = files.path(workdir)
  if files.is_url(workdir):
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
    if distributed.from_first(failure is not None) and failure is None:
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
  except OSError as error:
    return True if error.errno in _TAKEN else None
  return False


def _take(workdir: Path):
  """Returns the open lock file, locked."""
  path = workdir / LOCK_FILE
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    file = open(path, 'a+', encoding='utf-8')  # noqa: SIM115
  except FileExistsError:
    raise UserError(f'--workdir {workdir} is a file: name a folder.') from None
  except OSError as error:
    raise UserError(
      f'Cannot write to workdir {workdir}: {error.strerror}. Choose another --workdir.'
    ) from error
  for tries in range(5, -1, -1):
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      break
    except OSError as error:
      if error.errno not in _TAKEN:
        distributed.say(
          f'cannot lock {path} ({error.strerror}): make sure no other run uses it.'
        )
        break
    if not tries:
      holder = _holder(file)
      file.close()
      raise InUse(
        f'Another run holds workdir {workdir}: {holder}. Wait for it, stop it (it saves '
        'on SIGTERM), or choose another --workdir.'
      )
    time.sleep(0.05)  # `is_held` holds the lock for a moment
  started = datetime.datetime.now().astimezone().isoformat(timespec='seconds')
  this = {'pid': os.getpid(), 'host': socket.gethostname(), 'started': started}
  file.truncate(0)
  file.write(json.dumps(this) + '\n')
  file.flush()
  return file


def _holder(file) -> str:
  """Returns 'process 7 on HOST, since TIME', from an open lock file."""
  try:
    file.seek(0)
    holder = json.loads(file.read())
    pid, host, started = (holder.get(key, '?') for key in ('pid', 'host', 'started'))
  except (ValueError, AttributeError):  # it has the lock, but has not written yet
    return 'a process that has just started'
  return f'process {pid} on {host}, since {started}'


@contextlib.contextmanager
def removed_unless_begun(workdir: Path, existed: bool, stop) -> Iterator[None]:
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
    self.folder, self._target, self._sent = target, target, {}
    self._remote = files.is_url(target)
    if self._remote:
      self.folder = Path(tempfile.mkdtemp(prefix='vit_jax-'))

  def push(self) -> None:
    """Copies the files whose size has changed since the last call."""
    for path in sorted(self.folder.rglob('*')) if self._remote else ():
      if path.is_file() and self._sent.get(path) != path.stat().st_size:
        data = path.read_bytes()
        files.replace(self._target / str(path.relative_to(self.folder)), data)
        self._sent[path] = len(data)

  def close(self) -> None:
    """Copies as `push` does, and removes the temporary folder."""
    try:
      self.push()
    finally:
      if self._remote:
        shutil.rmtree(self.folder, ignore_errors=True)


def named_error(error: Exception, workdir) -> Exception:
  """Returns `DiskFull` or `Unreachable` for an error that means one, else `error`."""
  try:
    with files.outages(workdir):
      raise error
  except RunError as named:
    return named
  except Exception:
    if not disk_is_full(error):
      return error
  return DiskFull(
    f'Disk full: {one_line(error)}. Older files of {workdir} are intact: make room, and '
    'rerun the same command.'
  )


@contextlib.contextmanager
def named_errors(workdir) -> Iterator[None]:
  """Raises `named_error` of an error in place of it."""
  try:
    yield
  except Exception as error:
    named = named_error(error, workdir)
    if named is error:
      raise
    raise named from error
