"""Files of a data set, on disk or in a bucket: found, measured, read in parts."""

import contextlib
import glob
import os
from collections.abc import Iterator

from vit_jax import buckets
from vit_jax.data import stalls
from vit_jax.errors import UserError

# Threads that read mostly wait: for a disk or a mount, and longer for a bucket.
READERS, BUCKET_READERS = 16, 64


def readers(path: str) -> int:
  """Returns how many threads read files such as this one at a time."""
  return BUCKET_READERS if buckets.is_url(path) else READERS


def absolute(path: str) -> str:
  """Returns an absolute path, '~' expanded, or a URL without superfluous slashes."""
  if buckets.is_url(path):
    return str(buckets.path(path))
  return os.path.abspath(os.path.expanduser(path))


def is_file(path: str) -> bool:
  """Whether a path, also of a bucket, is a file."""
  return buckets.path(path).is_file() if buckets.is_url(path) else os.path.isfile(path)


def is_dir(path: str) -> bool:
  """Whether a path, also of a bucket, is a folder."""
  return buckets.path(path).is_dir() if buckets.is_url(path) else os.path.isdir(path)


def names(directory: str) -> list[str]:
  """Returns the sorted names in a directory; [] if it does not exist."""
  if not is_dir(directory):
    return []
  return sorted(path.name for path in buckets.path(directory).iterdir())


def files(target: str) -> list[str]:
  """Returns the files that match a pattern, or all files in a directory."""
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
  """Returns (size in bytes, time of change in ns or, in a bucket, generation) of a file.

  Raises:
    UserError: the file does not exist.
  """
  try:
    if buckets.is_url(path):
      return buckets.path(path).size_and_generation()
    found = os.stat(path)
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}.') from None
  return found.st_size, found.st_mtime_ns


def read(path: str, start: int, stop: int) -> bytes:
  """Returns bytes [start, stop) of a file; fewer if a file on disk ends before `stop`.

  Raises:
    OSError: it cannot be read.
    EOFError: a file in a bucket ends before `stop`.
    NotAllowed, Unreachable: see `buckets.errors_of`.
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
  """Raises as `buckets.raise_if_outage`, in place of ArrayRecord's errors."""
  try:
    yield
  except Exception as error:
    if buckets.is_url(path):
      buckets.raise_if_outage(error, path)
    raise
