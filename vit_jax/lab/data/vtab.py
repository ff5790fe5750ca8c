"""The source `vtab:`, tasks with 1,000 examples to train on and a whole test split."""

from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import splits, tfds
from vit_jax.data.sources.base import fingerprint
from vit_jax.errors import DataError, UserError, choose
from vit_jax.lab.data.vtab_tasks import TASKS


class Vtab(tfds.Images):
  """`vtab:NAME`, a task of `vtab_tasks.TASKS`, from a data set that TFDS prepared.

  Splits are cut as in the benchmark's own code: `train800` to train and `val200` to choose
  hyperparameters; `train800val200`, both, for the final training; and `test`. Images are
  encoded, and the op `decode` repeats grey ones in three channels. The option `data_dir` is
  that of `tfds:`.
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
          f'{self.name} has {task.classes} classes, but {task.tfds} has {number}.'
        )
    parts = find_splits(target, prepared.sizes)
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
    except OSError as error:  # Pillow could not read the image
      return {'error': f'broken image: {error}'}
    return {'image': image, 'label': self._task.label(example)}


def find_splits(name: str, sizes: dict[str, int]) -> dict[str, tuple]:
  """Finds a task's splits within TFDS's: {split: (split of TFDS, first, end)}.

  They are the first 800 examples of the first of `Task.parts`, the first 200 of the second
  part, and all of the third.
  """
  where, out = f'vtab:{name}', {}
  counts = (('train800', 800), ('val200', 200), ('test', None))
  for (split, count), part in zip(counts, TASKS[name].parts, strict=True):
    ((source, first, end),) = splits.ranges(part, sizes, where)
    if count and end - first < count:
      raise UserError(
        f'{where} needs {count} examples of {source}[{first}:{end}], which has {end - first}.'
      )
    out[split] = source, first, first + count if count else end
  return out
