"""Standard error: lines to the user, and the noise of libraries to a file."""

import contextlib
import faulthandler
import os
import sys
from collections.abc import Iterator

# The file descriptor of lines to the user; not 2 while `noise_to` redirects that.
_fd = 2


def say(line: str) -> None:
  """Writes a line to standard error, unbuffered: a signal handler may interrupt a print."""
  with contextlib.suppress(OSError):
    clear = '\r\x1b[K' if os.isatty(_fd) else ''  # over a progress bar
    os.write(_fd, f'{clear}{line}\n'.encode('utf-8', 'backslashreplace'))


@contextlib.contextmanager
def noise_to(path: str | os.PathLike) -> Iterator[None]:
  """Appends to a file all that C and C++ code and child processes write to standard error.

  Python's output (`sys.stderr`, warnings, tracebacks even of a crash) stays where it was.
  """
  global _fd
  sys.stderr.flush()
  before = _fd
  file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
  saved = os.dup(2)  # not inherited by child processes
  stream, ours = sys.stderr, None
  try:
    os.dup2(file, 2)
  finally:
    os.close(file)
  _fd = saved if before == 2 else before  # one within another
  if _is_descriptor_2(stream):  # not of a notebook or a test, which stays as it is
    sys.stderr = ours = open(saved, 'w', 1, stream.encoding, stream.errors)  # noqa: SIM115
    crashes = faulthandler.is_enabled()
    faulthandler.enable(saved, all_threads=False)
  try:
    yield
  finally:
    os.dup2(saved, 2)
    _fd = before
    if ours is None:
      os.close(saved)
    else:  # `saved` stays open: a logger may have taken `ours` for its stream
      ours.flush()
      sys.stderr = stream
      faulthandler.enable(stream) if crashes else faulthandler.disable()


def _is_descriptor_2(stream) -> bool:
  with contextlib.suppress(AttributeError, OSError, ValueError):
    return stream.fileno() == 2
  return False
