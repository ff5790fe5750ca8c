"""The five data sets of fine-grained classification that VPT reports on."""

import json
import os
from typing import NamedTuple

from vit_jax.data.sources import tfds
from vit_jax.data.sources.folder import Folder, sort_by_hash
from vit_jax.errors import DataError, UserError, choose

_SPLITS = 'https://cornell.box.com/v/vptfgvcsplits'


class Set(NamedTuple):
  """A data set of photographs, as in VPT's Table 8 (arXiv 2203.12119)."""

  title: str
  classes: int
  sizes: tuple[int, int]  # examples of train and of trainval
  home: str  # the page that publishes the images
  images: str  # the folder to which paths in the JSON files are relative
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


class Fgvc(Folder):
  """`fgvc:NAME`, where NAME is cub, nabirds, flowers, dogs or cars.

  The splits `train`, `val` and `test` are published as train.json, val.json and test.json,
  {path of an image: class}, and must be in DIR/NAME. `trainval` is `train` and then `val`.
  Images are in a pseudo-random order, given by a hash of their path. The option `data_dir`
  sets DIR; its default is that of `tfds:`.
  """

  exif = False

  def __init__(self, target: str, split: str, *, data_dir: str | None = None):
    self.name = f'fgvc:{target}'
    entry = choose('FGVC data set', target, SETS)
    folder = os.path.join(tfds.data_directory(data_dir), target)
    tables = {
      part: self._table(folder, part, entry.home) for part in ('train', 'val', 'test')
    }
    values = [value for table in tables.values() for value in table.values()]
    types = sorted({type(value).__name__ for value in values})
    if types not in ([], ['int'], ['str']):
      raise UserError(
        f'{self.name}: the classes in {folder} have the types {types}: expected int or str '
        'for all of them.'
      )
    classes = sorted(set(values))
    self.class_names = [str(value) for value in classes]
    self.num_classes = entry.classes
    if len(classes) != entry.classes:
      raise UserError(
        f'{self.name}: expected {entry.classes} classes, but {folder} has {len(classes)}.'
      )
    label_of = {value: i for i, value in enumerate(classes)}
    rows = {
      part: sort_by_hash((path, label_of[value]) for path, value in table.items())
      for part, table in tables.items()
    }
    rows['trainval'] = rows['train'] + rows['val']
    self._root = os.path.join(folder, entry.images)
    self._select(rows, split)
    if not os.path.exists(self.name_of(0)):  # probably all images are missing
      raise DataError(
        f'{self.name}: {self.name_of(0)} is missing: unpack the images of {entry.home}.'
      )

  def _table(self, folder: str, part: str, home: str) -> dict:
    """Reads a split's file; returns {path of an image: class}."""
    path = os.path.join(folder, f'{part}.json')
    try:
      with open(path, 'rb') as file:
        return dict(json.load(file))
    except FileNotFoundError:
      raise DataError(
        f'{self.name}: {path} does not exist. Put the images of {home} and the JSON files '
        f'of {_SPLITS} there.'
      ) from None
    except (OSError, ValueError, TypeError) as error:
      raise UserError(f'{self.name}: {path} cannot be read: {error}') from None
