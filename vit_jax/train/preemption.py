"""Preemption signals of a run; until it can save, `cli.exit_on_interrupt` handles Ctrl-C.

One process: SIGTERM and SIGINT set a flag, the run polls it between steps, saves and
exits with code 75; a second signal exits at once. A signal that arrives while the first
step compiles is noticed when that is done.

Python runs handlers in the main thread, between two of its instructions: while that
thread waits in C++ for a batch, or a compiler, none runs. Signals therefore also write to
a pipe (`signal.set_wakeup_fd`), and a thread at its end says what it reads and exits.

Several processes must stop after the same step, whichever of them was signalled: JAX's
coordination service catches SIGTERM and agrees on that step. A Python handler for
SIGTERM would silently disable it, so none is installed until they have agreed, and SIGINT
keeps its default. What arrives after that may be this process's own first SIGTERM, as
pods are signalled machine by machine: only the second from then on exits at once.
"""

import os
import signal
import threading
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from vit_jax import terminal
from vit_jax.distributed import say
from vit_jax.errors import Preempted

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
  """Context manager that turns signals into an answer to "shall I stop?".

  Handlers are installed on entry and the previous ones restored on exit. Outside the
  main thread (a notebook's worker, a server) Python allows no handlers: there it never
  asks to stop. One within another, as of a run among several of a tool, tells that one of
  a signal that came after it was last asked: it is not lost.

  Attributes:
    check: called by `should_stop`; raises if the lock on the folder was lost.
    before_exit: called when a second signal comes, before the process exits.
  """

  def __init__(self):
    self.check: Callable[[], None] = lambda: None
    self.before_exit: Callable[[], None] = lambda: None
    self._requested = False
    self._polls = 0
    self._previous = {}
    self._several = False
    self._met = 0  # signals that a second one is counted from
    self._pipe: tuple[int, int] | None = None
    self._wakeup_before = -1
    self._listener: threading.Thread | None = None

  def __enter__(self):
    # Counting processes starts the devices, which takes seconds, and Ctrl-C meanwhile
    # would leave the run's folder behind: not done for a single process.
    self._several = jax.distributed.is_initialized() and jax.process_count() > 1
    if threading.current_thread() is threading.main_thread():
      self._listen()
      if not self._several:
        self._install()
    return self

  def __exit__(self, *_):
    for number, handler in self._previous.items():
      # None: a handler that C code installed, which Python cannot put back.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
      outer = getattr(handler, '__self__', None)
      if self._requested and isinstance(outer, StopSignal):
        outer._requested = True
    self._previous = {}
    if self._listener:
      signal.set_wakeup_fd(self._wakeup_before)
      read, write = self._pipe
      os.close(write)
      self._listener.join(timeout=5)
      os.close(read)
      self._listener = None

  @property
  def requested(self) -> bool:
    """Whether a signal has come; with several processes: whether all agreed to stop."""
    return self._requested

  def should_stop(self) -> bool:
    """Returns whether to save and stop now; once true, it stays true.

    Cheap: call it after every train step and every evaluation batch. With several
    processes all must make the same calls: the call number is what they agree on, so
    that a long evaluation can be left in the middle.
    """
    self.check()
    if self._several and not self._requested:
      self._polls += 1
      self._requested = multihost_utils.reached_preemption_sync_point(self._polls)
      if self._requested:
        say('preemption notice: all processes save and stop.')
        self._met = 0
        if self._listener:
          self._install()
    return self._requested

  def _install(self) -> None:
    self._previous = {n: signal.signal(n, self._on_signal) for n in _SIGNALS}

  def _on_signal(self, *_):
    self._requested = True

  def _listen(self) -> None:
    self._pipe = read, write = os.pipe()
    os.set_blocking(write, False)
    self._wakeup_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    self._listener = threading.Thread(target=self._answer, args=(read,), daemon=True)
    self._listener.start()

  def _answer(self, read: int) -> None:
    while byte := os.read(read, 1):  # until the other end is closed
      if byte[0] not in _SIGNALS:
        continue
      self._met += 1
      name = signal.Signals(byte[0]).name
      if self._met > 1:
        terminal.say(f'second {name}: exiting at once, without saving.')
        self.before_exit()
        os._exit(Preempted.exit_code)
      if not self._several:
        does = (
          f'finishing this step, saving, then exiting with code {Preempted.exit_code}; '
          'the same command resumes'
        )
      elif self._requested:
        does = 'this run is saving and stops by itself'
      else:
        does = 'stopping without saving'
      terminal.say(f'{name}: {does}. A second signal exits at once.')
