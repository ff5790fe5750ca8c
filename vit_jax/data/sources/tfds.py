"""Prepared TFDS data sets, read at random and without TensorFlow.

Found by their directory alone: no data set code runs, nothing is downloaded, and any
folder that TFDS wrote can be read, whether or not TFDS knows its name.
"""

import concurrent.futures
import os
import re

import numpy as np

from vit_jax import buckets
from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import shards, splits
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.data.sources.record_files import Records
from vit_jax.errors import DataError, NotAllowed, Unreachable, UserError, did_you_mean

_NAME = re.compile(r'(?P<name>[\w-]+)(/(?P<config>[^:/]+))?(:(?P<version>[\d.]+))?')
_INFO = 'dataset_info.json'

# How alike a suggested name must be: TFDS knows a thousand, and one of them is always a
# little like any word.
_ALIKE = 0.8

# Data sets that TFDS cannot fetch itself, and what to put where.
_MANUAL = {
  'imagenet2012': 'ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar '
  '(from image-net.org, after registration)',
}


class Unknown(DataError):
  """No data set of that name is prepared, and TFDS does not know the name.

  Attributes:
    brief: a shorter message, for a name that may not be meant for a data set.
  """

  def __init__(self, message: str, brief: str):
    super().__init__(message)
    self.brief = brief


class Tfds(Source):
  """`tfds:NAME[/CONFIG][:VERSION]`, or `tfds:DIRECTORY` of one prepared version.

  ArrayRecord files are read directly; for TFRecord files the offsets of all records are
  found once and kept beside them. Options: `data_dir` (else TFDS_DATA_DIR, else
  ~/tensorflow_datasets; may be in a bucket, gs://), `image_key`, `label_key` (else 'label'
  or 'labels').
  """

  def __init__(
    self,
    target: str,
    split: str,
    *,
    data_dir: str | None = None,
    image_key: str = 'image',
    label_key: str | None = None,
  ):
    tfds = _import_tfds()
    directory = _locate(target, data_dir)
    if buckets.is_url(directory):
      buckets.filesystem()  # sets up the file system that TFDS uses
    self.name = f'tfds:{target}'
    builder = tfds.builder_from_directory(directory)
    info = builder.info
    self._keys = (
      self._image_key(tfds, info.features, image_key),
      self._label_key(info.features, label_key),
    )
    label = info.features[self._keys[1]]
    self.features = {
      'image': ImageFeature(),
      'label': LabelFeature(several=len(label.shape) == 1),
    }
    label = getattr(label, 'feature', label)
    self.num_classes = getattr(label, 'num_classes', None)
    self.class_names = list(getattr(label, 'names', None) or []) or None
    sizes = {name: info.splits[name].num_examples for name in info.splits}
    parts = [
      f'{name}[{part[0]}:{part[-1] + 1}]'
      for name, part in splits.select(split, sizes, self.name)
      if len(part)
    ]
    self._split = '+'.join(parts)
    decoders = {self._keys[0]: tfds.decode.SkipDecoding()}
    if info.file_format is tfds.core.FileFormat.ARRAY_RECORD:
      self._read = _ArrayRecords(builder, self._split, decoders)
    elif info.file_format is tfds.core.FileFormat.TFRECORD:
      self._read = _TfRecords(info, self._split, decoders)
    else:
      raise UserError(
        f'{self.name}: files are {info.file_format.value}; array_record and tfrecord '
        f'can be read. Prepare it with: {_command(target, directory)}'
      )
    self.fingerprint = fingerprint(
      [self._split, *sorted((i.filename, i.take) for i in self._instructions(info))]
    )

  def __len__(self) -> int:
    return len(self._read)

  def read(self, indices: np.ndarray) -> list[dict]:
    image_key, label_key = self._keys
    return [
      {'error': str(example)}
      if isinstance(example, Exception)
      else {'image': example[image_key], 'label': example[label_key]}
      for example in self._read(indices)
    ]

  def name_of(self, index: int) -> str:
    return f'{self.name} {self._split} #{index}'

  def _instructions(self, info):
    for i in info.splits[self._split].file_instructions:
      yield i.replace(filename=os.path.basename(i.filename))

  def _image_key(self, tfds, features, key):
    images = [k for k, f in features.items() if isinstance(f, tfds.features.Image)]
    if key not in images:
      raise UserError(
        f'{self.name} has no image feature {key!r}: it has {images or list(features)}. '
        f"Set data.source_options={{'image_key': ...}}.{did_you_mean(key, images)}"
      )
    return key

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


class _ArrayRecords:
  def __init__(self, builder, split, decoders):
    self._source = builder.as_data_source(split=split, decoders=decoders)
    self._path = str(builder.data_path)

  def __len__(self):
    return len(self._source)

  def __call__(self, indices):
    try:
      return (
        self._source.__getitems__([int(i) for i in indices]) if len(indices) else []
      )
    except Exception:
      return [self._one(int(i)) for i in indices]  # so that one bad record stays one

  def _one(self, index):
    try:
      with shards.outages_of(self._path):
        return self._source[index]
    except (NotAllowed, Unreachable):  # which say nothing about the record
      raise
    except Exception as error:
      return ValueError(f'broken record: {error}')


