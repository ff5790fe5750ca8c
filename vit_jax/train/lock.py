"""The lock on a workdir: one run at a time. In a bucket it is a lease, see `lease`."""

import contextlib
import errno
import fcntl
import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax

from vit_jax import buckets, distributed
from vit_jax.errors import RunError, UserError
from vit_jax.train import holder
from vit_jax.train.lease import Lease

LOCK_FILE = 'run.lock'


class Held(NamedTuple):
  """A folder that this run holds.

  Attributes:
    workdir: its absolute path.
    check: raises LockLost if another run has taken the lock, which can happen in a
      bucket alone. Cheap enough to be called before every step.
  """

  workdir: pathlib.Path | buckets.BucketPath
  check: Callable[[], None]


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
  try:
    yield Held(workdir, held.check if in_bucket else lambda: None)
  finally:
    if in_bucket:
      held.release()
    elif held is not None:
      held.close()  # the file stays: to unlink it would race with the next run


def _take(workdir):
  path = workdir / LOCK_FILE
  if buckets.is_url(workdir):
    return _lease(path)
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    file = open(path, 'a+', encoding='utf-8')  # noqa: SIM115
  except OSError as error:
    raise UserError(
      f'Cannot write to workdir {workdir}: {error.strerror}. Choose another --workdir, '
      'or change the permissions.'
    ) from error
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    if error.errno in (errno.EAGAIN, errno.EACCES):
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
