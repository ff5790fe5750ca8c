"""Reads prepared TFDS data sets at random, without TensorFlow.

A data set is found by its directory alone. No code of a data set runs, nothing is
downloaded, and any folder that TFDS wrote can be read, even if TFDS does not know its name.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from vit_jax import files
from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import record_files, splits
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.errors import DataError, RunError, did_you_mean, one_line
from vit_jax.registry import Registry

INFO = 'dataset_info.json'
# Kind of examples -> class of the source, for kinds other than images with labels.
KINDS = Registry('source of TFDS', {})

_NAME = re.compile(r'(?P<name>[\w-]+)(/(?P<config>[^:/]+))?(:(?P<version>[\d.]+))?')


class Prepared:
  """A data set that TFDS prepared.

  Attributes:
    features: {name: TFDS's feature} of an example.
    images: names of the features that are images.
    skip: the `decoders` of TFDS that leave all images encoded. Masks are images too, and
      would take as long to decode as the photograph.
    sizes: {split: number of examples}.
  """

  def __init__(
    self, target: str, data_dir: str | None, accepted: tuple[str, str] | None = None
  ):
    """Opens the newest version of a data set.

    Args:
      target, data_dir: see `build`.
      accepted: ('3.2', '4') accepts versions from 3.2 on and below 4. None: all versions.
    """
    import tensorflow_datasets as tfds

    self._target = target
    self._directory = _locate(target, data_dir, accepted)
    with _describing(self._directory):
      self._info = info = tfds.builder_from_directory(self._directory).info
      self.features = info.features
      is_image = lambda feature: isinstance(feature, tfds.features.Image)
      self.images = [k for k, f in self.features.items() if is_image(f)]
      self.skip = dict.fromkeys(self.images, tfds.decode.SkipDecoding())
      self.sizes = {name: info.splits[name].num_examples for name in info.splits}
      for file in files.path(self._directory).glob('*.labels.txt'):
        # If the file is empty, TFDS would use numbers as class names.
        if not file.read_text(encoding='utf-8').strip():
          raise ValueError(f'{file.name} is empty')

  def pieces(self, ranges: Iterable[tuple[str, int, int]]) -> tuple[str, Sequence]:
    """Returns (TFDS's split expression, pieces of files) for some ranges.

    Args:
      ranges: (split, first, end) for each range.
    """
    if (kind := self._info.file_format.value) not in ('array_record', 'tfrecord'):
      raise ValueError(
        f'tfds:{self._target}: files are {kind}; array_record and tfrecord can be read. '
        f'Prepare it with: {_command(self._target, self._directory)}'
      )
    split = '+'.join(
      f'{name}[{low}:{high}]' for name, low, high in ranges if low < high
    )
    with _describing(self._directory):
      return split, self._info.splits[split].file_instructions


def build(
  target: str,
  split: str,
  *,
  data_dir: str | None = None,
  image_key: str = 'image',
  label_key: str | None = None,
  objects_key: str | None = None,
) -> Source:
  """Opens `tfds:NAME[/CONFIG][:VERSION]`, or `tfds:DIRECTORY` of one prepared version.

  Files are ArrayRecord or TFRecord, see `record_files`.

  Args:
    data_dir: the folder of prepared data sets, which may be in a bucket, gs://. None: the
      value of TFDS_DATA_DIR, or ~/tensorflow_datasets if that is not set.
    image_key: the feature with the image.
    label_key: the feature with the class or classes of an image; None: 'label' or 'labels'.
    objects_key: the feature with objects and their boxes, for detection ('objects' of voc).
      By default the first such feature if the images have no label, as in coco/2017.
  """
  name, prepared = f'tfds:{target}', Prepared(target, data_dir)
  images = prepared.images
  if image_key not in images:
    raise ValueError(
      f'{name} has no image feature {image_key!r}: it has '
      f'{images or list(prepared.features)}.{did_you_mean(image_key, images)}'
    )
  if label_key is not None and objects_key is not None:
    raise ValueError(
      f'{name}: set label_key={label_key!r} or objects_key={objects_key!r}, not both'
    )
  has_label = label_key or {'label', 'labels'} & set(prepared.features)
  if objects_key is None and not has_label and 'objects' in KINDS:
    objects_key = KINDS['objects'].find_key(prepared.features)
  if objects_key is None:
    return Tfds(name, split, prepared, image_key, label_key)
  return KINDS['objects'](name, split, prepared, image_key, objects_key)


class Images(Source):
  """The encoded images of a TFDS data set. A subclass has `_one`, which makes an example."""

  def __init__(
    self, name: str, split: str, prepared: Prepared, image_key: str, ranges=None
  ):
    """Opens the files of a split.

    Args:
      ranges: (split of TFDS, first, end) of each part; None: the ranges of `split`.

    Raises:
      DataError: if a file holds other records than the description of the data set says.
    """
    ranges = ranges or splits.ranges(split, prepared.sizes, name)
    self.name, self._image_key = name, image_key
    self._split, pieces = prepared.pieces(ranges)
    record_files.check_counts(pieces, INFO)
    named = sorted((os.path.basename(i.filename), i.take) for i in pieces)
    self.fingerprint = fingerprint([self._split, *named])
    self._prepared, self._records = prepared, record_files.Records(pieces)

  def __len__(self) -> int:
    return len(self._records)

  def examples(self, indices: np.ndarray) -> list[dict | Exception]:
    """Returns examples with all features; in place of a broken one, its exception."""
    return [*map(self._decode, self._records.read(indices))]

  def _decode(self, record: bytes | Exception) -> dict | Exception:
    if isinstance(record, Exception):
      return record
    try:
      features, skip = self._prepared.features, self._prepared.skip
      return features.deserialize_example_np(record, decoders=skip)
    except Exception as error:
      # protobuf and TFDS raise error types of their own
      return ValueError(f'broken record: {error}')

  def read(self, indices: np.ndarray) -> list[dict]:
    return [
      {'error': str(example)} if isinstance(example, Exception) else self._one(example)
      for example in self.examples(indices)
    ]

  def name_of(self, index: int) -> str:
    return f'{self.name} {self._split} #{index}'


class Tfds(Images):
  """A TFDS data set whose images have one label or several."""

  def __init__(self, name: str, split: str, prepared: Prepared, image_key, label_key):
    super().__init__(name, split, prepared, image_key)
    features = prepared.features
    keys = (label_key,) if label_key else ('label', 'labels')
    self._label_key = next((key for key in keys if key in features), None)
    if self._label_key is None:
      raise ValueError(
        f'{name} has no feature {" or ".join(map(repr, keys))}: set label_key to one of '
        f'{sorted(features)}'
      )
    label = features[self._label_key]
    if not np.issubdtype(label.np_dtype, np.integer) or len(label.shape) > 1:
      raise ValueError(f'{name}: {self._label_key} is not a class label: {label}')
    several = LabelFeature(several=len(label.shape) == 1)
    self.features = {'image': ImageFeature(), 'label': several}
    self.num_classes, self.class_names = classes(getattr(label, 'feature', label))

  def _one(self, example: dict) -> dict:
    return {'image': example[self._image_key], 'label': example[self._label_key]}


def classes(label) -> tuple[int | None, list[str] | None]:
  """Returns (K or None, class names or None) of a TFDS feature."""
  names = list(getattr(label, 'names', None) or []) or None
  return getattr(label, 'num_classes', None), names


@contextlib.contextmanager
def _describing(directory: str) -> Iterator[None]:
  """Turns errors of a damaged description into one line that names the directory."""
  try:
    with files.outages(directory):
      yield
  except RunError:
    raise
  except Exception as error:
    # TFDS, protobuf and json raise error types of their own
    raise DataError(
      f'{directory}: {INFO}, features.json or names of classes are damaged '
      f'({one_line(error)}): copy or prepare the data set again.'
    ) from None


# --- directories -----------------------------------------------------------------------


def data_directory(data_dir: str | None) -> str:
  """Returns the folder of prepared data sets: the user's choice or TFDS's default."""
  data_dir = data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
  path = files.path(data_dir)
  return str(path if files.is_url(path) else path.absolute())


def _locate(target: str, data_dir: str | None, accepted: tuple[str, str] | None) -> str:
  """Finds the directory of the newest version, see `Prepared`."""
  there = files.is_url(target) or os.path.exists(os.path.expanduser(target))
  if there and _is_prepared(path := str(files.path(target))):
    return path
  match = _NAME.fullmatch(target)
  if not match:
    raise ValueError(
      f'tfds: {target!r} is not NAME, NAME/CONFIG or NAME/CONFIG:VERSION'
    )
  name, config, version = match.group('name', 'config', 'version')
  data_dir = data_directory(data_dir)
  home = os.path.join(data_dir, *filter(None, (name, config)))
  versions = _versions(home)
  if not versions and not config:
    configs = [x for x in _names(home) if _versions(os.path.join(home, x))]
    if len(configs) > 1:
      names = [f'tfds:{name}/{config}' for config in configs]
      raise ValueError(f'tfds: {name} is prepared with several configs: {names}')
    if configs:
      home = os.path.join(home, *configs)
      versions = _versions(home)
  if not versions or (version and version not in versions):
    raise _missing(target, name, data_dir, home, versions, version)
  if accepted:
    low, high = map(_number, accepted)
    fit = [v for v in versions if low <= _number(v) < high]
    if not fit:
      raise DataError(
        f'tfds:{target} is prepared as version {" and ".join(versions)}: expected at '
        f'least {accepted[0]} and below {accepted[1]}: {_command(target, data_dir)}'
      )
    versions = fit
  return os.path.join(home, version or max(versions, key=_number))


def _number(version: str) -> list[int]:
  return [*map(int, version.split('.'))]


def _versions(directory: str) -> list[str]:
  numbers = [x for x in _names(directory) if re.fullmatch(r'\d+(\.\d+)*', x)]
  return [x for x in numbers if _is_prepared(f'{directory}/{x}')]


def _is_prepared(directory: str) -> bool:
  with files.outages(directory):
    return (files.path(directory) / INFO).exists()


def _names(directory: str) -> list[str]:
  """Returns the sorted names in a directory; [] if it does not exist."""
  with files.outages(directory):
    path = files.path(directory)
    return sorted(x.name for x in path.iterdir()) if path.is_dir() else []


def _missing(target, name, data_dir, home, versions, version) -> DataError:
  """Returns the error for a data set that is not prepared."""
  import tensorflow_datasets as tfds

  where = os.path.join(home, version or '<version>')
  message = f'tfds:{target} is not prepared: there is no {where}/{INFO}.'
  if versions:
    message += f' Prepared versions: {versions}.'
  names = tfds.list_builders(with_community_datasets=False)
  if name in names:
    return DataError(f'{message} Prepare it with: {_command(target, data_dir)}')
  # TFDS knows a thousand names, so suggest only a name that is very similar.
  near = did_you_mean(name, [*names, *_names(data_dir)], alike=0.8)
  return DataError(
    f'{message} TFDS has no data set of that name: make it with vit_jax prepare, set '
    f"TFDS_DATA_DIR or data.source_options={{'data_dir': ...}}, or use 'folder:PATH'.{near}"
  )


def _command(target: str, data_dir: str) -> str:
  return f'tfds build {target} --data_dir={data_dir} --file_format=array_record'
