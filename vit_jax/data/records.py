"""Random access to TFRecord files, which have none: offsets found once and kept.

A record is uint64 length, uint32 checksum of it, the data, uint32 checksum of the data
(tensorflow/core/lib/io/record_writer.h), so that finding all records reads 8 bytes each.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import struct
import zipfile
from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError

_HEADER, _FOOTER = 12, 4
_READERS = 16


class Records:
  """The records of some TFRecord files as one sequence of bytes, by index."""

  def __init__(self, paths: Sequence[str], *, index_name: str):
    """Loads the offsets, or scans the files and writes them.

    Args:
      paths: files, all in one directory.
      index_name: name of the offsets' file beside them. If the directory cannot be
        written, it goes to the user's cache directory instead.

    Raises:
      UserError: for a missing or truncated file.
    """
    self.paths = list(paths)
    sizes = np.array([_file_size(path) for path in self.paths], np.int64)
    places = _index_paths(os.path.dirname(self.paths[0]), index_name)
    offsets = next(filter(None, (_load(place, sizes) for place in places)), None)
    if offsets is None:
      with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        offsets = list(pool.map(_scan, self.paths))
      _save(places, sizes, offsets)
    self.counts = [len(x) - 1 for x in offsets]
    self._offsets = offsets

  def rows(self, path_index: int, skip: int, take: int) -> np.ndarray:
    """Returns (path index, offset, size) int64 [take, 3] of records of one file."""
    bounds = self._offsets[path_index][skip : skip + take + 1]
    start, size = bounds[:-1] + _HEADER, np.diff(bounds) - _HEADER - _FOOTER
    return np.stack([np.full(len(start), path_index), start, size], 1)

  def read(self, row: np.ndarray) -> bytes:
    """Returns the data of one record, a row of `rows`."""
    path_index, offset, size = (int(x) for x in row)
    with open(self.paths[path_index], 'rb', buffering=0) as file:
      return os.pread(file.fileno(), size, offset)


def _file_size(path: str) -> int:
  try:
    return os.path.getsize(path)
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}.') from None


def _scan(path: str) -> np.ndarray:
  """Returns where each record starts, and the end: int64 [n + 1]."""
  starts, position, size = [0], 0, os.path.getsize(path)
  with open(path, 'rb', buffering=0) as file:
    while position < size:
      header = os.pread(file.fileno(), 8, position)
      length = struct.unpack('<Q', header)[0] if len(header) == 8 else size
      position += _HEADER + length + _FOOTER
      starts.append(position)
  if position != size:
    raise UserError(
      f'{path} is no whole TFRecord file: record {len(starts) - 2} of it ends beyond the '
      f'{size} bytes of the file. Prepare the data set again.'
    )
  return np.array(starts, np.int64)


def _index_paths(directory: str, name: str) -> list[str]:
  cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  key = hashlib.sha256(os.path.realpath(directory).encode()).hexdigest()[:16]
  return [
    os.path.join(directory, name),
    os.path.join(cache, 'vit_jax', f'{key}-{name}'),
  ]


def _load(path: str, sizes: np.ndarray) -> list[np.ndarray] | None:
  """Returns the offsets of each file, or None if there are none for these files."""
  try:
    with np.load(path, allow_pickle=False) as file:
      if not np.array_equal(file['sizes'], sizes):
        return None
      offsets = np.split(file['offsets'], np.cumsum(file['counts'])[:-1])
  except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
    return None
  whole = len(offsets) == len(sizes) and all(
    len(x) and x[-1] == size for x, size in zip(offsets, sizes, strict=True)
  )
  return offsets if whole else None


def _save(places: list[str], sizes: np.ndarray, offsets: list[np.ndarray]) -> None:
  """Writes to the first place that takes it; without any, the next run scans again."""
  for place in places:
    temporary = f'{place}.{os.getpid()}.tmp.npz'
    try:
      os.makedirs(os.path.dirname(place), exist_ok=True)
      np.savez(
        temporary,
        sizes=sizes,
        counts=np.array([len(x) for x in offsets]),
        offsets=np.concatenate(offsets),
      )
      os.replace(temporary, place)
      return
    except OSError:
      with contextlib.suppress(OSError):
        os.remove(temporary)
