"""Files of records as sequences of bytes: TFRecord, and ArrayRecord.

TFRecord has no random access: offsets are found once and kept beside the files. A
record is uint64 length, uint32 checksum of it, the data, uint32 checksum of the data
(tensorflow/core/lib/io/record_writer.h), so that finding all records reads 8 bytes each.

The offsets take 8 bytes a record on disk. They are mapped, not loaded: a process holds
the pages that it touches, and the processes of one machine share them.

Files may be in a bucket, gs://. A TFRecord is read there by the range of its bytes; the
offsets are found by reading every file once, and kept in the bucket. ArrayRecord's own
reader opens paths in buckets, and reads on from where a record begins.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import struct
import tempfile
import uuid
import zipfile
from collections.abc import Iterator, Sequence

import numpy as np

from vit_jax import buckets, paths
from vit_jax.data import stalls
from vit_jax.data.sources import shards
from vit_jax.errors import RunError, UserError

_HEADER, _FOOTER = 12, 4
# Bytes of a file in a bucket that are read at once to find its records.
_BLOCK = 4 << 20
# ArrayRecord readers held open: a file and its index, about 8 bytes a record.
_OPEN = 128


class Records:
  """The records of some TFRecord files as one sequence of bytes, by index.

  Attributes:
    counts: how many records each file holds.
    sizes: of each file in bytes.
  """

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
    self.sizes = sizes = _stats(self.paths)[:, 0]
    places = _index_paths(os.path.dirname(self.paths[0]), index_name)
    offsets = _offsets(places, sizes)
    if offsets is None:
      scan = _scan_bucket if buckets.is_url(places[0]) else _scan
      readers = shards.readers(places[0])
      with concurrent.futures.ThreadPoolExecutor(readers) as pool:
        offsets = list(pool.map(scan, self.paths))
      lengths = np.array([len(x) for x in offsets])
      _save(places, sizes=sizes, counts=lengths, offsets=np.concatenate(offsets))
      # Mapped from here on, if it could be written.
      offsets = _offsets(places, sizes) or offsets
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
    return shards.read(self.paths[path_index], offset, offset + size)

  def run(self, path_index: int, start: int, stop: int) -> list[bytes]:
    """Returns records [start, stop) of one file, read at once.

    Raises:
      OSError: if the file cannot be read.
    """
    bounds = self._offsets[path_index][start : stop + 1].tolist()
    data = shards.read(self.paths[path_index], bounds[0], bounds[-1])
    ends = [bound - bounds[0] for bound in bounds]
    return [
      data[ends[i] + _HEADER : ends[i + 1] - _FOOTER] for i in range(stop - start)
    ]


class ArrayRecords:
  """The records of some ArrayRecord files, which find their own: see `Records`."""

  def __init__(self, paths: Sequence[str], *, index_name: str):
    """Loads how many records each file holds, or asks each file and writes it.

    Raises:
      UserError: for a missing file, or one that is not an ArrayRecord file.
    """
    self.paths = list(paths)
    # Sizes alone say little of files that are filled up to whole blocks of 64 KiB.
    stats = _stats(self.paths)
    self.sizes = stats[:, 0]
    places = _index_paths(os.path.dirname(self.paths[0]), index_name)
    self._reader = functools.lru_cache(_OPEN)(self._open)
    kept = next(_kept(places, stats), None)
    if kept is None:
      readers = shards.readers(places[0])
      with concurrent.futures.ThreadPoolExecutor(readers) as pool:
        counts = list(pool.map(lambda path: self._open(path).num_records(), paths))
      kept = {'counts': np.array(counts)}
      _save(places, sizes=stats, **kept)
    self.counts = kept['counts'].tolist()

  def run(self, path_index: int, start: int, stop: int) -> list[bytes]:
    """Returns records [start, stop) of one file.

    Raises:
      UserError, ValueError, IndexError: if they cannot be read.
      NotAllowed, Unreachable: see `shards.outages_of`.
    """
    path = self.paths[path_index]
    with stalls.reading(path), shards.outages_of(path):
      return self._reader(path).read(start, stop)

  def _open(self, path):
    try:
      from array_record.python import array_record_module
    except ImportError as error:
      raise UserError(
        f'{path}: ArrayRecord files need array_record ({error}): pip install '
        'array_record. TFRecord files do not.'
      ) from None
    # Neither its own threads nor reading ahead: what is wanted is asked for.
    options = 'readahead_buffer_size:0,max_parallelism:0'
    reader = array_record_module.ArrayRecordReader(path, options)
    if not reader.ok():  # it raises nothing, and says that it holds no records
      raise UserError(
        f'{path} is not a complete ArrayRecord file: its end, where the index is, cannot be '
        'read. Write it again.'
      )
    return reader


def _stats(paths: Sequence[str]) -> np.ndarray:
  """Returns `shards.stat` of each file, int64 [n, 2]."""
  with concurrent.futures.ThreadPoolExecutor(shards.readers(paths[0])) as pool:
    return np.array(list(pool.map(shards.stat, paths)), np.int64)


def _scan(path: str) -> np.ndarray:
  """Returns where each record starts, and the end: int64 [n + 1]."""
  starts, position, size = [0], 0, os.path.getsize(path)
  with open(path, 'rb', buffering=0) as file:
    while position < size:
      header = os.pread(file.fileno(), 8, position)
      length = struct.unpack('<Q', header)[0] if len(header) == 8 else size
      position += _HEADER + length + _FOOTER
      starts.append(position)
  return _complete(path, starts, size)


def _scan_bucket(path: str) -> np.ndarray:
  """As `_scan`, but reads all of a file, in blocks: a request per header is slower."""
  starts, position, (size, _) = [0], 0, shards.stat(path)
  first, block = 0, b''
  while position < size:
    if position + 8 > first + len(block):
      first, block = position, shards.read(path, position, min(position + _BLOCK, size))
    header = block[position - first :][:8]
    length = struct.unpack('<Q', header)[0] if len(header) == 8 else size
    position += _HEADER + length + _FOOTER
    starts.append(position)
  return _complete(path, starts, size)


def _complete(path: str, starts: list[int], size: int) -> np.ndarray:
  if starts[-1] != size:
    raise UserError(
      f'{path} is not a complete TFRecord file: record {len(starts) - 2} of it ends beyond the '
      f'{size} bytes of the file. Prepare the data set again.'
    )
  return np.array(starts, np.int64)


def _index_paths(directory: str, name: str) -> list[str]:
  real = directory if buckets.is_url(directory) else os.path.realpath(directory)
  key = hashlib.sha256(real.encode()).hexdigest()[:16]
  return [
    os.path.join(directory, name),
    str(paths.cache_dir() / f'{key}-{name}'),
  ]


def _offsets(places: list[str], sizes: np.ndarray) -> list[np.ndarray] | None:
  """Returns the kept offsets of each file, or None if there are none for these files."""
  for kept in _kept(places, sizes):
    if 'offsets' in kept:
      offsets = np.split(kept['offsets'], np.cumsum(kept['counts'])[:-1])
      if len(offsets) == len(sizes) and all(
        len(x) and x[-1] == size for x, size in zip(offsets, sizes, strict=True)
      ):
        return offsets
  return None


def _kept(places: list[str], sizes: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
  """Yields the indices kept for these files, the next only if it is asked for.

  One that is in a bucket is copied to this host and read there. See `_load`.
  """
  beside, own = places
  if not buckets.is_url(beside):
    yield from filter(None, (_load(place, sizes) for place in places))
    return
  if kept := _load(own, sizes):
    yield kept
    return
  partial = f'{own}.{uuid.uuid4().hex}.tmp'  # as in `_save`
  # Without an index there, or room for it here, the files are scanned.
  with contextlib.suppress(OSError):
    try:
      os.makedirs(os.path.dirname(own), exist_ok=True)
      buckets.download(beside, partial)
      os.replace(partial, own)
    finally:
      with contextlib.suppress(OSError):
        os.remove(partial)
    yield from filter(None, [_load(own, sizes)])


def _load(path: str, sizes: np.ndarray) -> dict[str, np.ndarray] | None:
  """Returns the arrays of an index, or None if there is none for these files.

  Args:
    sizes: of each file, or more of what tells it from another: int64 [n, ...].
  """
  try:
    with zipfile.ZipFile(path) as file:
      kept = {
        name.removesuffix('.npy'): _mapped(path, file, name) for name in file.namelist()
      }
    same = np.array_equal(kept['sizes'], sizes) and len(kept['counts']) == len(sizes)
    return kept if same else None
  except (OSError, ValueError, KeyError, EOFError, struct.error, zipfile.BadZipFile):
    return None


def _mapped(path: str, archive: zipfile.ZipFile, name: str) -> np.ndarray:
  """Returns an array of an .npz, mapped: `np.savez` stores it as it is, in one piece."""
  info = archive.getinfo(name)
  with open(path, 'rb') as file:
    # A local header of 30 bytes, that ends in the lengths of a name and of extra fields
    # (APPNOTE.TXT 4.3.7), then the .npy.
    file.seek(info.header_offset + 26)
    file.seek(sum(struct.unpack('<HH', file.read(4))), os.SEEK_CUR)
    version = np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    stored = info.compress_type == zipfile.ZIP_STORED and version == (1, 0)
    if not stored or dtype != np.int64:
      raise ValueError('not as `_save` writes it')
    start = file.tell()
  return np.asarray(np.memmap(path, dtype, 'r', start, shape))


def _save(places: list[str], **arrays: np.ndarray) -> None:
  """Writes to the first place that takes it; without any, the next run scans again."""
  for place in places:
    if buckets.is_url(place):
      with (
        contextlib.suppress(OSError, RunError),
        tempfile.TemporaryDirectory() as folder,
      ):
        np.savez(file := os.path.join(folder, 'index.npz'), **arrays)
        buckets.upload(file, place)
        return
      continue
    # Not the process's id: on a pod every host may have the same.
    temporary = f'{place}.{uuid.uuid4().hex}.tmp.npz'
    try:
      os.makedirs(os.path.dirname(place), exist_ok=True)
      np.savez(temporary, **arrays)
      os.replace(temporary, place)
      return
    except OSError:
      with contextlib.suppress(OSError):
        os.remove(temporary)
