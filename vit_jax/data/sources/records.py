"""Your own sharded record files: tf.train.Example in TFRecord or ArrayRecord."""

import concurrent.futures
import itertools
import os
import re
from typing import Annotated

import numpy as np

from vit_jax.check import INT32, Count, Range
from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import example_proto, shards, splits
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.data.sources.record_files import ArrayRecords, Records
from vit_jax.data.sources.stream import Stream
from vit_jax.errors import NotAllowed, UserError

# 'train-00000-of-01024', 'train-00000-of-01024.tfrecord', and TFDS's
# 'imagenet2012-train.tfrecord-00000-of-01024'.
_SHARD = re.compile(r'(?P<stem>.+)-(?P<shard>\d{5,})-of-(?P<count>\d{5,})(?:\.\w+)*')
_TFDS_STEM = re.compile(r'(?:.*-)?([^-]+)\.(?:tfrecord|array_record|arrayrecord)s?')
_EXTENSIONS = ('.tfrecord', '.tfrecords', '.tfrec', '.array_record', '.arrayrecord')
_INDEX = '.record_index.npz'  # the end of an index's name

# How many records are looked at for keys before a run: a key that none of them has is
# taken for misspelt.
_LOOK = 64
_BUFFER = 50_000


class RecordFiles(Source):
  """`records:FOLDER` or `records:PATTERN`: encoded images with one or several labels.

  Both may be in a bucket, `records:gs://BUCKET/FOLDER`.

  Files are shards named `<split>-00000-of-00064`, with or without an extension, or as
  TFDS names them; a folder must hold all of a split's. A pattern ('/data/*.tfrecord')
  takes the shards that match, and if any file is not so named, all are one split,
  'train'. Splits are taken apart as in TFDS: 'train[:1%]+val'.

  ArrayRecord files are told by their name ('array_record' in it), others are TFRecord,
  not compressed. Where TFRecords start is found once, by a walk over all headers (some
  ten minutes for 300 million), and kept beside the files (or in the user's cache
  directory) at 8 bytes a record; that file is mapped, not loaded, and a process keeps
  nothing else for each example. On many hosts, open the source on one of them first:
  each would else walk. ArrayRecord needs none of that.

  A record that cannot be parsed, or has no image (or one label, where one is needed),
  is a bad image: masked, listed and counted.

  Options:
    image_key: feature of the encoded image.
    label_key: feature of its labels, integers.
    weight_key: feature of one float for each label, to be held by multi-hot targets;
      where a record lacks it, its labels weigh 1. Of a label given twice, the last
      counts.
    multi_label: whether targets are multi-hot; None: as the first records have it, true
      with a `weight_key`. Then a record may be without a label.
    label_offset: added to labels: -1 where classes are counted from 1.
    exif: whether to turn images as their EXIF says, as for a person's photographs.
    stream: read shards from front to back instead of records at random, in training;
      for disks and mounts that are slow to seek. See `stream`.
    shuffle_buffer: records held in memory to shuffle a stream, 50,000 unless told.
  """

  def __init__(
    self,
    target: str,
    split: str,
    *,
    image_key: str = 'image/encoded',
    label_key: str = 'image/class/label',
    weight_key: str | None = None,
    multi_label: bool | None = None,
    label_offset: Annotated[int, Range(-INT32, INT32)] = 0,
    exif: bool = False,
    stream: bool = False,
    shuffle_buffer: Count | None = None,
  ):
    self.name = f'records:{target}'
    self.exif = exif
    self._fields = example_proto.Fields(image_key, label_key, weight_key, label_offset)
    self._buffer = self._check_stream(stream, shuffle_buffer)
    self._readers = shards.readers(target)
    self._pool = concurrent.futures.ThreadPoolExecutor(self._readers)
    if weight_key and multi_label is False:
      raise UserError(f'{self.name}: weight_key={weight_key!r} needs multi_label=True.')
    self._open(find(target), split)
    first = self._look()
    if multi_label is None:
      labels = [len(x[label_key]) for x in first if label_key in x]
      multi_label = bool(weight_key) or any(n != 1 for n in labels)
    self.features = {'image': ImageFeature(), 'label': LabelFeature(multi_label)}

  def _check_stream(self, stream, shuffle_buffer) -> int | None:
    if not stream and shuffle_buffer is not None:
      raise UserError(
        f"{self.name}: shuffle_buffer={shuffle_buffer!r} needs 'stream': True; reading "
        'at random shuffles all examples.'
      )
    if shuffle_buffer is not None and (
      not isinstance(shuffle_buffer, int) or shuffle_buffer < 1
    ):
      raise UserError(
        f'{self.name}: shuffle_buffer={shuffle_buffer!r} must be a positive integer.'
      )
    return (shuffle_buffer or _BUFFER) if stream else None

  def _open(self, found: dict[str, list[str]], split: str) -> None:
    """Finds the pieces of files that a split expression takes."""
    files: dict[str, list[tuple]] = {}  # of a split: (its Records, number there)
    pieces = []  # (Records, number there, first record, how many)
    for name, low, high in splits.parse(split):
      splits.check_name(name, found, self.name)
      if name not in files:
        files[name] = _open_files(name, found[name])
      counts = [records.counts[i] for records, i in files[name]]
      what = f'{split!r} of {self.name}'
      # Not `select`, which would make an index for every example.
      low, high = (
        splits.absolute(bound, sum(counts), default, what)
        for bound, default in ((low, 0), (high, sum(counts)))
      )
      ends = itertools.accumulate(counts)
      for (records, i), count, end in zip(files[name], counts, ends, strict=True):
        skip, stop = max(low - (end - count), 0), min(high - (end - count), count)
        if skip < stop:
          pieces.append((records, i, skip, stop - skip))
    if not pieces:
      raise UserError(f'Split {split!r} of {self.name} selects no example.')
    self._pieces = pieces
    # Where each piece starts among the examples, and the end: int64 [pieces + 1].
    self.bounds = np.cumsum([0] + [take for *_, take in pieces], dtype=np.int64)
    self.fingerprint = fingerprint(
      (os.path.basename(records.paths[i]), records.sizes[i].tolist(), skip, take)
      for records, i, skip, take in pieces
    )

  def __len__(self) -> int:
    return int(self.bounds[-1])

  def read(self, indices: np.ndarray) -> list[dict]:
    if not len(indices):
      return []
    # Of n readers each takes every nth, so that none is handed one record at a time.
    parts = [indices[i :: self._readers] for i in range(self._readers)]
    parts = [part for part in parts if len(part)]
    out: list = [None] * len(indices)
    for i, records in enumerate(self._pool.map(self._records, parts)):
      out[i :: self._readers] = records
    return [self.example(record, i) for record, i in zip(out, indices, strict=True)]

  def _records(self, indices) -> list[bytes | Exception]:
    return [self.run(int(i), int(i) + 1)[0] for i in indices]

  def run(self, start: int, stop: int) -> list[bytes | Exception]:
    """Returns the records of examples [start, stop), which must lie in one piece."""
    records, file, at = self._place(start)
    try:
      return records.run(file, at, at + stop - start)
    except NotAllowed:  # a UserError, which says nothing about the record
      raise
    except (OSError, EOFError, ValueError, IndexError) as error:
      if stop - start == 1:
        return [error]
      return self._records(range(start, stop))  # so that one bad record stays one

  def _place(self, index: int) -> tuple:
    piece = int(np.searchsorted(self.bounds, index, 'right')) - 1
    records, file, skip, _ = self._pieces[piece]
    return records, file, skip + index - int(self.bounds[piece])

  def name_of(self, index: int) -> str:
    """Returns 'FILE#RECORD', counted from 0."""
    records, file, at = self._place(int(index))
    return f'{records.paths[file]}#{at}'

  def example(self, record: bytes | Exception, index: int) -> dict:
    """Returns the example of a record, as `read` does.

    Raises:
      UserError: for several labels where one is expected.
    """
    if isinstance(record, Exception):
      return {'error': f'cannot be read: {record}'}
    try:
      image, labels, weights = self._fields.read(record)
    except ValueError as error:
      return {'error': str(error)}
    if not self.features['label'].several:
      if len(labels) > 1:
        raise UserError(
          f'{self.name_of(index)} has {len(labels)} labels, where one is expected: set '
          "data.source_options={'multi_label': True}."
        )
      if not len(labels):
        return {'error': f'{self._fields.label_key} holds no label'}
      return {'image': image, 'label': int(labels[0])}
    weight = {} if weights is None else {'weight': weights}
    return {'image': image, 'label': labels, **weight}

  def _look(self) -> list[dict]:
    """Returns the features of the first records; UserError if a key is in none."""
    first = []
    for index in range(min(_LOOK, len(self))):
      (record,) = self.run(index, index + 1)
      if isinstance(record, bytes):
        try:
          first.append(example_proto.parse(record))
        except ValueError:
          continue  # a bad image, unless they all are
      if first and all(key in first[-1] for key in self._fields.keys):
        break
    if not first:
      raise UserError(
        f'{self.name}: none of the first records is a tf.train.Example, as needed.'
      )
    self._fields.check(self.name, {k: v for x in first for k, v in x.items()})
    return first

  def for_training(self, seed: int, batch_size: int, host: int, hosts: int) -> tuple:
    if self._buffer is None:
      return super().for_training(seed, batch_size, host, hosts)
    stream = Stream(self, self._buffer, seed, batch_size, host, hosts)
    return stream, stream

  def for_evaluation(self) -> tuple:
    if self._buffer is not None:
      raise UserError(
        f"{self.name}: 'stream' is for training; evaluation reads from front to back "
        "anyway. Leave it out of this evaluation's source_options."
      )
    return super().for_evaluation()


