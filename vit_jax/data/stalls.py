"""Reports stalled input: a line on stderr names the files being read, and for how long.

A dead mount blocks its reader in the kernel for hours or forever, without an error.
"""

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Iterator

from vit_jax import terminal

# Seconds without a batch before the first line.
AFTER = 30.0

_NUMBERS = itertools.count()
# {number: (start, name)} of the files that threads are reading now.
_UNDER_WAY: dict[int, tuple[float, str | os.PathLike]] = {}


@contextlib.contextmanager
def reading(name: str | os.PathLike) -> Iterator[None]:
  """Context manager that records that this thread reads a file."""
  number = next(_NUMBERS)
  _UNDER_WAY[number] = time.monotonic(), name
  try:
    yield
  finally:
    del _UNDER_WAY[number]


def watch(batches: Iterator, after: float = AFTER) -> Iterator:
  """Yields from `batches`; a thread prints a line whenever the next one takes long.

  The first line appears after `after` seconds, and each further line after twice the time
  of the line before it.
  """
  since = [math.inf]
  ended = threading.Event()

  def report():
    due = after
    while not ended.wait(min(after / 4, 1)):
      seconds = time.monotonic() - since[0]
      if seconds < after:
        # A new batch has come, or the consumer is not waiting for one.
        due = after
      elif seconds > due:
        terminal.say(f'No batch of data for {seconds:.0f} s. {_files()}')
        due *= 2

  threading.Thread(target=report, name='stalls', daemon=True).start()
  try:
    while True:
      since[0] = time.monotonic()
      if (batch := next(batches, None)) is None:
        return
      since[0] = math.inf
      yield batch
  finally:
    ended.set()


def _files() -> str:
  files = sorted(_UNDER_WAY.values(), key=lambda file: file[0])
  if not files:
    return 'No file is being read: decoding is slow, or blocked.'
  now = time.monotonic()
  oldest = [f'{name} ({now - start:.0f} s)' for start, name in files[:3]]
  return f'Being read: {", ".join(oldest)}{", ..." if len(files) > 3 else ""}.'
