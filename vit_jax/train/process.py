"""Handles the signals that stop a run, and the death of its peer processes.

Until a run can save, `cli.exit_on_interrupt` handles Ctrl-C.
"""

import contextlib
import ctypes
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from vit_jax import distributed, terminal
from vit_jax.errors import PeerLost, Preempted, RunError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


# -- signals ---------------------------------------------------------------------------


class StopSignal:
  """A context manager that turns SIGTERM and SIGINT into a request to stop.

  With one process, a signal sets a flag, which the run polls between steps. A second signal
  exits at once. Python runs no handler while the main thread waits in C++ for a batch or a
  compiler. Therefore signals also write to a pipe (`signal.set_wakeup_fd`). A thread reads
  the pipe, prints a line for each signal, and exits on the second.

  Several processes must stop after the same step. JAX's coordination service catches SIGTERM
  and lets them agree on the step. A Python handler would disable that, so none is installed
  until they have agreed. Signals are counted from then on, because pods are signalled one by
  one.

  Outside the main thread Python allows no handlers, so there a run never stops. The
  StopSignal of a sweep learns of the signals of its runs.

  Attributes:
    requested: whether to stop; with several processes, whether all have agreed to stop.
    before_exit: function that is called at a second signal, before the process exits.
  """

  def __init__(self):
    self.before_exit: Callable[[], None] = lambda: None
    self.requested = self._several = False
    self._polls = self._signals = 0
    self._previous = {}
    self._listener: threading.Thread | None = None

  def __enter__(self):
    # Do not count the processes if there can be only one. Counting starts the devices, which
    # takes seconds, and Ctrl-C during that time would leave the run's folder behind.
    self._several = jax.distributed.is_initialized() and jax.process_count() > 1
    if threading.current_thread() is threading.main_thread():
      read, self._write = os.pipe()
      os.set_blocking(self._write, False)
      self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
      self._listener = threading.Thread(target=self._listen, args=(read,), daemon=True)
      self._listener.start()
      if not self._several:
        self._install()
    return self

  def __exit__(self, *_):
    for number, handler in self._previous.items():
      # The handler is None if C code installed it; Python cannot restore that one.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
      outer = getattr(handler, '__self__', None)
      if self.requested and isinstance(outer, StopSignal):
        outer.requested = True
    if self._listener:
      signal.set_wakeup_fd(self._wakeup_before)
      os.close(self._write)
      self._listener.join(timeout=5)

  def should_stop(self) -> bool:
    """Returns whether to save and stop now; once true, it stays true.

    This is cheap. All processes must make the same calls, because they agree on the number
    of the call at which to stop.
    """
    if self._several and not self.requested:
      self._polls += 1
      self.requested = multihost_utils.reached_preemption_sync_point(self._polls)
      if self.requested:
        distributed.say('preemption notice: all processes save and stop.')
        self._signals = 0
        if self._listener:
          self._install()
    return self.requested

  def _install(self) -> None:
    self._previous = {n: signal.signal(n, self._handle_signal) for n in _SIGNALS}

  def _handle_signal(self, *_):
    self.requested = True

  def _listen(self, read: int) -> None:
    with open(read, 'rb', buffering=0) as pipe:
      # Read until the other end is closed.
      while byte := pipe.read(1):
        if byte[0] in _SIGNALS:
          self._answer(signal.Signals(byte[0]).name)

  def _answer(self, name: str) -> None:
    self._signals += 1
    if self._signals > 1:
      terminal.say(f'second {name}: exiting at once, without saving.')
      self.before_exit()
      os._exit(Preempted.exit_code)
    text = 'stopping without saving'
    if not self._several or self.requested:
      code = Preempted.exit_code
      text = f'saving, then exiting with code {code}; the same command resumes'
    terminal.say(f'{name}: {text}. A second signal exits at once.')


# -- peers -----------------------------------------------------------------------------
#
# When a peer dies, JAX's coordination service logs a long message in a thread of its own and
# aborts this process; jaxlib cannot be told to do anything else. A handler of SIGABRT reads
# the message, prints one line, and exits with code 75.

