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
  """A data set of photographs, as VPT's Table 8 describes it (arXiv 2203.12119).

  `sizes` counts the examples of train and trainval; `home` publishes the images, and
  `images` is the folder that the paths of the JSON files start from.
  """

  title: str
  classes: int
  sizes: tuple[int, int]
  home: str
  images: str
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

  Splits: `train`, `val`, `trainval` (both, in this order) and `test`, of the published
  files train.json, val.json and test.json, {path of an image: class}, in DIR/NAME.
  Images are in a pseudo-random order, by a hash of their path. Option: `data_dir`,
  DIR; else as for `tfds:`.
  """

  def __init__(self, target: str, split: str, *, data_dir: str | None = None):
    self.name = f'fgvc:{target}'
    entry = choose('FGVC data set', target, SETS)
    folder = os.path.join(tfds.data_directory(data_dir), target)
    tables = self._tables(folder, entry.home)
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
        f'{self.name}: expected {entry.classes} classes, and {folder} has {len(order)}.'
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
        f'{self.name}: {self._paths[0]} is missing: unpack the images of {entry.home}.'
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

  def _tables(self, folder: str, home: str) -> list[dict]:
    """Returns {path of an image: class} of each of _PARTS."""
    tables = []
    for part in _PARTS:
      path = os.path.join(folder, f'{part}.json')
      try:
        with open(path, 'rb') as file:
          tables.append(dict(json.load(file)))
      except FileNotFoundError:
        raise DataError(
          f'{self.name}: there is no {path}. Put the images of {home} and the JSON files '
          f'of {_SPLITS} there.'
        ) from None
      except (OSError, ValueError, TypeError) as error:
        raise UserError(f'{self.name}: {path} cannot be read: {error}') from None
    return tables
