"""The five data sets of fine-grained classification that VPT reports on."""

import concurrent.futures
import hashlib
import json
import logging
import os
from typing import NamedTuple

import numpy as np

from vit_jax.data import image_file
from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import splits, tfds
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.errors import BadImage, DataError, UserError, choose

_SPLITS = 'https://cornell.box.com/v/vptfgvcsplits'
_PARTS = ('train', 'val', 'test')


class Set(NamedTuple):
  """A data set.

  Attributes:
    title: as Jia et al. 2022 (arXiv 2203.12119) call it.
    classes: K.
    sizes: numbers of examples of train and trainval (VPT, Table 8).
    home: where its images are from.
    images: folder beside the JSON files that their paths start from; '': their own.
    tfds: its name in TFDS, with the published training and test images but not the
      published validation split; None: TFDS does not have it.
  """

  title: str
  classes: int
  sizes: tuple[int, int]
  home: str
  images: str
  tfds: str | None
  # Photographs, without groups.
  group = ''
  flip = crop = True
  small = False


_CUB = 'https://data.caltech.edu/records/65de6-vp158'
_NABIRDS = 'https://dl.allaboutbirds.org/nabirds'
_FLOWERS = 'https://www.robots.ox.ac.uk/~vgg/data/flowers/102/'
_DOGS = 'http://vision.stanford.edu/aditya86/ImageNetDogs/'
_CARS = 'https://ai.stanford.edu/~jkrause/cars/car_dataset.html'
SETS = {
  'cub': Set('CUB-200-2011', 200, (5394, 5994), _CUB, 'images', 'caltech_birds2011'),
  'nabirds': Set('NABirds', 555, (21_536, 23_929), _NABIRDS, 'images', None),
  'flowers': Set(
    'Oxford Flowers', 102, (1020, 2040), _FLOWERS, '', 'oxford_flowers102'
  ),
  'dogs': Set('Stanford Dogs', 120, (10_800, 12_000), _DOGS, 'Images', 'stanford_dogs'),
  'cars': Set('Stanford Cars', 196, (7329, 8144), _CARS, '', 'cars196'),
}


class Fgvc(Source):
  """`fgvc:NAME`, one of `SETS`: cub, nabirds, flowers, dogs, cars.

  Splits: `train`, `val`, `trainval` (both, in this order) and `test`. They are those of
  the published files train.json, val.json and test.json, {path of an image: class}, in
  DIR/NAME or DIR itself; classes are the sorted ones of all three files. A split's images
  are in a fixed pseudo-random order, that of a hash of their path.

  Without such files, the data set that TFDS prepared in DIR stands in, except for
  nabirds: with its own validation split, else a tenth of its training images, drawn once
  and for all, which are not the published tenth.

  Option: `data_dir`, DIR; else that of `tfds:`.
  """

  def __init__(self, target: str, split: str, *, data_dir: str | None = None):
    self.name = f'fgvc:{target}'
    entry = choose('FGVC data set', target, SETS)
    home = tfds.data_directory(data_dir)
    for folder in (os.path.join(home, target), home):
      if any(os.path.isfile(os.path.join(folder, f'{part}.json')) for part in _PARTS):
        self._images = _Files(self.name, entry, folder)
        break
    else:
      self._images = _Prepared(self.name, target, entry, data_dir)
    self.features = {'image': ImageFeature(), 'label': LabelFeature()}
    self.num_classes, self.class_names = entry.classes, self._images.class_names
    if self.class_names is not None and len(self.class_names) != entry.classes:
      raise UserError(
        f'{self.name}: {self._images.where} has {len(self.class_names)} classes, but '
        f'{entry.title} has {entry.classes}.'
      )
    pools = dict(zip(_PARTS, self._images.pools, strict=True))
    pools['trainval'] = np.concatenate([pools['train'], pools['val']])
    sizes = {name: len(pool) for name, pool in pools.items()}
    self._rows = np.concatenate(
      [pools[k][low:high] for k, low, high in splits.ranges(split, sizes, self.name)]
    )
    if self._images.labels is not None:
      self.labels = self._images.labels[self._rows]
    self._images.check(self._rows[0])
    self.fingerprint = fingerprint((self._images.fingerprint, self._rows.tobytes()))

  def __len__(self) -> int:
    return len(self._rows)

  def read(self, indices: np.ndarray) -> list[dict]:
    return self._images.read(self._rows[indices], self.max_file_bytes)

  def name_of(self, index: int) -> str:
    return self._images.name_of(self._rows[index])


