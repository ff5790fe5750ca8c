"""The lock on a workdir: one run at a time. In a bucket it is a lease, see `lease`."""

import contextlib
import errno
import fcntl
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from vit_jax import buckets, distributed
from vit_jax.errors import RunError, UserError
from vit_jax.train import holder
from vit_jax.train.lease import Lease

LOCK_FILE = 'run.lock'
_TAKEN = (errno.EAGAIN, errno.EACCES)


class Held(NamedTuple):
  """A folder that this run holds.

  Attributes:
    workdir: its absolute path.
    check: raises LockLost if another run has taken the lock, which can happen in a
      bucket alone. Cheap enough to be called before every step.
    recorded: what the lock file says about the first process, for `inherited`; '' in
      that process, and if it cannot be read.
  """

  workdir: pathlib.Path | buckets.BucketPath
  check: Callable[[], None]
  recorded: str


@contextlib.contextmanager
def lock(workdir):
  """Holds `workdir` for this run; makes it if need be. Yields a `Held`.

  On a file system the kernel drops the lock when the process ends, however it ends: a
  file left behind by a killed run holds nothing. In a bucket the lock of a killed run
  ends with its lease.

  Raises:
    UserError: another run holds it (named by pid, host and start time), or the folder
      cannot be made or written.
  """
  workdir = buckets.path(workdir).absolute()
  failure, held = None, None
  # Before JAX is initialised there can be no second process, and asking for the
  # process index would start the devices, which the run that holds them refuses.
  several = jax.distributed.is_initialized()
  if not several or jax.process_index() == 0:
    try:
      held = _take(workdir)
    except RunError as error:
      failure = error
  if several:  # a process whose leader was refused must not wait for it forever
    if distributed.from_first(failure is not None) and failure is None:
      failure = UserError(f'Process 0 could not lock {workdir}; its message says why.')
    same = distributed.agree((workdir / LOCK_FILE).exists())
    if failure is None and not same:
      failure = UserError(
        f'workdir {workdir} is not the same folder for all processes: not all of them '
        'see the lock of process 0. Give a folder on a file system that all share.'
      )
  if failure:
    raise failure
  in_bucket = isinstance(held, Lease)
  recorded = '' if held or buckets.is_url(workdir) else _text(workdir / LOCK_FILE)
  try:
    yield Held(workdir, held.check if in_bucket else lambda: None, recorded)
  finally:
    if in_bucket:
      held.release()
    elif held is not None:
      held.close()  # the file stays: to unlink it would race with the next run


def is_held(workdir) -> bool | None:
  """Returns whether a run is in a folder now; None if that cannot be told."""
  path = buckets.path(workdir) / LOCK_FILE
  if buckets.is_url(path):
    return Lease(path).is_held()
  if not path.is_file():  # a pipe would be waited for
    return None
  try:
    with open(path, 'rb') as file:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except OSError as error:
    return True if error.errno in _TAKEN else None
  return False


@contextlib.contextmanager
def inherited(workdir, recorded: str) -> Iterator[bool]:
  """Yields whether the lock's holder is dead and no other run has taken the lock since.

  For a process of the same run that is about to end. If it yields True, the process may
  write in the folder, and no other run gets in until it leaves this context. In a bucket
  it yields False: a lease does not tell whether its holder is alive until it ends.

  Args:
    recorded: of `Held`.
  """
  with contextlib.ExitStack() as stack:
    ours = False
    if recorded:
      with contextlib.suppress(OSError, ValueError):
        file = stack.enter_context(open(workdir / LOCK_FILE, 'r+', encoding='utf-8'))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = file.read() == recorded
    yield ours


def _text(path) -> str:
  try:
    return path.read_text(encoding='utf-8')
  except (OSError, ValueError):
    return ''


def _flock(file) -> None:
  # Tries again for a moment: `is_held` and `inherited` hold the lock only briefly.
  for _ in range(5):
    try:
      return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno not in _TAKEN:
        raise
    time.sleep(0.05)
  return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _take(workdir):
  path = workdir / LOCK_FILE
  if buckets.is_url(workdir):
    return _lease(path)
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    file = open(path, 'a+', encoding='utf-8')  # noqa: SIM115
  except FileExistsError:
    raise UserError(f'--workdir {workdir} is a file: name a folder.') from None
  except OSError as error:
    raise UserError(
      f'Cannot write to workdir {workdir}: {error.strerror}. Choose another --workdir, '
      'or change the permissions.'
    ) from error
  try:
    _flock(file)
  except OSError as error:
    if error.errno in _TAKEN:
      who = _holder_of(file)
      file.close()
      raise holder.refusal(workdir, who) from None
    distributed.say(
      f'cannot lock {path} ({error.strerror}): make sure no other run uses it.'
    )
  file.truncate(0)
  file.write(json.dumps(holder.this_process()) + '\n')
  file.flush()
  return file


def _lease(path: buckets.BucketPath) -> Lease:
  lease = Lease(path)
  try:
    lease.take()
  except FileNotFoundError:
    raise UserError(
      f'Bucket gs://{path.parts[1]} does not exist, or this account cannot see it. Make '
      'it first, or choose another --workdir.'
    ) from None
  return lease


def _holder_of(file) -> str:
  try:
    file.seek(0)
    return holder.name(json.loads(file.read()))
  except (ValueError, AttributeError):  # it has the lock, but has not written yet
    return 'a process that has just started'
