"""The benchmarks: tasks, their groups and splits."""

from collections.abc import Mapping
from typing import NamedTuple

from vit_jax.errors import UserError, choose
from vit_jax.lab.data import fgvc, vtab_tasks

ALL = 'all'


class Task(NamedTuple):
  """A task.

  Attributes:
    title: as papers write it.
    group: '' where there are none.
    source: as `config.data.source`.
    train: number of examples to train on while hyperparameters are chosen.
    trainval: number of examples to train on in the end.
    flip, crop: whether a mirrored image, and a part of one, has the same label.
    small: its images have fewer than 96 x 96 pixels.
    fine_grained: it is one of FGVC, which VPT treats otherwise.
  """

  title: str
  group: str
  source: str
  train: int
  trainval: int
  flip: bool = True
  crop: bool = True
  small: bool = False
  fine_grained: bool = False


class Benchmark(NamedTuple):
  """A benchmark.

  Attributes:
    title: of its figure and table.
    mean: title of the mean of all its tasks.
    tasks: by the names that --tasks takes.
    train, val: splits, to choose hyperparameters by.
    trainval: split to train on in the end.
  """

  title: str
  mean: str
  tasks: Mapping[str, Task]
  train: str
  val: str
  trainval: str

  def chosen(self, text: str) -> list[str]:
    """Returns the names of the tasks of 'all', or of 'GROUP,NAME,...', in their order.

    Raises:
      UserError: for a name that is neither a task nor a group.
    """
    groups = {task.group: [] for task in self.tasks.values() if task.group}
    for name, task in self.tasks.items():
      if task.group:
        groups[task.group].append(name)
    known = {ALL: list(self.tasks), **groups, **{name: [name] for name in self.tasks}}
    words = [word.strip() for word in text.split(',')]
    wanted = {name for word in words for name in choose('task', word, known)}
    if not wanted:
      raise UserError(f'--tasks {text!r} names no task: one of {list(known)}.')
    return [name for name in self.tasks if name in wanted]


_SMALL = ('cifar100', 'svhn', 'eurosat', 'dspr_loc', 'dspr_ori')

VTAB = Benchmark(
  'VTAB-1k',
  'Mean of 19',
  {
    name: Task(
      task.title,
      task.group,
      f'vtab:{name}',
      800,
      1000,
      task.flip,
      task.crop,
      small=name in _SMALL,
    )
    for name, task in vtab_tasks.TASKS.items()
  },
  train='train800',
  val='val200',
  trainval='train800val200',
)

# Examples to train on, and those and the ones to choose by: VPT, Table 8.
_FGVC = {
  'cub': (5394, 5994),
  'nabirds': (21_536, 23_929),
  'flowers': (1020, 2040),
  'dogs': (10_800, 12_000),
  'cars': (7329, 8144),
}

FGVC = Benchmark(
  'FGVC',
  'Mean of 5',
  {
    name: Task(entry.title, '', f'fgvc:{name}', *_FGVC[name], fine_grained=True)
    for name, entry in fgvc.SETS.items()
  },
  train='train',
  val='val',
  trainval='trainval',
)
