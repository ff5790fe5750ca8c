"""Writing a run's small files; on a full disk the old versions survive.

A file may be in a bucket: there each is an object, replaced as a whole.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vit_jax import buckets, files
from vit_jax.errors import DiskFull, LockLost, disk_is_full

# Seconds between two writes of a file of lines in a bucket.
_BUCKET_SECONDS = 10.0


def overwrite(path: Path, data: bytes) -> None:
  """Overwrites a file in place, which works on a full disk as it needs no new blocks.

  Not atomic: a kill may leave a mixture. Raises: OSError.
  """
  file = os.open(path, os.O_WRONLY)
  try:
    # Padded with spaces, the text is valid JSON until the file is cut to length.
    write(file, data.ljust(os.fstat(file).st_size))
    os.ftruncate(file, len(data))
  finally:
    os.close(file)


class _Appended:
  """A file to which whole lines are added, each with one write."""

  def __init__(self, path: Path):
    self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

  def add(self, line: bytes) -> None:
    write(self._file, line)

  def flush(self) -> None:
    """Does nothing: `add` has written every line."""

  def close(self) -> None:
    os.close(self._file)


def appended(path: Path, data: bytes):
  """Replaces a file by `data`, whole lines; returns what adds lines to it.

  Its methods are `add(line)`, `flush()`, after which all lines added are written, and
  `close()`. On disk `add` writes; in a bucket lines wait for the next write.

  Raises: OSError.
  """
  if buckets.is_url(path):
    return buckets.Lines(path, data, every=_BUCKET_SECONDS)
  files.replace(path, data)
  return _Appended(path)


class LocalFolder:
  """A folder for libraries that write to disk alone; copied if its place is in a bucket.

  Attributes:
    folder: `target` itself, or a temporary folder if that is in a bucket.
    remote: whether `target` is in a bucket.
  """

  def __init__(self, target: Path | buckets.BucketPath):
    self.folder, self.remote = target, buckets.is_url(target)
    self._target, self._sent = target, {}
    if self.remote:
      self.folder = Path(tempfile.mkdtemp(prefix='vit_jax-'))

  def push(self) -> None:
    """Copies the files whose size has changed; raises as `buckets.write`."""
    if not self.remote:
      return
    for path in sorted(p for p in self.folder.rglob('*') if p.is_file()):
      data = path.read_bytes()
      if self._sent.get(path) != len(data):
        buckets.write(self._target / str(path.relative_to(self.folder)), data)
        self._sent[path] = len(data)

  def close(self) -> None:
    """Copies as `push` does, and removes the folder if it was made for the bucket.

    Called while LockLost ends the run it copies nothing: the target is another run's.
    """
    try:
      if not isinstance(sys.exc_info()[1], LockLost):
        self.push()
    finally:
      if self.remote:
        shutil.rmtree(self.folder, ignore_errors=True)


def write(file: int, data: bytes) -> None:
  """Writes all of `data` to a file descriptor; raises OSError if it does not fit."""
  while data:  # a write may be partial: only the next one fails
    data = data[os.write(file, data) :]


@contextlib.contextmanager
def full_raises_disk_full(workdir: str | os.PathLike) -> Iterator[None]:
  """Raises `DiskFull` in place of any error that means a full disk (`disk_is_full`)."""
  try:
    yield
  except DiskFull:
    raise
  except Exception as error:
    if not disk_is_full(error):
      raise
    line = ' '.join(str(error).split())[:300]
    raise DiskFull(
      f'Disk full: {line}. {_room(workdir)}What was written before is intact. '
      'Make room, and rerun the same command.'
    ) from error


def _room(workdir: str | os.PathLike) -> str:
  if buckets.is_url(workdir):
    return ''
  workdir = Path(workdir)
  there = next((p for p in (workdir, *workdir.parents) if p.exists()), None)
  if there is None:
    return ''
  free, files = shutil.disk_usage(there).free, os.statvfs(there).f_favail
  return f'{there} has room for {free / 1e6:,.1f} MB in {files:,} files. '