def find(target: str) -> dict[str, list[str]]:
  """Returns {split: paths, by shard} of a folder or a pattern.

  Raises:
    UserError: if there are no files, or not all of a folder's split.
  """
  target = shards.absolute(target)
  whole = shards.is_dir(target)
  beside = ('.npz', '.json', '.txt')  # an index, what TFDS writes, names of classes
  paths = [path for path in shards.files(target) if not path.endswith(beside)]
  numbered = {path: _SHARD.fullmatch(os.path.basename(path)) for path in paths}
  if whole:  # other files may lie there too
    named = [path for path in paths if numbered[path]]
    paths = named or [path for path in paths if path.endswith(_EXTENSIONS)]
  if not paths:
    raise UserError(
      f'records: there is no record file {"in" if whole else "like"} {target}. Expected '
      "files named '<split>-00000-of-00064.tfrecord' (or .array_record), and so on."
    )
  if not all(numbered[path] for path in paths):
    return {'train': sorted(paths)}
  out: dict[str, list[str]] = {}
  for path in sorted(paths, key=lambda p: (int(numbered[p]['shard']), p)):
    stem = numbered[path]['stem']
    tfds = _TFDS_STEM.fullmatch(stem)
    out.setdefault(tfds[1] if tfds else stem, []).append(path)
  if whole:
    for split, files in out.items():
      _check_complete(target, split, [numbered[path] for path in files])
  return out


