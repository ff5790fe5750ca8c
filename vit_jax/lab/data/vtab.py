"""The tasks of VTAB-1k: 1,000 examples to learn from, all of the test split to report."""

import numpy as np

from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import splits, tfds
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.errors import DataError, UserError, choose
from vit_jax.lab.data.vtab_tasks import TASKS

# Examples to train on, and to choose hyperparameters by.
TRAIN, VAL = 800, 200


class Vtab(Source):
  """`vtab:NAME`, one of `vtab_tasks.TASKS`, of a data set that TFDS prepared.

  Splits: `train800` to train and `val200` to choose hyperparameters, `train800val200`,
  both, to train with those, `test`; cut as the benchmark's own code does. Images are
  encoded, as `decode` takes them; it repeats grey ones in three channels. Option:
  `data_dir`, as of `tfds:`.
  """

  def __init__(self, target: str, split: str, *, data_dir: str | None = None):
    self.name = f'vtab:{target}'
    self._task = task = choose('VTAB task', target, TASKS)
    try:
      prepared = tfds.Prepared(task.tfds, data_dir, task.versions)
    except DataError as error:
      raise DataError(f'{self.name}: {error}') from None
    self.features = {'image': ImageFeature(), 'label': LabelFeature()}
    self.num_classes = task.classes
    self.class_names = list(task.names) or None
    if 'label' in prepared.features:
      number, self.class_names = tfds.classes(prepared.features['label'])
      if number != task.classes:
        raise UserError(
          f'{self.name} has {task.classes} classes, and {task.tfds} has {number}.'
        )
    table = splits_of(target, prepared.sizes)
    sizes = {name: sum(high - low for _, low, high in table[name]) for name in table}
    self._examples = prepared.open(
      part
      for name, low, high in splits.ranges(split, sizes, self.name)
      for part in _cut(table[name], low, high)
    )
    self.fingerprint = fingerprint((target, self._examples.fingerprint))

  def __len__(self) -> int:
    return self._examples.size

  def read(self, indices: np.ndarray) -> list[dict]:
    return [self._labelled(example) for example in self._examples.read(indices)]

  def name_of(self, index: int) -> str:
    return f'{self.name} {self._examples.split} #{index}'

  def _labelled(self, example: dict | Exception) -> dict:
    if isinstance(example, Exception):
      return {'error': str(example)}
    image, change = example['image'], self._task.image
    try:
      image = change(image) if change else image
    except OSError as error:  # Pillow's, of an image
      return {'error': f'broken image: {error}'}
    return {'image': image, 'label': self._task.label(example)}


def splits_of(name: str, sizes: dict[str, int]) -> dict[str, list[tuple]]:
  """Returns the parts of a task's splits: {split: [(split of TFDS, first, end)]}.

  The first 800 examples of the first of `Task.parts`, the first 200 of the second, these
  two, and the third. `sizes` are those of the data set's splits.
  """
  where = f'vtab:{name}'
  train, val, test = (
    splits.ranges(part, sizes, where)[0] for part in TASKS[name].parts
  )
  train, val = _first(TRAIN, train, where), _first(VAL, val, where)
  return {
    'train800': [train],
    'val200': [val],
    'train800val200': [train, val],
    'test': [test],
  }


def _first(count, part, where):
  name, low, high = part
  if high - low < count:
    raise UserError(
      f'{where} takes {count} examples of {name}[{low}:{high}], which has {high - low}.'
    )
  return name, low, low + count


def _cut(parts: list[tuple[str, int, int]], low: int, high: int) -> list[tuple]:
  """Returns the parts of the examples from low to high, counted through all parts."""
  out = []
  for name, first, end in parts:
    size = end - first
    out.append((name, first + min(max(low, 0), size), first + min(max(high, 0), size)))
    low, high = low - size, high - size
  return out
