"""Stalled input: which files are being read, and for how long.

A dead mount blocks its reader in the kernel, for hours or forever, without an error.
Readers note which files they open, and a run that waits for their batches names them.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator

from vit_jax import terminal

AFTER = 30.0  # seconds without a batch until it is said
_NAMED = 3

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


def under_way() -> list[tuple[str, float]]:
  """Returns (name, seconds) of files being read now, the longest first."""
  now = time.monotonic()
  files = list(_UNDER_WAY.values())  # one operation: other threads add and remove
  files.sort(key=lambda file: file[0])
  return [(str(name), now - start) for start, name in files]


def watched(batches: Iterator, after: float = AFTER) -> Iterator:
  """Yields from `batches`, and says on stderr when one takes long to come.

  The first line comes after `after` seconds, each further one after twice the time of the
  one before. A daemon thread writes them, as the thread that waits is blocked.
  """
  since: list[float | None] = [None]
  ended = threading.Event()

  def watch():
    due, last = after, None
    while not ended.wait(min(after / 4, 1)):
      start = since[0]
      if start != last:  # another batch
        due, last = after, start
      if start is not None and (seconds := time.monotonic() - start) > due:
        terminal.say(_line(seconds))
        due *= 2

  threading.Thread(target=watch, name='stalls', daemon=True).start()
  try:
    while True:
      since[0] = time.monotonic()
      try:
        batch = next(batches)
      except StopIteration:
        return
      since[0] = None
      yield batch
  finally:
    ended.set()


def _line(seconds: float) -> str:
  files = under_way()
  line = f'No batch of data for {seconds:.0f} s.'
  if not files:
    return f'{line} No file is being read: decoding is slow, or blocked.'
  said = [f'{name} ({since:.0f} s)' for name, since in files[:_NAMED]]
  more = f', and {len(files) - _NAMED} more' if len(files) > _NAMED else ''
  return f'{line} Being read: {", ".join(said)}{more}.'
