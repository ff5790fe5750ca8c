"""The user's own sharded record files: tf.train.Example in ArrayRecord or TFRecord."""

import contextlib
import functools
import glob
import os
import re
from collections.abc import Collection
from typing import Annotated

import numpy as np

from vit_jax import files
from vit_jax.check import INT32, Count, Range
from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import record_files
from vit_jax.data.sources.shards import Shards
from vit_jax.errors import UserError, did_you_mean

# 'train-00000-of-01024', 'train-00000-of-01024.tfrecord', and TFDS's
# 'imagenet2012-train.tfrecord-00000-of-01024'.
_SHARD = re.compile(r'(?P<stem>.+)-(?P<shard>\d{5,})-of-(?P<count>\d{5,})(?:\.\w+)*')
_TFDS_STEM = re.compile(r'(?:.*-)?([^-]+)\.(?:tfrecord|array_record|arrayrecord)s?')
_EXTENSIONS = ('.tfrecord', '.tfrecords', '.tfrec', '.array_record', '.arrayrecord')

# Number of records that are searched for the keys before a run. A key that none of them has
# is treated as a typing error.
_FIRST = 64


class RecordFiles(Shards):
  """`records:FOLDER` or `records:PATTERN`: encoded images with one or several labels.

  Files are shards named `<split>-00000-of-00064`, with or without an extension, or as TFDS
  names them. A folder must hold all shards of a split. A pattern ('/data/*.array_record')
  takes the shards that match; if any of these files has another kind of name, all of them
  are one split, 'train'. Split expressions are those of TFDS: 'train[:1%]+val'.

  ArrayRecord files, which have 'array_record' in their names, may be in a bucket,
  `records:gs://BUCKET/FOLDER`. Other files are uncompressed TFRecord, see `record_files`.

  A record that cannot be parsed, has no image, or has no label where one is needed counts
  as a bad image: it is masked, listed and counted.

  Options:
    image_key: feature with the encoded image.
    label_key: feature with its labels, integers.
    weight_key: feature with one float per label, the values of multi-hot targets. If a
      record lacks it, its labels have the value 1. If a label occurs twice, the last one
      counts.
    multi_label: whether targets are multi-hot; a record may then have no label. None: True
      if there is a `weight_key`, or if one of the first records has not exactly one label.
    label_offset: a number to add to labels: -1 if classes are counted from 1.
    stream: in training read shards from front to back, instead of records at random. For
      disks and mounts that are slow to seek, see `stream`.
    shuffle_buffer: number of records held in memory to shuffle a stream; None: 50,000.
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
    stream: bool = False,
    shuffle_buffer: Count | None = None,
  ):
    self.name = f'records:{target}'
    self._keys = dict(image_key=image_key, label_key=label_key, weight_key=weight_key)
    self._offset = label_offset
    self._set_stream(stream, shuffle_buffer)
    if weight_key and multi_label is False:
      raise UserError(f'{self.name}: weight_key={weight_key!r} needs multi_label=True.')
    pieces = self._select(find_files(target), split, record_files.count)
    self.pieces = record_files.Records(pieces)
    first = self._first()
    if multi_label is None:
      labels = [len(x[label_key]) for x in first if label_key in x]
      multi_label = bool(weight_key) or any(n != 1 for n in labels)
    self.features = {'image': ImageFeature(), 'label': LabelFeature(multi_label)}

  def records(self, indices: np.ndarray) -> list[bytes | Exception]:
    """Returns the unparsed records of examples."""
    return self.pieces.read(indices)

  def example(self, record: bytes | Exception, index: int) -> dict:
    """Converts a record to an example, see `read`."""
    if isinstance(record, Exception):
      return {'error': f'cannot be read: {record}'}
    try:
      image, labels, weights = self._parse(record)
    except ValueError as error:
      return {'error': str(error)}
    if self.features['label'].several:
      weight = {} if weights is None else {'weight': weights}
      return {'image': image, 'label': labels, **weight}
    if len(labels) > 1:
      raise UserError(
        f'{self.name_of(index)} has {len(labels)} labels, where one is expected: set '
        "data.source_options={'multi_label': True}."
      )
    if not len(labels):
      return {'error': f'{self._keys["label_key"]} holds no label'}
    return {'image': image, 'label': int(labels[0])}

  def _parse(self, record: bytes) -> tuple[bytes, np.ndarray, np.ndarray | None]:
    """Returns (encoded image, labels int64 [n], weights of the labels float32 [n] or None)."""
    image_key, label_key, weight_key = self._keys.values()
    features = parse(record, {image_key, label_key, weight_key})
    image, labels = features.get(image_key, []), features.get(label_key, [])
    if len(image) != 1 or not isinstance(image[0], bytes):
      raise ValueError(f'{image_key} holds no image')
    if len(labels) and getattr(labels, 'dtype', None) != np.int64:
      raise ValueError(f'{label_key} holds no integers')
    labels = np.asarray(labels, np.int64) + self._offset
    if not len(weights := features.get(weight_key, [])):
      return image[0], labels, None
    if getattr(weights, 'dtype', None) != np.float32:
      raise ValueError(f'{weight_key} holds no floats')
    if len(weights) != len(labels) or not np.all(np.isfinite(weights)):
      raise ValueError(f'{len(labels)} labels with weights {weights.tolist()}')
    return image[0], labels, weights

  def _first(self) -> list[dict]:
    """Returns the features of the first records; raises UserError if a key is in none of them."""
    first: list[dict] = []
    keys = {key for key in self._keys.values() if key}
    for index in range(min(_FIRST, len(self))):
      (record,) = self.records([index])
      # Skip bad records.
      with contextlib.suppress(TypeError, ValueError):
        first.append(parse(record))
        if keys <= first[-1].keys():
          break
    if not first:
      raise UserError(f'{self.name}: none of the first records is a tf.train.Example.')
    features = sorted({name for x in first for name in x})
    for option, key in self._keys.items():
      if key and key not in features:
        raise UserError(
          f'{self.name}: records have no feature {key!r}: they have {features}. '
          f'Set data.source_options={{{option!r}: ...}}.{did_you_mean(key, features)}'
        )
    return first


@functools.cache
def _example():
  # TFDS contains the compiled protobuf class, which works without TensorFlow.
  from tensorflow_datasets.proto import tf_example_pb2

  return tf_example_pb2.Example


def parse(record: bytes, keys: Collection[str | None] | None = None) -> dict:
  """Parses a serialised tf.train.Example.

  Args:
    keys: the features to return, if the record has them; None: all.

  Returns:
    {name: values}. The values are a list of bytes, float32 [n] or int64 [n]; a feature
    without a value is an empty list.
  """
  from google.protobuf.message import DecodeError

  try:
    features = _example().FromString(record).features.feature
    names = list(features) if keys is None else [k for k in keys if k and k in features]
    return {name: _values(features[name]) for name in names}
  except (DecodeError, UnicodeDecodeError) as error:
    raise ValueError(f'broken record: no tf.train.Example: {error}') from None


def _values(feature) -> list[bytes] | np.ndarray:
  kind = feature.WhichOneof('kind')
  if kind is None:
    return []
  values = getattr(feature, kind).value
  dtype = {'float_list': np.float32, 'int64_list': np.int64}.get(kind)
  return list(values) if dtype is None else np.array(values, dtype)


def find_files(target: str) -> dict[str, list[str]]:
  """Finds the files of a folder or a pattern: {split: paths in the order of shards}."""
  target = str(files.path(target))
  with files.outages(target):
    whole = files.path(target).is_dir()
  paths = _matching(target, whole)
  numbered = {path: _SHARD.fullmatch(os.path.basename(path)) for path in paths}
  if whole:
    # A folder may hold other files too.
    named = [path for path in paths if numbered[path]]
    paths = named or [path for path in paths if path.endswith(_EXTENSIONS)]
  if not paths:
    raise UserError(
      f'records: found no record files {"in" if whole else "like"} {target}. Expected '
      "files named '<split>-00000-of-00064.array_record' (or .tfrecord), and so on."
    )
  if not all(numbered[path] for path in paths):
    out = {'train': sorted(paths)}
  else:
    out = {}
    for path in sorted(paths, key=lambda p: (int(numbered[p]['shard']), p)):
      stem = numbered[path]['stem']
      tfds = _TFDS_STEM.fullmatch(stem)
      out.setdefault(tfds[1] if tfds else stem, []).append(path)
  for split, shards in out.items():
    if whole and numbered[shards[0]]:
      _check_complete(target, split, [numbered[path] for path in shards])
    if len({*map(record_files.is_array_record, shards)}) > 1:
      raise UserError(
        f'records: {target}: split {split!r} is partly ArrayRecord: name the files to read '
        'by a pattern.'
      )
  return out


def _matching(target: str, whole: bool) -> list[str]:
  """Returns the files in a folder, or those that match a pattern."""
  if files.is_url(target):
    with files.outages(target):
      pattern = f'{target}/*' if whole else target
      objects = files.filesystem().glob(pattern, detail=True)
    paths = [files.SCHEME + name for name, x in objects.items() if x['type'] == 'file']
  else:
    pattern = os.path.join(glob.escape(target), '*') if whole else target
    paths = [
      os.path.abspath(path) for path in glob.glob(pattern) if os.path.isfile(path)
    ]
  # TFDS writes metadata and class names beside its files.
  return [path for path in paths if not path.endswith(('.npz', '.json', '.txt'))]


def _check_complete(folder: str, split: str, shards: list[re.Match]) -> None:
  count = int(shards[0]['count'])
  missing = sorted(set(range(count)) - {int(shard['shard']) for shard in shards})
  if missing or len(shards) != count:
    raise UserError(
      f'records: {folder}: split {split!r} has {len(shards)} files, but '
      f'{shards[0][0]} says {count} (missing: {missing[:10]}): complete them, or name the '
      "files to read by a pattern: 'records:DIR/*'."
    )
