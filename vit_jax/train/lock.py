"""The lock on a workdir: one run at a time. In a bucket it is a lease, see `lease`."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Callable
from typing import NamedTuple

import jax

from vit_jax import buckets, distributed
from vit_jax.errors import RunError, UserError
from vit_jax.train.lease import Lease

LOCK_FILE = 'run.lock'


class Held(NamedTuple):
  """A folder that this run holds.

  Attributes:
    workdir: absolute.
    check: raises LockLost if the lock was lost, which can happen in a bucket; cheap.
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
      holder = _holder(file)
      file.close()
      raise UserError(
        f'Another run holds workdir {workdir}: {holder}. Wait for it, stop it (it '
        'saves on SIGTERM), or choose another --workdir.'
      ) from None
    distributed.say(
      f'cannot lock {path} ({error.strerror}): make sure no other run uses it.'
    )
  holder = dict(
    pid=os.getpid(),
    host=socket.gethostname(),
    started=datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
  )
  file.truncate(0)
  file.write(json.dumps(holder) + '\n')
  file.flush()
  return file


def _lease(path: buckets.BucketPath) -> Lease:
  lease = Lease(path)
  try:
    lease.take()
  except FileNotFoundError:
    raise UserError(
      f'There is no bucket gs://{path.parts[1]}, or this account cannot see it: make it '
      'first, or choose another --workdir.'
    ) from None
  return lease


def _holder(file) -> str:
  try:
    file.seek(0)
    found = json.loads(file.read())
    return f'process {found["pid"]} on {found["host"]}, since {found["started"]}'
  except (ValueError, KeyError, TypeError):  # it has the lock, but has not written yet
    return 'a process that has just started'
