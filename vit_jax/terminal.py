"""Writes lines for the user to standard error, and sends the noise of libraries to a file."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator

# The file descriptor for lines to the user: 2, or its copy while `noise_to` redirects 2.
_fd = 2


def say(line: str) -> None:
  """Writes a line to standard error, unbuffered, because a signal may interrupt a print."""
  with contextlib.suppress(OSError):
    # Delete the line of a progress bar first.
    clear = '\r\x1b[K' if os.isatty(_fd) else ''
    os.write(_fd, f'{clear}{line}\n'.encode('utf-8', 'backslashreplace'))


def bold(text: str) -> str:
  """Makes a text bold if standard output is a terminal with colours."""
  plain = 'NO_COLOR' in os.environ or not sys.stdout.isatty()
  return text if plain else f'\x1b[1m{text}\x1b[0m'


def progress(
  items: Iterable,
  total: int | None,
  text: str,
  unit: str,
  quiet: bool = False,
  every: float = 30,
) -> Iterator:
  """Yields the items; shows a bar on a terminal, and prints a line now and then elsewhere.

  Args:
    total: number of items, or None if it is unknown.
    quiet: whether to show nothing.
    every: seconds between two lines, if standard error is not a terminal.
  """
  import tqdm

  start, done, stop = time.monotonic(), 0, threading.Event()

  def report():
    while not stop.wait(every):
      seconds = (time.monotonic() - start) * ((total or 0) - done) / max(done, 1)
      left = f', {tqdm.tqdm.format_interval(seconds)} left' if total and done else ''
      say(f'{text}: {done} of {total or "?"} {unit}{left}')

  # The bar appears only after the first second.
  options = dict(leave=False, dynamic_ncols=True, delay=1, disable=quiet or None)
  with tqdm.tqdm(total=total, desc=text, unit=unit, **options) as bar:
    if bar.disable and not quiet:
      # A thread prints the lines, because one item may take minutes.
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
  """Context manager that sends standard error of C, C++ and child processes to a file.

  The output of Python (`sys.stderr`, warnings, tracebacks even of a crash) stays on standard
  error.
  """
  global _fd
  sys.stderr.flush()
  before = _fd
  file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
  # Child processes do not inherit this copy.
  saved = os.dup(2)
  stream, ours = sys.stderr, None
  try:
    os.dup2(file, 2)
  finally:
    os.close(file)
  # If this is nested, the outer context has already moved the lines to the user.
  _fd = saved if before == 2 else before
  # In a notebook or a test, `sys.stderr` is another stream, which stays as it is.
  if _is_descriptor_2(stream):
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
    else:
      # `saved` stays open, because a logger may use `ours` as its stream.
      ours.flush()
      sys.stderr = stream
      faulthandler.enable(stream) if crashes else faulthandler.disable()


def _is_descriptor_2(stream) -> bool:
  with contextlib.suppress(AttributeError, OSError, ValueError):
    return stream.fileno() == 2
  return False
