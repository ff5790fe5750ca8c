"""Sources in files of many examples: their splits, and how training reads them.

`Shards` is the base of sources whose files are read at random, or from front to back.
`Encoded` adds images with captions and labels: tars of WebDataset and Parquet.
"""

import abc
import glob
import itertools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax import files
from vit_jax.check import Count
from vit_jax.data.features import ImageFeature, LabelFeature, MultiHot, TextFeature
from vit_jax.data.sources import splits
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.data.sources.record_files import Piece, Pieces
from vit_jax.data.sources.stream import Stream
from vit_jax.errors import UserError

# Default of `shuffle_buffer`.
_BUFFER = 50_000
# '{000..009}' in a pattern.
_RANGE = re.compile(r'\{(\d+)\.\.(\d+)\}')


class Shards(Source):
  """Base class of sources in files of many examples.

  A subclass calls `_set_stream` and `_select`, and sets `pieces`.
  """

  pieces: Pieces
  _buffer: int | None = None

  def _set_stream(self, stream: bool, shuffle_buffer: int | None) -> None:
    if shuffle_buffer is not None and not stream:
      raise UserError(
        f"{self.name}: shuffle_buffer={shuffle_buffer!r} needs 'stream': True."
      )
    self._buffer = (shuffle_buffer or _BUFFER) if stream else None

  def _select(self, paths_of: dict, split: str, count: Callable) -> list[Piece]:
    """Selects pieces of the files by a split expression, and sets the fingerprint.

    Args:
      paths_of: {split: paths}.
      count: a function of paths that returns their numbers of examples.
    """
    parts = splits.parse(split)
    for name, *_ in parts:
      splits.check_name(name, paths_of, self.name)
    counts = {name: count(paths_of[name]) for name, *_ in parts}
    sizes = {name: sum(counts[name]) for name in counts}
    pieces = []
    for name, low, high in splits.ranges(split, sizes, self.name):
      ends = itertools.accumulate(counts[name])
      for path, number, end in zip(paths_of[name], counts[name], ends, strict=True):
        skip, stop = max(low - (end - number), 0), min(high - (end - number), number)
        if skip < stop:
          pieces.append(Piece(path, skip, stop - skip, number))
    self.fingerprint = fingerprint(
      (os.path.basename(path), _size(path), skip, take)
      for path, skip, take, _ in pieces
    )
    return pieces

  def __len__(self) -> int:
    return len(self.pieces)

  def name_of(self, index: int) -> str:
    """Returns 'FILE#NUMBER', where examples are counted from 0."""
    path, number = self.pieces.place(int(index))
    return f'{path}#{number}'

  def read(self, indices: np.ndarray) -> list[dict]:
    records = self.records(indices)
    return [self.example(record, i) for record, i in zip(records, indices, strict=True)]

  @abc.abstractmethod
  def records(self, indices: np.ndarray) -> list:
    """Reads the records of examples."""

  @abc.abstractmethod
  def example(self, record: Any, index: int) -> dict:
    """Converts a record to an example, see `read`."""

  def plan_training(self, seed: int, batch_size: int, host: int, hosts: int) -> tuple:
    if self._buffer is None:
      return super().plan_training(seed, batch_size, host, hosts)
    stream = Stream(self, self._buffer, seed, batch_size, host, hosts)
    return stream, stream

  def plan_evaluation(self) -> tuple:
    if self._buffer is not None:
      raise UserError(
        f"{self.name}: leave 'stream' out of the source_options of an evaluation."
      )
    return super().plan_evaluation()


