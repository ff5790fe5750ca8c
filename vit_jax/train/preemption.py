"""Being asked to stop, and being alone in a folder. The only place that touches signals.

One process: SIGTERM and SIGINT set a flag, the run polls it between steps, saves and
exits with code 75; a second signal exits at once. A signal that arrives while the first
step compiles is noticed when that is done.

Several processes must stop after the same step, whichever of them was signalled: JAX's
coordination service catches SIGTERM and agrees on that step. A Python handler for
SIGTERM would silently disable it, so none is installed there, and SIGINT keeps its
default.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import signal
import socket
import threading

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.errors import Preempted, UserError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOCK_FILE = 'run.lock'


class StopSignal:
  """Context manager that turns signals into an answer to "shall I stop?".

  Handlers are installed on entry and the previous ones restored on exit. Outside the
  main thread (a notebook's worker, a server) Python allows no handlers: there it never
  asks to stop.
  """

  def __init__(self):
    self._requested = False
    self._polls = 0
    self._previous = {}
    self._several = False

  def __enter__(self):
    self._several = jax.process_count() > 1
    if not self._several and threading.current_thread() is threading.main_thread():
      self._previous = {n: signal.signal(n, self._on_signal) for n in _SIGNALS}
    return self

  def __exit__(self, *_):
    for number, handler in self._previous.items():
      # None: a handler that C code installed, which Python cannot put back.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    self._previous = {}

  @property
  def requested(self) -> bool:
    """Whether a signal has come; with several processes: whether all agreed to stop."""
    return self._requested

  def should_stop(self, step: int) -> bool:
    """Returns whether to save and stop now; once true, it stays true.

    Cheap: call it after every train step and every evaluation batch. With several
    processes all must make the same calls: the call number, not `step`, is what they
    agree on, so that a long evaluation can be left in the middle.

    Args:
      step: for the message only.
    """
    if self._several and not self._requested:
      self._polls += 1
      self._requested = multihost_utils.reached_preemption_sync_point(self._polls)
      if self._requested and jax.process_index() == 0:
        _say(f'preemption notice: all processes save and stop after step {step}.')
    return self._requested

  def _on_signal(self, number, _):
    name = signal.Signals(number).name
    if self._requested:
      _say(f'second {name}: exiting at once, without saving.')
      os._exit(Preempted.exit_code)
    self._requested = True
    _say(
      f'{name}: finishing this step, saving, then exiting with code '
      f'{Preempted.exit_code}; the same command resumes. A second signal exits at once.'
    )


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
    refused = multihost_utils.broadcast_one_to_all(np.int32(failure is not None))
    if refused and failure is None:
      failure = UserError(f'Process 0 could not lock {workdir}; its message says why.')
    sees = (workdir / LOCK_FILE).exists()
    missing = np.flatnonzero(~multihost_utils.process_allgather(np.bool_(sees)))
    if failure is None and len(missing):
      failure = UserError(
        f'workdir {workdir} is not the same folder for all processes: {missing.tolist()} '
        'do not see the lock of process 0. Give a folder on a file system that all share.'
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
    _say(f'cannot lock {path} ({error.strerror}): make sure no other run uses it.')
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


def _say(line: str):
  # Straight to the file descriptor: a handler may interrupt a half-done print, and
  # Python's buffered streams do not allow to be entered twice.
  with contextlib.suppress(OSError):
    os.write(2, f'{line}\n'.encode())
