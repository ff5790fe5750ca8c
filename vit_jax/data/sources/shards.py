"""Files of a data set, on disk or in a bucket: found, measured, read in parts."""

import contextlib
import glob
import os
from collections.abc import Iterator

from vit_jax import buckets
from vit_jax.data import stalls
from vit_jax.errors import UserError

# Reading is waiting, mostly: for a disk or a mount, and longer for a bucket.
READERS, BUCKET_READERS = 16, 64


def readers(path: str) -> int:
  """Returns how many threads read files such as this one at a time."""
  return BUCKET_READERS if buckets.is_url(path) else READERS


def whole(path: str) -> str:
  """Returns a path as the other functions take it: absolute, or a URL."""
  if buckets.is_url(path):
    return str(buckets.path(path))
  return os.path.abspath(os.path.expanduser(path))


def is_file(path: str) -> bool:
  return buckets.path(path).is_file() if buckets.is_url(path) else os.path.isfile(path)


def is_dir(path: str) -> bool:
  return buckets.path(path).is_dir() if buckets.is_url(path) else os.path.isdir(path)


def names(directory: str) -> list[str]:
  """Returns the names of what lies in a directory, sorted; [] where there is none."""
  if not is_dir(directory):
    return []
  return sorted(path.name for path in buckets.path(directory).iterdir())


def files(target: str) -> list[str]:
  """Returns the files that fit a pattern, or all that lie in a directory."""
  if buckets.is_url(target):
    fs = buckets.filesystem()
    with buckets.errors_of(target):
      pattern = f'{target}/*' if fs.isdir(target) else target
      found = fs.glob(pattern, detail=True)
    return [buckets.SCHEME + name for name, x in found.items() if x['type'] == 'file']
  if os.path.isdir(target):
    target = os.path.join(glob.escape(target), '*')
  return [path for path in glob.glob(target) if os.path.isfile(path)]


def stat(path: str) -> tuple[int, int]:
  """Returns (size in bytes, what changes with the file: its time in ns, or generation).

  Raises:
    UserError: there is no such file.
  """
  try:
    if buckets.is_url(path):
      return buckets.path(path).stat_pair()
    found = os.stat(path)
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}.') from None
  return found.st_size, found.st_mtime_ns


def read(path: str, start: int, stop: int) -> bytes:
  """Returns bytes [start, stop) of a file: fewer at the end of one on disk.

  Raises:
    OSError: it cannot be read.
    EOFError: a file in a bucket ends before.
  """
  with stalls.reading(path):
    if buckets.is_url(path):
      return buckets.ranges(path, [(start, stop)])[0]
    # Not `open`, whose file object costs more than opening, reading and closing do.
    file = os.open(path, os.O_RDONLY)
    try:
      return os.pread(file, stop - start, start)
    finally:
      os.close(file)


@contextlib.contextmanager
def outages_of(path: str) -> Iterator[None]:
  """Raises Unreachable where ArrayRecord finds no answer: that is no broken record."""
  try:
    yield
  except Exception as error:
    if buckets.is_url(path):
      buckets.raise_if_outage(error, path)
    raise
