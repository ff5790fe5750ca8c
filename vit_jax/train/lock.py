"""The lock on a workdir: one run at a time."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import socket

import jax

from vit_jax import distributed
from vit_jax.errors import UserError

LOCK_FILE = 'run.lock'


@contextlib.contextmanager
def lock(workdir):
  """Holds `workdir` for this run; makes it if need be. Yields it as an absolute Path.

  The kernel drops the lock when the process ends, however it ends: a file left behind
  by a killed run holds nothing.

  Raises:
    UserError: another run holds it (named by pid, host and start time), or the folder
      cannot be made or written.
  """
  if '://' in str(workdir):
    raise UserError(
      f'workdir is {workdir}: a run writes to a file system. Mount the bucket and give '
      'the path of the mount.'
    )
  workdir = pathlib.Path(workdir).absolute()
  failure, file = None, None
  # Before JAX is initialised there can be no second process, and asking for the
  # process index would start the devices, which the run that holds them refuses.
  several = jax.distributed.is_initialized()
  if not several or jax.process_index() == 0:
    try:
      file = _take(workdir)
    except UserError as error:
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
  try:
    yield workdir
  finally:
    if file is not None:
      file.close()  # the file stays: to unlink it would race with the next run


def _take(workdir: pathlib.Path):
  path = workdir / LOCK_FILE
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


def _holder(file) -> str:
  try:
    file.seek(0)
    found = json.loads(file.read())
    return f'process {found["pid"]} on {found["host"]}, since {found["started"]}'
  except (ValueError, KeyError, TypeError):  # it has the lock, but has not written yet
    return 'a process that has just started'
