"""Images that cannot be decoded: each is reported once, and too many end the run.

Such an image keeps its place in the order, blank and with mask 0, so that all others stay
where they are.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable

from vit_jax import files
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError

# Training and evaluations share the file; one pipeline of a run writes at a time.
_LOCK = threading.Lock()


def limit(num_examples: int, fraction: float | None) -> int:
  """Returns how many bad images of a split a run accepts.

  By default 0.1 %: more suggest that the data set itself is damaged. At least 20, because
  even a small folder may hold a handful of broken files, and never more than half.
  """
  if fraction is not None:
    return int(fraction * num_examples)
  return min(max(num_examples // 1000, 20), num_examples // 2)


class BadImages:
  """Counts a split's bad images, and appends each to a file of JSON lines.

  A line is {"path", "reason", "source"}; each path has one line, also over restarts and
  over the pipelines of a run that share the file.
  """

  def __init__(self, source: Source, max_fraction: float | None, log: str | None):
    self._source, self._log = source, log
    self._limit = limit(len(source), max_fraction)
    self._indices: set[int] = set()

  @property
  def count(self) -> int:
    return len(self._indices)

  def add(self, index: int, reason: Callable[[], str]) -> None:
    """Counts and logs an image, unless it was added before.

    Raises:
      UserError: when the split has more bad images than the limit.
    """
    if index in self._indices:
      return
    self._indices.add(index)
    path, why = self._source.name_of(index), reason()
    if self._log:
      _append(self._log, {'path': path, 'reason': why, 'source': self._source.name})
    if self.count > self._limit:
      where = f' All are listed in {self._log}.' if self._log else ''
      raise UserError(
        f'{self._source.name}: {self.count} of {len(self._source)} images cannot be '
        f'decoded, more than max_bad_fraction allows ({self._limit}). The last: {path} '
        f'({why}).{where}'
      )


def read_log(path) -> list[dict]:
  """Returns the entries of a log, [] if it does not exist; damaged lines are left out."""
  try:
    with files.outages(path):
      data = files.path(path).read_bytes()
  except FileNotFoundError:
    return []
  out = []
  for line in data.split(b'\n'):
    with contextlib.suppress(ValueError, RecursionError):
      entry = json.loads(line)
      if isinstance(entry, dict) and 'path' in entry:
        out.append(entry)
  return out


def _append(log: str, entry: dict) -> None:
  with _LOCK:
    entries = read_log(log)
    if entry['path'] in {line['path'] for line in entries}:
      return
    if files.is_url(log):
      # A bucket replaces the whole object. If two processes write at once, the last one wins.
      with files.outages(log):
        files.replace(log, ''.join(json.dumps(x) + '\n' for x in [*entries, entry]))
      return
    # One write per line, because several processes may append at the same time. If a kill
    # left the last line unfinished, end it first: the new entry needs a line of its own.
    with open(log, 'ab+', buffering=0) as file:
      if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b'\n':
        file.write(b'\n')
      file.write((json.dumps(entry) + '\n').encode())
