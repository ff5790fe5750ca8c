"""Reads records by index from ArrayRecord and TFRecord files. A record is bytes.

The reader of ArrayRecord finds records by itself, even in buckets. TFRecord has no index. The
offsets of its records are computed whenever a file is opened, by reading the length of each
record, 8 bytes. That suits some millions of records on a local disk. Convert larger
data sets (`tfds convert_format --out_file_format=array_record`).
"""

import concurrent.futures
import functools
import os
import re
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax import files
from vit_jax.data import stalls
from vit_jax.errors import DataError, RunError, UserError

# Number of threads that open files; they mostly wait.
_READERS = 64
# Bytes before and after the data of a TFRecord: uint64 length, uint32 checksum of the
# length; uint32 checksum of the data (tensorflow/core/lib/io/record_writer.h).
_HEADER, _FOOTER = 12, 4


class Piece(NamedTuple):
  """Neighbouring records of a file, with the attributes of TFDS's FileInstruction."""

  filename: str
  skip: int
  take: int
  examples_in_shard: int


class Pieces:
  """The records of some pieces of files, one piece after the other.

  Attributes:
    parts: the pieces.
    bounds: indices of the pieces' first records, and the end: int64 [pieces + 1].
  """

  def __init__(self, pieces: Iterable):
    self.parts = list(pieces)
    takes = [piece.take for piece in self.parts]
    self.bounds = np.cumsum([0, *takes], dtype=np.int64)

  def __len__(self) -> int:
    return int(self.bounds[-1])

  def place(self, index: int) -> tuple[str, int]:
    """Returns the (file, number in that file) of a record."""
    i = int(np.searchsorted(self.bounds, index, 'right')) - 1
    piece = self.parts[i]
    return os.fspath(piece.filename), int(piece.skip + index - self.bounds[i])


class Records(Pieces):
  """Pieces of ArrayRecord or of TFRecord files."""

  def __init__(self, pieces: Iterable):
    super().__init__(pieces)
    if is_array_record(self.parts[0].filename):
      from array_record.python import array_record_data_source

      source = array_record_data_source.ArrayRecordDataSource(self.parts)
      self._get = source.__getitems__
    else:
      self._get = lambda indices: [_tf_record(*self.place(i)) for i in indices]

  def read(self, indices: Sequence[int]) -> list[bytes | Exception]:
    """Returns records; in place of a record that cannot be read, its exception."""
    indices = [int(i) for i in indices]
    if not indices:
      return []
    path, _ = self.place(indices[0])
    try:
      with stalls.reading(path), files.outages(path):
        return list(self._get(indices))
    except RunError:
      # An outage or the like says nothing about the records.
      raise
    except Exception as error:
      if files.is_url(path):
        # ArrayRecord's error may be an outage or damage; a request to the bucket tells
        # which.
        with files.outages(path):
          files.path(path).stat()
      if len(indices) == 1:
        return [error]
      # Read one by one, so that one bad record does not spoil the others.
      return [self.read([i])[0] for i in indices]


def is_array_record(path) -> bool:
  """Whether a file is an ArrayRecord, by its name; all others are TFRecord."""
  return re.search('array_?record', os.path.basename(path)) is not None


def count(paths: Sequence[str]) -> list[int]:
  """Returns the number of records in each file."""
  one = _count_array_records if is_array_record(paths[0]) else _count_tf_records
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    return list(pool.map(one, paths))


def check_counts(pieces: Iterable, description: str) -> None:
  """Raises DataError if a file does not hold as many records as its pieces say.

  Args:
    description: name of the file that describes the pieces, for the message.
  """
  numbers = {os.fspath(piece.filename): piece.examples_in_shard for piece in pieces}
  counts = count(list(numbers))
  for (path, number), actual in zip(numbers.items(), counts, strict=True):
    if number != actual:
      raise DataError(
        f'{path} holds {actual:,} records, but {description} beside it says {number:,}: '
        'copy or prepare the data set again.'
      )


def _count_array_records(path: str) -> int:
  from array_record.python import array_record_module

  with files.outages(path):
    reader = array_record_module.ArrayRecordReader(path)
  # For a damaged file, the reader raises no error, and says that there are no records.
  if not reader.ok():
    raise DataError(f'{path} is not a complete ArrayRecord file: write it again.')
  return reader.num_records()


def _count_tf_records(path: str) -> int:
  if files.is_url(path):
    raise UserError(
      f'{path}: in buckets only ArrayRecord files are read: convert the data set (tfds '
      'convert_format --out_file_format=array_record).'
    )
  try:
    return len(_offsets(path)) - 1
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}.') from None


# Cached, because a run opens a file several times: to count, to train and to evaluate.
@functools.cache
def _offsets(path: str) -> np.ndarray:
  """Returns the offsets of the records of a TFRecord file, and the end: int64 [n + 1]."""
  offsets = [0]
  with open(path, 'rb', buffering=0) as file:
    size = os.fstat(file.fileno()).st_size
    while offsets[-1] < size:
      header = os.pread(file.fileno(), 8, offsets[-1])
      length = struct.unpack('<Q', header)[0] if len(header) == 8 else size
      offsets.append(offsets[-1] + _HEADER + length + _FOOTER)
  if offsets[-1] != size:
    raise DataError(f'{path} is not a complete TFRecord file: write it again.')
  return np.array(offsets, np.int64)


def _tf_record(path: str, number: int) -> bytes:
  start, end = _offsets(path)[number : number + 2].tolist()
  with open(path, 'rb', buffering=0) as file:
    file.seek(start + _HEADER)
    return file.read(end - start - _HEADER - _FOOTER)
