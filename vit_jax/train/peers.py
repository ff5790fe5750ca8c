"""The end of another process of the run: one line, and exit code 75.

JAX's coordination service learns of it wherever this process is, compiling, waiting for
devices, saving: a connection closes, or heartbeats are missing. From a thread of its own
it then logs a page and aborts this process (jaxlib 0.10.2 offers no other way: the
status that it would give a callback has no Python type). A handler of SIGABRT reads that
page, says in a line what it means, and exits.
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

from vit_jax import distributed, terminal
from vit_jax.errors import PeerLost, RunError

_FATAL = 'the JAX distributed service detected fatal errors'
# What it says next -> what that means; of several processes the first is named.
_MEANINGS = (
  (r'stopped sending heartbeats\):\s+(\d+)', 'process {} died or cannot be reached'),
  (r'[Tt]ask (\d+) heartbeat timeout', 'process {} died or cannot be reached'),
  (r'first task at the barrier: (\d+)', 'process {} has ended'),
  (
    r'/RegisterTask',
    f'not all processes of the run have started within {distributed.JOIN} s',
  ),
  # Process 0 is the one that the others talk to.
  (r'Failed to send RPC|RPC: ', 'process 0 died or cannot be reached'),
)
_WORDS = 16_000  # bytes at the end of the log that hold the page
_RECORD = 5  # seconds to write down how the run ended: its disk may be what is gone

_place = 'this process was starting'
_own_end: int | None = None  # the exit code, once this process ends by itself
_patience = 0  # seconds to wait for what JAX says
_records: list[Callable[[PeerLost], None]] = []
_kept = contextlib.ExitStack()  # never closed


def doing(place: str) -> None:
  """Notes where this process is, for the line: 'process 0 was at step 3 of 9'."""
  global _place
  _place = place


@contextlib.contextmanager
def recorded(record: Callable[[PeerLost], None]) -> Iterator[None]:
  """Has `record(error)` called before this process ends because of another."""
  _records.append(record)
  try:
    yield
  finally:
    _records.remove(record)


@contextlib.contextmanager
def watched() -> Iterator[None]:
  """Ends this process by the line and 75 when another one ends, from now on.

  To be entered before `distributed.start`.
  """
  global _patience
  _watch()
  _patience = distributed.HEARTBEAT + 5
  try:
    yield
  except Exception as error:
    settle(error)
    raise


def settle(error: Exception) -> None:
  """Returns once it is certain that an error here is not due to another's end.

  A collective or a barrier may fail at once where a process dies, which JAX says later:
  then this does not return.
  """
  global _own_end, _patience
  if isinstance(error, RunError):
    _own_end = error.exit_code  # the others are told and end too; their end is expected
    return
  patience, _patience = _patience, 0
  time.sleep(patience)


def meaning(log: str) -> str | None:
  """Returns what JAX's last words mean; None where it is not about other processes."""
  _, found, words = log.rpartition(_FATAL)
  if not found:
    return None
  for regex, text in _MEANINGS:
    if match := re.search(regex, words):
      return text.format(*match.groups())
  return 'another process ended'


def _watch() -> None:
  # Until this process is gone: JAX still waits for the others when Python exits.
  file, path = tempfile.mkstemp(prefix='vit_jax-')
  # It enables faulthandler, whose handlers a later call leaves as they are.
  _kept.enter_context(terminal.noise_to(path))
  os.close(file)
  os.unlink(path)
  libc = ctypes.CDLL(None)
  libc.signal.restype = ctypes.c_void_p
  libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p

  # Not by the module `signal`, whose handlers wait for the main thread: this one runs in
  # the thread that aborts, which would not wait.
  @ctypes.CFUNCTYPE(None, ctypes.c_int)
  def on_abort(number):
    log = _last_words()
    if reason := meaning(log):
      _end(reason)
    terminal.say(log)
    libc.signal(number, before)
    signal.raise_signal(number)

  before = libc.signal(signal.SIGABRT, ctypes.cast(on_abort, ctypes.c_void_p))
  _kept.callback(lambda: on_abort)  # keeps it alive


def _last_words() -> str:
  # Wherever descriptor 2 leads by now.
  try:
    with open('/proc/self/fd/2', 'rb') as file:
      file.seek(max(0, os.fstat(2).st_size - _WORDS))
      return file.read().decode(errors='replace')
  except OSError:
    return ''


def _end(reason: str) -> None:
  if _own_end is not None:
    os._exit(_own_end)
  error = PeerLost(
    f'{reason}; {_place}. Rerun the same command in all processes to resume.'
  )
  terminal.say(f'error: {error}')
  if _records:
    threading.Timer(_RECORD, os._exit, [error.exit_code]).start()
  for record in _records:
    with contextlib.suppress(Exception):
      record(error)
  os._exit(error.exit_code)
