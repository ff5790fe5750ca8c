"""Prepared TFDS data sets, read at random and without TensorFlow.

Found by their directory alone: no data set code runs, nothing is downloaded, and any
folder that TFDS wrote can be read, whether or not TFDS knows its name.
"""

import functools
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import record_files, splits, tfds_directory
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.errors import UserError, did_you_mean


class Prepared:
  """A data set that TFDS prepared, found by its name or directory.

  Attributes:
    features: {name: TFDS's feature} of an example.
    sizes: {split: number of examples}.
  """

  def __init__(
    self, target: str, data_dir: str | None, accepted: tuple[str, str] | None = None
  ):
    """Finds it.

    Args:
      target: 'NAME[/CONFIG][:VERSION]', or the directory of one version.
      data_dir: where data sets are, see `Tfds`.
      accepted: from, and to below, which version; ('3.2', '4') for those from 3.2 on
        that are not yet 4. None: any.

    Raises:
      UserError: if it is not there: what is missing, and how to prepare it.
    """
    self._tfds = tfds_directory.import_tfds()
    self._target = target
    self._directory = tfds_directory.locate(target, data_dir, accepted)
    self._builder = self._tfds.builder_from_directory(self._directory)
    info = self._builder.info
    self.features = info.features
    self.sizes = {name: info.splits[name].num_examples for name in info.splits}

  def images(self) -> list[str]:
    """Returns the names of the features that are images."""
    kind = self._tfds.features.Image
    return [k for k, f in self.features.items() if isinstance(f, kind)]

  def open(self, ranges: Iterable[tuple[str, int, int]]) -> 'Examples':
    """Returns the examples of (split, first, end), one range after another."""
    split = '+'.join(
      f'{name}[{low}:{high}]' for name, low, high in ranges if low < high
    )
    # All images stay encoded: a mask is as costly to decode as the image itself.
    decoders = {name: self._tfds.decode.SkipDecoding() for name in self.images()}
    info, formats = self._builder.info, self._tfds.core.FileFormat
    if info.file_format not in (formats.ARRAY_RECORD, formats.TFRECORD):
      raise UserError(
        f'tfds:{self._target}: files are {info.file_format.value}; array_record and '
        f'tfrecord can be read. Prepare it with: '
        f'{tfds_directory.command(self._target, self._directory)}'
      )
    pieces = info.splits[split].file_instructions
    self._check_sizes(info, split)
    named = sorted((os.path.basename(i.filename), i.take) for i in pieces)
    records = record_files.Records(pieces)
    read = functools.partial(_read, records, info.features, decoders)
    return Examples(split, len(records), read, fingerprint([split, *named]))

  def _check_sizes(self, info, split: str) -> None:
    """Raises UserError for TFRecord files of other lengths than TFDS wrote down."""
    for name in sorted({part.split('[')[0] for part in split.split('+')}):
      paths = [str(path) for path in info.splits[name].filepaths]
      if record_files.is_array_record(paths[0]):
        continue
      counts, lengths = record_files.count(paths), list(info.splits[name].shard_lengths)
      if counts != lengths:
        raise UserError(
          f'{os.path.dirname(paths[0])}: split {name} has {sum(counts)} records in its '
          f'files, but {sum(lengths)} in {tfds_directory.INFO}. Prepare the data set again.'
        )


def _read(records, features, decoders, indices: np.ndarray) -> list[dict | Exception]:
  return [_decoded(record, features, decoders) for record in records.read(indices)]


def _decoded(record: bytes | Exception, features, decoders) -> dict | Exception:
  if isinstance(record, Exception):
    return record
  try:
    return features.deserialize_example_np(record, decoders=decoders)
  except Exception as error:  # protobuf's and TFDS's own types
    return ValueError(f'broken record: {error}')


class Examples(NamedTuple):
  """Examples of a `Prepared` data set.

  Attributes:
    split: TFDS's expression for them.
    size: N.
    read: indices int [n] -> n examples, dicts of all features with images still encoded;
      an exception in the place of a broken one.
    fingerprint: as that of a `Source`.
  """

  split: str
  size: int
  read: Callable[[np.ndarray], list[dict | Exception]]
  fingerprint: str


