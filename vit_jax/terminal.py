"""Standard error: lines to the user, and the noise of libraries to a file."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator

_SECONDS = 30  # between lines about progress, where standard error is no terminal

# The file descriptor of lines to the user; not 2 while `noise_to` redirects that.
_fd = 2


def say(line: str) -> None:
  """Writes a line to standard error, unbuffered: a signal handler may interrupt a print."""
  with contextlib.suppress(OSError):
    clear = '\r\x1b[K' if os.isatty(_fd) else ''  # over a progress bar
    os.write(_fd, f'{clear}{line}\n'.encode('utf-8', 'backslashreplace'))


def bold(text: str) -> str:
  """Returns a text in bold, where standard output is a terminal that has it."""
  plain = 'NO_COLOR' in os.environ or not sys.stdout.isatty()
  return text if plain else f'\x1b[1m{text}\x1b[0m'


def progress(
  items: Iterable, total: int | None, text: str, unit: str, quiet: bool = False
) -> Iterator:
  """Yields the items, with a bar on a terminal, and elsewhere a line now and then.

  A total of None is unknown; `quiet` processes show nothing.
  """
  import tqdm

  start, done, stop = time.monotonic(), 0, threading.Event()

  def report():
    while not stop.wait(_SECONDS):
      seconds = (time.monotonic() - start) * ((total or 0) - done) / max(done, 1)
      left = f', {tqdm.tqdm.format_interval(seconds)} left' if total and done else ''
      say(f'{text}: {done} of {total or "?"} {unit}{left}')

  # Nothing appears in the first second.
  options = dict(leave=False, dynamic_ncols=True, delay=1, disable=quiet or None)
  with tqdm.tqdm(total=total, desc=text, unit=unit, **options) as bar:
    if bar.disable and not quiet:  # a thread: one item may take minutes
      threading.Thread(target=report, daemon=True).start()
    try:
      for item in items:
        yield item
        done += 1
        bar.update()
    finally:
      stop.set()


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