class Encoded(Shards):
  """Encoded images in files, with captions, and with labels where there are any.

  A record is {'image': bytes, 'text': captions, 'label': int or list}, where any may be None,
  or {'error': reason}. Labels count if every example has one, or a list of them.
  """

  SCHEME: str
  EXTENSION: str

  def __init__(
    self,
    target: str,
    split: str,
    *,
    stream: bool = False,
    shuffle_buffer: Count | None = None,
  ):
    self.name = f'{self.SCHEME}:{target}'
    self._set_stream(stream, shuffle_buffer)
    paths_of = find_files(self.name, target, (self.EXTENSION,))
    count = lambda paths: [self._count(path) for path in paths]
    split = splits.with_canonical_names(split)
    self.pieces = Pieces(self._select(paths_of, split, count))
    self.features = {'image': ImageFeature()}
    first = self.records(np.arange(min(len(self), 8)))
    if any('text' in self.example(record, 0) for record in first):
      self.features['text'] = TextFeature()
    labels = [label for piece in self.pieces.parts for label in self._labels(piece)]
    if lacks := labels.count(None):
      self.remarks = f'{lacks:,} without a label' if lacks < len(labels) else ''
    elif isinstance(labels[0], list):
      self.features['label'] = LabelFeature(several=True)
      self.num_classes = max(itertools.chain(*labels), default=0) + 1
      self.multi_hot = MultiHot(self.num_classes)(labels, [None] * len(labels))
    else:
      self.features['label'] = LabelFeature()
      self.labels = np.array(labels, np.int64)
      self.num_classes = int(self.labels.max()) + 1

  @abc.abstractmethod
  def _labels(self, piece: Piece) -> list:
    """Returns the labels of a piece, None where there is none."""

  @abc.abstractmethod
  def _count(self, path: str) -> int:
    """Returns the number of examples in a file."""

  @abc.abstractmethod
  def _read_rows(self, path: str, rows: list[int]) -> list[dict]:
    """Reads the records with these numbers, in ascending order, from a file."""

  def records(self, indices: np.ndarray) -> list[dict]:
    out: list = [None] * len(indices)
    places = sorted((*self.pieces.place(index), i) for i, index in enumerate(indices))
    for path, group in itertools.groupby(places, key=lambda place: place[0]):
      _, rows, at = zip(*group, strict=True)
      records = self._read_rows(path, list(rows))
      for i, record in zip(at, records, strict=True):
        out[i] = record
    return out

  def example(self, record: dict, index: int) -> dict:
    if 'error' in record:
      return record
    if record['image'] is None:
      return {'error': 'has no image'}
    texts = record['text'] or ()
    texts = [texts] if isinstance(texts, str) else texts
    try:
      texts = [text for text in texts if text and text.strip()]
    except (TypeError, AttributeError):
      return {'error': f'its captions are no texts: {texts}'}
    record = record | {'text': texts or None}
    return {key: x for key, x in record.items() if x is not None}


def _size(path: str) -> int:
  with files.outages(path):
    status = files.path(path).stat()
  return status.length if files.is_url(path) else status.st_size


def find_files(
  source: str, target: str, extensions: Sequence[str]
) -> dict[str, list[str]]:
  """Finds files by their extensions: {split: sorted paths}.

  Args:
    source: the name of the source for messages.
    target: a file, a folder, of which all files below are taken, or a pattern such as
      'data/train-{000..127}.tar' or 'data/*.tar'. A file belongs to the split whose name its
      own name, or its folder's, begins with: 'val-003.tar', 'test/00001.tar'; all others
      to 'train'.
  """
  path = os.path.abspath(os.path.expanduser(target))
  root = path if os.path.isdir(path) else os.path.dirname(path)
  if os.path.isfile(path):
    patterns = [glob.escape(path)]
  elif path == root:
    below = os.path.join(glob.escape(path), '**')
    patterns = [os.path.join(below, f'*{x}') for x in extensions]
  else:
    patterns = _expand(path)
  paths = sorted({p for x in patterns for p in glob.glob(x, recursive=True)})
  if not paths:
    raise UserError(f'{source}: found no {" or ".join(extensions)} file: {path}.')
  out: dict[str, list[str]] = {}
  for path in paths:
    *_, folder, name = ['', *os.path.relpath(path, root).split(os.sep)]
    words = [re.split(r'[-_.]', x)[0] for x in (name, folder)]
    known = [x for x in map(splits.canonical, words) if x in splits.SYNONYMS]
    out.setdefault(known[0] if known else 'train', []).append(path)
  return out


def _expand(pattern: str) -> list[str]:
  """Expands '{000..127}'."""
  if not (match := _RANGE.search(pattern)):
    return [pattern]
  first, last = match.groups()
  return [
    pattern[: match.start()] + f'{i:0{len(first)}}' + rest
    for i in range(int(first), int(last) + 1)
    for rest in _expand(pattern[match.end() :])
  ]