_FATAL = 'the JAX distributed service detected fatal errors'
# (regex for the message, reason); the first match wins. The processes talk only to process 0,
# so a failed RPC means that process 0 is gone.
_REASONS = (
  (r'stopped sending heartbeats\):\s+(\d+)', r'process \1 died or cannot be reached'),
  (r'[Tt]ask (\d+) heartbeat timeout', r'process \1 died or cannot be reached'),
  (r'first task at the barrier: (\d+)', r'process \1 has ended'),
  (
    r'/RegisterTask',
    f'not all processes of the run have started in {distributed.JOIN} s',
  ),
  (r'RPC', 'process 0 died or cannot be reached'),
  (r'', 'another process ended'),
)
# Number of bytes at the end of the log that contain the message.
_PAGE = 16_000
# The exit code for this process if it ends because of an error of its own.
_exit_code: int | None = None
# Seconds to wait for JAX's report.
_patience = 0
# Never closed, so that its contents last until the process is gone.
_until_exit = contextlib.ExitStack()


@contextlib.contextmanager
def watch_peers() -> Iterator[None]:
  """Context manager that prints a line and exits with code 75 when a peer process dies.

  Enter it before `distributed.start`.
  """
  global _patience
  _handle_abort()
  _patience = distributed.HEARTBEAT + 5
  try:
    yield
  except Exception as error:
    settle(error)
    raise


def settle(error: Exception) -> None:
  """Waits until JAX would have reported a dead peer as the cause of `error`.

  If a peer dies, a collective fails at once. JAX reports the death, and aborts, later.
  """
  global _exit_code, _patience
  if isinstance(error, RunError):
    # The peers end too, and JAX may then abort this process: keep its own exit code.
    _exit_code = error.exit_code
    return
  patience, _patience = _patience, 0
  time.sleep(patience)


def reason_of_abort(log: str) -> str | None:
  """Returns why JAX aborted, from its last fatal message in the log.

  None if that message is not about other processes.
  """
  _, fatal, page = log.rpartition(_FATAL)
  matches = ((re.search(regex, page), reason) for regex, reason in _REASONS)
  return next(m.expand(reason) for m, reason in matches if m) if fatal else None


def _handle_abort() -> None:
  # Send descriptor 2, and with it the noise of libraries, to a file that is deleted but open.
  # This lasts until the process is gone, because JAX still waits for the others when Python
  # exits. It comes before the handler below, because `noise_to` enables faulthandler, which
  # installs its handlers only the first time.
  with tempfile.NamedTemporaryFile(prefix='vit_jax-') as file:
    _until_exit.enter_context(terminal.noise_to(file.name))
  libc = ctypes.CDLL(None)
  libc.signal.restype = ctypes.c_void_p
  libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p

  # The module `signal` would run the handler in the main thread. It must run in the thread
  # that aborts, because that thread would not wait for another.
  @ctypes.CFUNCTYPE(None, ctypes.c_int)
  def handle_abort(number):
    log = _end_of_log()
    if reason := reason_of_abort(log):
      if _exit_code is None:
        terminal.say(
          f'error: {reason}. Rerun the same command in all processes to resume.'
        )
      os._exit(PeerLost.exit_code if _exit_code is None else _exit_code)
    terminal.say(log)
    libc.signal(number, before)
    signal.raise_signal(number)

  before = libc.signal(signal.SIGABRT, ctypes.cast(handle_abort, ctypes.c_void_p))
  # Keep a reference to the handler, so that it is not freed.
  _until_exit.callback(lambda: handle_abort)


def _end_of_log() -> str:
  """Returns the end of the file to which descriptor 2 leads now."""
  with contextlib.suppress(OSError), open('/proc/self/fd/2', 'rb') as file:
    file.seek(max(0, os.fstat(2).st_size - _PAGE))
    return file.read().decode(errors='replace')
  return ''