class _TfRecords:
  def __init__(self, info, split, decoders):
    rows = []
    self._files: list[Records] = []
    known: dict[str, tuple[int, int]] = {}
    names = {part.split('[')[0] for part in split.split('+')}
    for name in sorted(names):
      paths = [str(path) for path in info.splits[name].filepaths]
      records = Records(paths, index_name=f'{name}.record_offsets.npz')
      lengths = list(info.splits[name].shard_lengths)
      if records.counts != lengths:
        raise UserError(
          f'{os.path.dirname(paths[0])}: split {name} has {sum(records.counts)} records '
          f'in its files, but {sum(lengths)} in {_INFO}. Prepare the data set again.'
        )
      known.update({path: (len(self._files), i) for i, path in enumerate(paths)})
      self._files.append(records)
    for instruction in info.splits[split].file_instructions:
      which, path = known[str(instruction.filename)]
      part = self._files[which].rows(path, instruction.skip, instruction.take)
      rows.append(np.insert(part, 0, which, axis=1))
    self._rows = np.concatenate(rows)
    self._features, self._decoders = info.features, decoders
    # Files on disk are read faster than threads could be told to.
    self._pool = None
    if buckets.is_url(paths[0]):
      self._pool = concurrent.futures.ThreadPoolExecutor(shards.BUCKET_READERS)

  def __len__(self):
    return len(self._rows)

  def __call__(self, indices):
    if self._pool is None:
      return [self._one(self._rows[i]) for i in indices]
    return list(self._pool.map(self._one, [self._rows[i] for i in indices]))

  def _one(self, row):
    try:
      data = self._files[row[0]].read(row[1:])
      return self._features.deserialize_example_np(data, decoders=self._decoders)
    except (NotAllowed, Unreachable):
      raise
    except Exception as error:  # protobuf's and TFDS's own types
      return ValueError(f'broken record: {error}')


def _import_tfds():
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise UserError(
      f"tfds: needs tensorflow_datasets ({error}): pip install 'vit_jax[tf]'."
    ) from None
  return tfds


def _locate(target: str, data_dir: str | None) -> str:
  """Returns the directory of one prepared version.

  Raises:
    UserError: if it is not there: what is missing, and how to prepare it.
  """
  path = os.path.expanduser(target)
  if shards.is_file(os.path.join(path, _INFO)):
    return shards.absolute(path) if buckets.is_url(path) else path
  match = _NAME.fullmatch(target)
  if not match:
    raise UserError(
      f'tfds: {target!r} is not NAME, NAME/CONFIG or NAME/CONFIG:VERSION.'
    )
  name, config, version = match.group('name', 'config', 'version')
  data_dir = data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
  data_dir = str(buckets.path(data_dir))
  home = os.path.join(data_dir, *filter(None, (name, config)))
  found = _versions(home)
  if not found and not config:
    configs = {c: _versions(os.path.join(home, c)) for c in shards.names(home)}
    configs = {c: v for c, v in configs.items() if v}
    if len(configs) > 1:
      raise UserError(
        f'tfds: {name} is prepared with several configs: name one of '
        f'{[f"tfds:{name}/{c}" for c in sorted(configs)]}.'
      )
    for only, versions in configs.items():
      home, found = os.path.join(home, only), versions
  if not found or (version and version not in found):
    raise _not_prepared(target, name, data_dir, home, found, version)
  newest = max(found, key=lambda v: [int(n) for n in v.split('.')])
  return os.path.join(home, version or newest)


def _versions(directory: str) -> list[str]:
  return [
    name
    for name in shards.names(directory)
    if re.fullmatch(r'\d+(\.\d+)*', name)
    and shards.is_file(os.path.join(directory, name, _INFO))
  ]


def _not_prepared(target, name, data_dir, home, found, version) -> DataError:
  where = os.path.join(home, version or '<version>')
  have = f' Prepared versions: {found}.' if found else ''
  message = f'tfds:{target} is not prepared: there is no {where}/{_INFO}.{have}'
  known = _import_tfds().list_builders(with_community_datasets=False)
  if name in known:
    if name in _MANUAL:
      message += f' Put {_MANUAL[name]} into {data_dir}/downloads/manual.'
    return DataError(f'{message} Prepare it with: {_command(target, data_dir)}')
  near = did_you_mean(name, [*known, *shards.names(data_dir)], _ALIKE)
  long = (
    f'{message} TFDS has no data set of that name{" (ImageNet-21k is not in TFDS)" * ("21k" in name)}: '
    f'make {home} from an archive, a folder or a list (vit_jax prepare '
    f'--help) or by a TFDS builder of your own, set TFDS_DATA_DIR or '
    f"data.source_options={{'data_dir': ...}}, or use 'folder:PATH'.{near}"
  )
  return Unknown(
    long, f'No data set of that name is in {data_dir} (TFDS_DATA_DIR) either.{near}'
  )


def _command(target: str, data_dir: str) -> str:
  return f'tfds build {target} --data_dir={data_dir} --file_format=array_record'