def build(
  target: str,
  split: str,
  *,
  data_dir: str | None = None,
  image_key: str = 'image',
  label_key: str | None = None,
  objects_key: str | None = None,
) -> Source:
  """`tfds:NAME[/CONFIG][:VERSION]`, or `tfds:DIRECTORY` of one prepared version.

  Files are ArrayRecord or TFRecord, see `record_files`.

  Args:
    data_dir: else TFDS_DATA_DIR, else ~/tensorflow_datasets; may be in a bucket, gs://.
    image_key: of several images, which.
    label_key: the class or classes of an image, else 'label' or 'labels'.
    objects_key: objects with boxes (of voc, 'objects'), for detection; else the first
      there is, if the images have no label (as those of coco/2017).
  """
  from vit_jax.detection.data import tfds_objects

  name, prepared = f'tfds:{target}', Prepared(target, data_dir)
  if label_key is not None and objects_key is not None:
    raise UserError(
      f'{name}: label_key={label_key!r} and objects_key={objects_key!r} exclude one '
      'another.'
    )
  if label_key is None and not {'label', 'labels'} & set(prepared.features):
    objects_key = objects_key or tfds_objects.key_of(prepared.features)
  if objects_key is None:
    return Tfds(name, split, prepared, image_key, label_key)
  image = _image_key(name, prepared, image_key)
  examples = prepared.open(splits.ranges(split, prepared.sizes, name))
  return tfds_objects.TfdsObjects(name, prepared.features, examples, image, objects_key)


class Tfds(Source):
  """A data set of TFDS whose images have a label, or several."""

  def __init__(
    self,
    name: str,
    split: str,
    prepared: Prepared,
    image_key: str,
    label_key: str | None,
  ):
    self.name = name
    self._keys = (
      _image_key(name, prepared, image_key),
      self._label_key(prepared.features, label_key),
    )
    label = prepared.features[self._keys[1]]
    self.features = {
      'image': ImageFeature(),
      'label': LabelFeature(several=len(label.shape) == 1),
    }
    self.num_classes, self.class_names = classes(getattr(label, 'feature', label))
    self._examples = prepared.open(splits.ranges(split, prepared.sizes, self.name))
    self.fingerprint = self._examples.fingerprint

  def __len__(self) -> int:
    return self._examples.size

  def read(self, indices: np.ndarray) -> list[dict]:
    image_key, label_key = self._keys
    return [
      {'error': str(example)}
      if isinstance(example, Exception)
      else {'image': example[image_key], 'label': example[label_key]}
      for example in self._examples.read(indices)
    ]

  def name_of(self, index: int) -> str:
    return f'{self.name} {self._examples.split} #{index}'

  def _label_key(self, features, key):
    wanted = (key,) if key else ('label', 'labels')
    for name in wanted:
      if name in features:
        if (
          not np.issubdtype(features[name].np_dtype, np.integer)
          or len(features[name].shape) > 1
        ):
          raise UserError(
            f'{self.name}: {name} is not a class label: {features[name]}.'
          )
        return name
    raise UserError(
      f'{self.name} has no feature {" or ".join(map(repr, wanted))}: it has '
      f"{sorted(features)}. Set data.source_options={{'label_key': ...}}."
    )


def _image_key(name: str, prepared: Prepared, key: str) -> str:
  images = prepared.images()
  if key not in images:
    raise UserError(
      f'{name} has no image feature {key!r}: it has '
      f'{images or list(prepared.features)}. '
      f"Set data.source_options={{'image_key': ...}}.{did_you_mean(key, images)}"
    )
  return key


def classes(label) -> tuple[int | None, list[str] | None]:
  """Returns (K, names) of a feature of TFDS, None where it does not say."""
  names = list(getattr(label, 'names', None) or []) or None
  return getattr(label, 'num_classes', None), names
