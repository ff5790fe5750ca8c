"""What an interrupted preparation leaves on disk, and how much of it counts.

Images wait in buckets: files that each hold a range of TFDS's hashes, by which the data
set will be ordered, in the order of reading. An index for each split has their places.
"""

import contextlib
import json
import os
import struct

import numpy as np

from vit_jax.data.prepare import features, report
from vit_jax.data.prepare.plan import Place, Plan
from vit_jax.errors import UserError

# Bytes in a bucket, and how many at most: each is an open file for every split.
_BUCKET, _MAX_BUCKETS = 1 << 30, 256
_BUFFER = 256 << 10
# A record: the length of its JSON head {key, labels}, the head, the image.
_LENGTH = struct.Struct('<I')
# A row of an index: the hash in two halves, offset in the bucket, size of the record.
_PACKED = struct.Struct('<QQQI')
_ROW = np.dtype([('hi', '<u8'), ('lo', '<u8'), ('offset', '<u8'), ('size', '<u4')])


class State:
  """progress.json, and the folders of buckets and shards.

  Attributes:
    piece, entry: where reading goes on.
    num_buckets: into which the hashes are cut.
    sizes: {file of buckets: bytes that count}.
    shards: {split: [bytes of the examples in each finished shard]}.
    scattered: whether all input is read.
    tally: see `report`.
  """

  def __init__(self, work: str, plan: Plan, file_format: str):
    """Reads what is there, and removes what was written after the last save.

    Raises:
      UserError: if it was begun from another input, or is damaged.
    """
    self._path = os.path.join(work, 'progress.json')
    self.buckets, self.out = (os.path.join(work, d) for d in ('buckets', 'shards'))
    for directory in (self.buckets, self.out):
      os.makedirs(directory, exist_ok=True)
    self._identity = f'{plan.fingerprint()} {file_format}'
    known = {}
    with contextlib.suppress(FileNotFoundError), open(self._path) as file:
      known = json.load(file)
    if known and known['identity'] != self._identity:
      raise UserError(
        f'{work} was begun from another input or with other options. Give those again, '
        'or delete it to start over.'
      )
    self.piece, self.entry = known.get('piece', 0), known.get('entry', 0)
    default = min(_MAX_BUCKETS, plan.size // _BUCKET + 1)
    self.num_buckets = known.get('num_buckets', default)
    self.sizes: dict[str, int] = known.get('sizes', {})
    self.shards: dict[str, list[int]] = known.get('shards', {})
    self.scattered = known.get('scattered', False)
    self.tally = report.Tally(known.get('tally'))
    if not self.scattered:
      self._cut_back(work)

  def save(self) -> None:
    fields = ('piece', 'entry', 'num_buckets', 'sizes', 'shards', 'scattered')
    record = {name: getattr(self, name) for name in fields}
    record |= {'identity': self._identity, 'tally': self.tally.state()}
    temporary = f'{self._path}.tmp'
    with open(temporary, 'w') as file:
      json.dump(record, file)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, self._path)

  def rows(self, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a split's rows in the order of the hashes, and those of a hash again.

    16 + 8 + 4 bytes an image: 400 MB for all of ImageNet-21k.
    """
    rows = np.fromfile(os.path.join(self.buckets, _index(split)), _ROW)
    rows = rows[np.lexsort((rows['lo'], rows['hi']))]  # stable: the first stays first
    again = np.zeros(len(rows), bool)
    again[1:] = (np.diff(rows['hi']) == 0) & (np.diff(rows['lo']) == 0)
    return rows[~again], rows[again]

  def read(self, split: str, rows: np.ndarray) -> list[tuple[Place, bytes]]:
    """Returns the images of rows, in their order; reads in that of the files."""
    out: list = [None] * len(rows)
    buckets = self._bucket_of(rows)
    for i in np.lexsort((rows['offset'], buckets)):
      path = os.path.join(self.buckets, _bucket(split, buckets[i]))
      with open(path, 'rb', buffering=0) as file:
        size, offset = int(rows['size'][i]), int(rows['offset'][i])
        record = os.pread(file.fileno(), size, offset)
      start = _LENGTH.size + _LENGTH.unpack_from(record)[0]
      head = json.loads(record[_LENGTH.size : start])
      out[i] = Place(head['key'], split, tuple(head['labels'])), record[start:]
    return out

  def delete_before(self, split: str, rest: np.ndarray) -> None:
    """Deletes the buckets that none of the rows in `rest`, ordered, needs."""
    end = int(self._bucket_of(rest[:1])[0]) if len(rest) else self.num_buckets
    for number in range(end):
      with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(self.buckets, _bucket(split, number)))

  def _bucket_of(self, rows: np.ndarray) -> np.ndarray:
    # Of the upper 32 bits, so that the product stays within 64.
    return ((rows['hi'] >> 32) * self.num_buckets) >> 32

  def _cut_back(self, work: str) -> None:
    for name in os.listdir(self.buckets):
      if name not in self.sizes:
        os.remove(os.path.join(self.buckets, name))
    for name, size in self.sizes.items():
      path = os.path.join(self.buckets, name)
      if not os.path.exists(path) or os.path.getsize(path) < size:
        raise UserError(f'{path} is damaged: delete {work} to start over.')
      os.truncate(path, size)


class Writer:
  """Appends images to the buckets of a state."""

  def __init__(self, state: State):
    self._state = state
    self._files: dict = {}
    self._hashers: dict = {}

  def __enter__(self):
    return self

  def __exit__(self, *error):
    for file in self._files.values():
      with contextlib.suppress(OSError):  # what is left in a buffer does not count
        file.close()

  def add(self, place: Place, data: bytes) -> None:
    hi, lo = self.hash(place.split, place.key)
    number = ((hi >> 32) * self._state.num_buckets) >> 32
    head = json.dumps({'key': place.key, 'labels': place.labels}).encode()
    record = _LENGTH.pack(len(head)) + head + data
    offset = self._append(_bucket(place.split, number), record)
    self._append(_index(place.split), _PACKED.pack(hi, lo, offset, len(record)))

  def flush(self) -> None:
    """Brings all to the disk, and the state to count it."""
    for name, file in self._files.items():
      file.flush()
      os.fsync(file.fileno())
      self._state.sizes[name] = file.tell()

  def hash(self, split: str, key: str) -> tuple[int, int]:
    """Returns the halves of TFDS's hash: md5 of the split's name and the key."""
    if split not in self._hashers:
      features.load_tfds()
      from tensorflow_datasets.core import hashing

      self._hashers[split] = hashing.Hasher(split)
    value = self._hashers[split].hash_key(key)
    return value >> 64, value & (1 << 64) - 1

  def _append(self, name: str, data: bytes) -> int:
    """Returns where the data begins."""
    if name not in self._files:
      path = os.path.join(self._state.buckets, name)
      self._files[name] = open(path, 'ab', buffering=_BUFFER)  # noqa: SIM115
    offset = self._files[name].tell()
    self._files[name].write(data)
    return offset


def _bucket(split: str, number: int) -> str:
  return f'{split}-{number:03d}'


def _index(split: str) -> str:
  return f'{split}.index'
