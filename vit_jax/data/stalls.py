"""Input that does not come: which files are being read, and since when.

A dead mount blocks its reader in the kernel, for hours or for ever, without an error.
Readers note what they open; whoever waits for their batches says what they wait for.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator

from vit_jax import terminal

AFTER = 30.0  # seconds without a batch that are worth a line
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
  # A copy at once: threads add and remove meanwhile.
  return [(str(name), now - start) for start, name in sorted([*_UNDER_WAY.values()])]


def watched(batches: Iterator, after: float = AFTER) -> Iterator:
  """Yields from `batches`, and says so whenever one takes long to come.

  The first line comes after `after` seconds; each next one after twice as long. A daemon
  thread says it: what waits is blocked, perhaps beyond the reach of signals.
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
    return f'{line} No file is being read: decoding is slow, or waits.'
  said = [f'{name} ({since:.0f} s)' for name, since in files[:_NAMED]]
  more = f', and {len(files) - _NAMED} more' if len(files) > _NAMED else ''
  return f'{line} Being read: {", ".join(said)}{more}.'