def _check_complete(folder, split, found):
  numbers = [int(shard['shard']) for shard in found]
  count = int(found[0]['count'])
  missing = sorted(set(range(count)) - set(numbers))
  if missing or len(numbers) != count or len({s['count'] for s in found}) > 1:
    raise UserError(
      f'records: {folder}: split {split!r} has {len(numbers)} files, where '
      f'{found[0][0]} says {count}'
      + (f'; missing: {missing[:10]}' if missing else '')
      + ". Complete them, or name the files to read by a pattern: 'records:DIR/*'."
    )


def _open_files(split: str, paths: list[str]) -> list[tuple]:
  """Returns (Records, number there) of each path; one index in each directory."""
  out: dict[str, tuple] = {}
  for directory in sorted({os.path.dirname(path) for path in paths}):
    here = [path for path in paths if os.path.dirname(path) == directory]
    names = [os.path.basename(path) for path in here]
    array = [re.search('array_?record', name) is not None for name in names]
    if any(array) != all(array):
      raise UserError(
        f'records: {directory}: split {split!r} is partly ArrayRecord, partly not: '
        f'{names[0]} ... {names[-1]}. Name the files to read by a pattern.'
      )
    # A pattern may take other files of the same split: each set has its own index.
    index_name = f'{split}.{fingerprint(names)[:8]}{_INDEX}'
    records = (ArrayRecords if all(array) else Records)(here, index_name=index_name)
    out |= {path: (records, i) for i, path in enumerate(here)}
  return [out[path] for path in paths]