class _Files:
  """Image files and the JSON files that list them.

  Attributes:
    pools: the rows of each of _PARTS.
    labels: of each row.
    where: for messages.
  """

  def __init__(self, name, entry, folder):
    self.where, self._name, self._home = folder, name, entry.home
    self._root = os.path.join(folder, entry.images)
    tables = [self._load(part) for part in _PARTS]
    for i, table in enumerate(tables):
      for other, part in zip(tables[:i], _PARTS, strict=False):
        if both := table.keys() & other.keys():
          raise UserError(
            f'{name}: {min(both)!r} is in {part}.json and in {_PARTS[i]}.json of {folder}: '
            f'take all three from {_SPLITS}.'
          )
    ids = {value for table in tables for value in table.values()}
    if len({type(value) for value in ids}) > 1:
      raise UserError(f'{name}: some classes in {folder} are numbers, some texts.')
    order = sorted(ids)
    self.class_names = [str(value) for value in order]
    index = {value: i for i, value in enumerate(order)}
    self._paths: list[str] = []
    labels, self.pools = [], []
    for table in tables:
      paths = sorted(table, key=lambda path: hashlib.sha256(os.fsencode(path)).digest())
      self.pools.append(np.arange(len(paths)) + len(self._paths))
      self._paths += paths
      labels += [index[table[path]] for path in paths]
    self.labels = np.array(labels, np.int64)
    self.fingerprint = fingerprint((self.class_names, self._paths, labels))
    self._pool = concurrent.futures.ThreadPoolExecutor(image_file.READERS)

  def _load(self, part) -> dict:
    path = os.path.join(self.where, f'{part}.json')
    try:
      with open(path, 'rb') as file:
        table = json.load(file)
    except FileNotFoundError:
      raise DataError(
        f'{self._name}: {path} is missing beside the others: take train.json, val.json and '
        f'test.json from {_SPLITS}.'
      ) from None
    except (OSError, ValueError) as error:
      raise UserError(f'{self._name}: {path} cannot be read: {error}') from None
    if not isinstance(table, dict) or {*map(type, table.values())} not in (
      {int},
      {str},
    ):
      raise UserError(
        f'{self._name}: {path} is not {{path of an image: class}}, all classes numbers or '
        'all texts.'
      )
    return table

  def check(self, row):
    """Raises DataError if the image of a row, likely all of them, is not there."""
    if not os.path.exists(path := self.name_of(row)):
      raise DataError(
        f'{self._name}: there is no {path}, which {self.where} lists: unpack the '
        f'images of {self._home} there.'
      )

  def name_of(self, row):
    return os.path.join(self._root, self._paths[row])

  def read(self, rows, max_bytes):
    def content(row):
      try:
        image = {'image': image_file.read(self.name_of(row), max_bytes)}
      except BadImage as error:
        image = {'error': str(error)}
      return {**image, 'label': int(self.labels[row])}

    return list(self._pool.map(content, rows))


class _Prepared:
  """The counterpart of `_Files` for a data set that TFDS prepared."""

  labels = None

  def __init__(self, name, target, entry, data_dir):
    folder = os.path.join(tfds.data_directory(data_dir), target)
    how = (
      f'{name}: there is no {folder}/train.json. Put the images of {entry.home} into '
      f'{folder}, and beside them train.json, val.json and test.json of {_SPLITS}.'
    )
    if entry.tfds is None:
      raise DataError(how)
    try:
      prepared = tfds.Prepared(entry.tfds, data_dir)
    except DataError as error:
      raise DataError(f'{how} Or, with other validation images: {error}') from None
    self.where, self._name = f'tfds:{entry.tfds}', name
    _, self.class_names = tfds.classes(prepared.features['label'])
    own = [k for k in ('train', 'validation', 'test') if k in prepared.sizes]
    if missing := {'train', 'test'} - prepared.sizes.keys():
      raise UserError(
        f'{name}: {self.where} has no split {max(missing)!r}, but {list(prepared.sizes)}: '
        'what is prepared is not all of the data set.'
      )
    sizes = [prepared.sizes[k] for k in own]
    self._examples = prepared.open((k, 0, n) for k, n in zip(own, sizes, strict=True))
    self.fingerprint = self._examples.fingerprint
    self.pools = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    if len(own) == 2:
      logging.getLogger(__name__).warning(
        '%s: without train.json, val.json and test.json, a tenth of the training images of '
        '%s is val, which is not the published one',
        name,
        self.where,
      )
      train, test = self.pools
      mixed = np.random.Generator(np.random.Philox(0)).permutation(len(train))
      cut = len(train) * 9 // 10
      self.pools = [np.sort(train[mixed[:cut]]), np.sort(train[mixed[cut:]]), test]

  def check(self, row):
    pass

  def name_of(self, row):
    return f'{self._name} {self._examples.split} #{row}'

  def read(self, rows, max_bytes):
    return [
      {'error': str(example)}
      if isinstance(example, Exception)
      else {'image': example['image'], 'label': int(example['label'])}
      for example in self._examples.read(rows)
    ]
