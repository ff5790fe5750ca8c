"""The benchmarks VTAB-1k and FGVC: tasks, their groups and splits."""

from collections.abc import Mapping
from typing import NamedTuple

from vit_jax.errors import choose
from vit_jax.lab.data import fgvc, vtab_tasks


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
    mean: title of the mean of all its tasks.
    tasks: by the names that --tasks takes.
    train, val: splits to choose hyperparameters by.
    trainval: split to train on in the end.
  """

  title: str
  mean: str
  tasks: Mapping[str, Task]
  train: str
  val: str
  trainval: str

  @property
  def groups(self) -> dict[str, str]:
    """{title of a task: title of its group}."""
    return {task.title: task.group.capitalize() for task in self.tasks.values()}

  def select(self, text: str) -> list[str]:
    """Returns the names of the tasks of 'all', or of 'GROUP,NAME,...', in their order."""
    names = {'all': list(self.tasks), **{name: [name] for name in self.tasks}}
    for name, task in self.tasks.items():
      if task.group:
        names.setdefault(task.group, []).append(name)
    selected = [
      name for word in text.split(',') for name in choose('task', word, names)
    ]
    return [name for name in self.tasks if name in selected]


_SMALL = ('cifar100', 'svhn', 'eurosat', 'dspr_loc', 'dspr_ori')

VTAB = Benchmark(
  'VTAB-1k',
  'Mean of 19',
  {
    name: Task(
      task.title,
      task.group,
      f'vtab:{name}',
      train=800,
      trainval=1000,
      flip=task.flip,
      crop=task.crop,
      small=name in _SMALL,
    )
    for name, task in vtab_tasks.TASKS.items()
  },
  train='train800',
  val='val200',
  trainval='train800val200',
)
FGVC = Benchmark(
  'FGVC',
  'Mean of 5',
  {
    name: Task(data.title, '', f'fgvc:{name}', *data.sizes, fine_grained=True)
    for name, data in fgvc.SETS.items()
  },
  train='train',
  val='val',
  trainval='trainval',
)
