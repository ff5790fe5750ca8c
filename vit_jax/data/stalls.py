"""Stalled input: a line on stderr with the files that are being read, and since when.

A dead mount blocks its reader in the kernel, for hours or forever, without an error.
"""

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Iterator

from vit_jax import terminal

AFTER = 30.0  # Seconds without a batch before the first line.

_NUMBERS = itertools.count()
_UNDER_WAY: dict[int, tuple[float, str | os.PathLike]] = {}


@contextlib.contextmanager
def reading(name: str | os.PathLike) -> Iterator[None]:
  """Notes that this thread reads a file, as long as the block lasts."""
  number = next(_NUMBERS)
  _UNDER_WAY[number] = time.monotonic(), name
  try:
    yield
  finally:
    del _UNDER_WAY[number]


def watch(batches: Iterator, after: float = AFTER) -> Iterator:
  """Yields from `batches`; a thread prints a line whenever one takes long to come.

  The first line comes after `after` seconds, each further one after twice the time.
  """
  since = [math.inf]
  ended = threading.Event()

  def report():
    due = after
    while not ended.wait(min(after / 4, 1)):
      seconds = time.monotonic() - since[0]
      if seconds < after:  # another batch, or none is due
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
