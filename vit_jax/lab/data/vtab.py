"""The tasks of VTAB-1k: 1,000 examples to learn from, all of the test split to report."""

from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import splits, tfds
from vit_jax.data.sources.base import fingerprint
from vit_jax.errors import DataError, UserError, choose
from vit_jax.lab.data.vtab_tasks import TASKS


class Vtab(tfds.Images):
  """`vtab:NAME`, one of `vtab_tasks.TASKS`, of a data set that TFDS prepared.

  Splits: `train800` to train and `val200` to choose hyperparameters, `train800val200`,
  both, to train in the end, and `test`; cut as the benchmark's own code does. Images are
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
    parts = splits_of(target, prepared.sizes)
    sizes = {name: end - first for name, (_, first, end) in parts.items()}
    split = 'train800+val200' if split == 'train800val200' else split
    ranges = [
      (parts[name][0], parts[name][1] + low, parts[name][1] + high)
      for name, low, high in splits.ranges(split, sizes, self.name)
    ]
    super().__init__(self.name, split, prepared, 'image', ranges)
    self.fingerprint = fingerprint((target, self.fingerprint))

  def _one(self, example: dict) -> dict:
    image, change = example['image'], self._task.image
    try:
      image = change(image) if change else image
    except OSError as error:  # Pillow's, of an image
      return {'error': f'broken image: {error}'}
    return {'image': image, 'label': self._task.label(example)}


def splits_of(name: str, sizes: dict[str, int]) -> dict[str, tuple]:
  """Returns a task's splits as parts of TFDS's: {split: (split of TFDS, first, end)}.

  The first 800 examples of the first of `Task.parts`, the first 200 of the second, and all
  of the third. `sizes` are those of the data set's splits.
  """
  where, out = f'vtab:{name}', {}
  counts = (('train800', 800), ('val200', 200), ('test', None))
  for (split, count), part in zip(counts, TASKS[name].parts, strict=True):
    ((of, first, end),) = splits.ranges(part, sizes, where)
    if count and end - first < count:
      raise UserError(
        f'{where} takes {count} examples of {of}[{first}:{end}], which has {end - first}.'
      )
    out[split] = of, first, first + count if count else end
  return out
