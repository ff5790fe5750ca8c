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

  By default 0.1 %: more mean that something is wrong with the data, not with a few files.
  But at least 20, because a folder of a hundred photographs has its handful of broken
  files; and never more than half.
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
    """Number of different bad images so far."""
    return len(self._indices)

  def add(self, index: int, reason: Callable[[], str]) -> None:
    """Reports an example, if it is new.

    Raises:
      UserError: when there are more of them than accepted.
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
      return _entries(files.path(path).read_bytes())
  except FileNotFoundError:
    return []


def _entries(data: bytes) -> list[dict]:
  out = []
  for line in data.split(b'\n'):
    with contextlib.suppress(ValueError, RecursionError):
      entry = json.loads(line)
      if isinstance(entry, dict) and 'path' in entry:
        out.append(entry)
  return out


def _append(log: str, entry: dict) -> None:
  with _LOCK:
    if files.is_url(log):  # replaced as a whole; of two processes at once the last wins
      entries = read_log(log)
      if entry['path'] not in {line['path'] for line in entries}:
        lines = [json.dumps(line) + '\n' for line in [*entries, entry]]
        with files.outages(log):
          files.replace(log, ''.join(lines))
      return
    # One write of a whole line: a kill leaves all of it or nothing.
    file = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    with open(file, 'r+b', buffering=0) as opened:
      data = opened.readall()
      if entry['path'] not in {line['path'] for line in _entries(data)}:
        torn = data and not data.endswith(b'\n')
        opened.write((b'\n' if torn else b'') + (json.dumps(entry) + '\n').encode())
