"""The five data sets of fine-grained classification that VPT reports on."""

import concurrent.futures
import hashlib
import json
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
  """

  title: str
  classes: int
  sizes: tuple[int, int]
  home: str
  images: str
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
  'cub': Set('CUB-200-2011', 200, (5394, 5994), _CUB, 'images'),
  'nabirds': Set('NABirds', 555, (21_536, 23_929), _NABIRDS, 'images'),
  'flowers': Set('Oxford Flowers', 102, (1020, 2040), _FLOWERS, ''),
  'dogs': Set('Stanford Dogs', 120, (10_800, 12_000), _DOGS, 'Images'),
  'cars': Set('Stanford Cars', 196, (7329, 8144), _CARS, ''),
}


class Fgvc(Source):
  """`fgvc:NAME`, one of `SETS`: cub, nabirds, flowers, dogs, cars.

  Splits: `train`, `val`, `trainval` (both, in this order) and `test`. They are those of
  the published files train.json, val.json and test.json, {path of an image: class}, in
  DIR/NAME or DIR itself; classes are the sorted ones of all three files. A split's images
  are in a fixed pseudo-random order, that of a hash of their path.

  Option: `data_dir`, DIR; else that of `tfds:`.
  """

  def __init__(self, target: str, split: str, *, data_dir: str | None = None):
    self.name = f'fgvc:{target}'
    entry = choose('FGVC data set', target, SETS)
    folder = self._folder(target, entry, tfds.data_directory(data_dir))
    tables = self._tables(folder)
    order = sorted({value for table in tables for value in table.values()})
    index = {value: i for i, value in enumerate(order)}
    paths, labels, pools = [], [], {}
    for part, table in zip(_PARTS, tables, strict=True):
      names = sorted(table, key=lambda path: hashlib.sha256(os.fsencode(path)).digest())
      pools[part] = np.arange(len(names)) + len(paths)
      paths += names
      labels += [index[table[name]] for name in names]
    pools['trainval'] = np.concatenate([pools['train'], pools['val']])
    self.class_names = [str(value) for value in order]
    self.num_classes = entry.classes
    if len(order) != entry.classes:
      raise UserError(
        f'{self.name}: {folder} has {len(order)} classes, but {entry.title} has '
        f'{entry.classes}.'
      )
    sizes = {name: len(pool) for name, pool in pools.items()}
    rows = np.concatenate(
      [pools[k][low:high] for k, low, high in splits.ranges(split, sizes, self.name)]
    )
    self.features = {'image': ImageFeature(), 'label': LabelFeature()}
    self.labels = np.array(labels, np.int64)[rows]
    self._paths = [os.path.join(folder, entry.images, paths[row]) for row in rows]
    self._pool = concurrent.futures.ThreadPoolExecutor(image_file.READERS)
    files = fingerprint((self.class_names, paths, labels))
    self.fingerprint = fingerprint((files, rows.tobytes()))
    if not os.path.exists(self._paths[0]):  # likely none of them
      raise DataError(
        f'{self.name}: there is no {self._paths[0]}, which {folder} lists: unpack the '
        f'images of {entry.home} there.'
      )

  def __len__(self) -> int:
    return len(self._paths)

  def read(self, indices: np.ndarray) -> list[dict]:
    return list(self._pool.map(self._read, indices))

  def name_of(self, index: int) -> str:
    return self._paths[index]

  def _read(self, index: int) -> dict:
    try:
      image = {'image': image_file.read(self._paths[index])}
    except BadImage as error:
      image = {'error': str(error)}
    return {**image, 'label': int(self.labels[index])}

  def _folder(self, name: str, entry: Set, home: str) -> str:
    """Returns the folder that has one of the JSON files."""
    own = os.path.join(home, name)
    for folder in (own, home):
      if any(os.path.isfile(os.path.join(folder, f'{part}.json')) for part in _PARTS):
        return folder
    raise DataError(
      f'{self.name}: there is no {own}/train.json. Put the images of {entry.home} into '
      f'{own}, and beside them train.json, val.json and test.json of {_SPLITS}.'
    )

  def _tables(self, folder: str) -> list[dict]:
    """Returns {path of an image: class} of each of _PARTS."""
    tables, kinds = [], set()
    for part in _PARTS:
      path = os.path.join(folder, f'{part}.json')
      try:
        with open(path, 'rb') as file:
          table = json.load(file)
        kinds |= {*map(type, table.values())}
      except FileNotFoundError:
        raise DataError(f'{self.name}: {path} is missing: see {_SPLITS}.') from None
      except (OSError, ValueError, AttributeError) as error:
        raise UserError(f'{self.name}: {path} cannot be read: {error}') from None
      tables.append(table)
    if kinds not in ({int}, {str}):
      raise UserError(
        f'{self.name}: the classes in {folder} are not all numbers, or texts.'
      )
    for i, table in enumerate(tables):
      for part, other in zip(_PARTS[:i], tables, strict=False):
        if both := table.keys() & other.keys():
          raise UserError(
            f'{self.name}: {min(both)!r} is in {part}.json and in {_PARTS[i]}.json of '
            f'{folder}: take all three from {_SPLITS}.'
          )
    return tables
