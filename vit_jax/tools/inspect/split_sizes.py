"""How many images the splits of well-known data sets hold, for sums without the data."""

from typing import NamedTuple

from vit_jax.data.sources import splits
from vit_jax.errors import UserError, did_you_mean
from vit_jax.lab.data import vtab_tasks


class DataSet(NamedTuple):
  """Images of every split; classes: K, or None where a config must say it."""

  sizes: dict[str, int]
  classes: int | None = None


# By the names of TFDS, whose catalogue has these numbers, where it has the data set.
DATA_SETS = {
  'imagenet2012': DataSet(
    {'train': 1_281_167, 'validation': 50_000, 'test': 100_000}, 1000
  ),
  # The release of autumn 2011, which the papers used: 21,841 classes. That of winter
  # 2021, which image-net.org gives out now, has 13,151,276 images of 19,167 classes:
  # say --examples.
  'imagenet21k': DataSet({'full': 14_197_122}),
  'cifar10': DataSet({'train': 50_000, 'test': 10_000}, 10),
  'cifar100': DataSet({'train': 50_000, 'test': 10_000}, 100),
  'oxford_iiit_pet': DataSet({'train': 3_680, 'test': 3_669}, 37),
  'oxford_flowers102': DataSet(
    {'train': 1_020, 'validation': 1_020, 'test': 6_149}, 102
  ),
  'food101': DataSet({'train': 75_750, 'validation': 25_250}, 101),
  'mnist': DataSet({'train': 60_000, 'test': 10_000}, 10),
  'fashion_mnist': DataSet({'train': 60_000, 'test': 10_000}, 10),
  'coco/2017': DataSet({'train': 118_287, 'validation': 5_000, 'test': 40_670}, 80),
  # Google's own, in round numbers: arXiv 2010.11929 section 4.1, 2106.04560 section 3.1.
  'jft300m': DataSet({'train': 303_000_000}, 18_291),
  'jft3b': DataSet({'train': 3_000_000_000}),
}
# Of every task of VTAB; the test splits are those of the data sets, not looked up here.
_VTAB = {'train800': 800, 'val200': 200, 'train800val200': 1000}
# A cut is taken of a list of all examples, 8 bytes each.
_LARGEST_CUT = 2**28


def find(source: str) -> DataSet | None:
  """Returns that of 'tfds:NAME[/CONFIG][:VERSION]', 'records:NAME', 'vtab:TASK' or 'NAME'.

  A data set that the table has with its config, such as 'coco/2017', needs that config.
  """
  scheme, _, target = source.partition(':')
  if scheme == 'vtab':
    task = vtab_tasks.TASKS.get(target)
    return task and DataSet(_VTAB, task.classes)
  name = source if scheme.split('/')[0] in DATA_SETS else target
  name = name.partition(':')[0]
  return DATA_SETS.get(name) or DATA_SETS.get(name.partition('/')[0])


def count(source: str, split: str) -> int:
  """Returns the number of examples of a split expression, such as 'train[:99%]'.

  Raises:
    UserError: for a data set that is not in the table, or no such split of it.
  """
  found = find(source)
  if found is None:
    target = source.rpartition(':')[2]
    raise UserError(
      f'How many examples {source!r} has is not known without opening it: pass '
      f'--examples N, the number of one epoch.{did_you_mean(target, DATA_SETS)}'
    )
  parts = splits.parse(split)
  whole = all(low == high == '' for _, low, high in parts)
  if whole and all(name in found.sizes for name, _, _ in parts):
    return sum(found.sizes[name] for name, _, _ in parts)
  if max(found.sizes.values()) > _LARGEST_CUT:
    raise UserError(
      f'{split!r} of {source!r}: of so large a data set only whole splits are counted, '
      f'{found.sizes}; pass --examples N, the number of one epoch.'
    )
  try:
    selected = splits.select(split, found.sizes, source)
  except UserError as error:
    raise UserError(f'{error} Or pass --examples N, the number of one epoch.') from None
  return sum(len(indices) for _, indices in selected)
