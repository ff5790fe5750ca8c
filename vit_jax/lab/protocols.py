"""The benchmarks VTAB-1k and FGVC, and three published protocols of fine-tuning on them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.errors import choose
from vit_jax.lab.data.fgvc import SETS, Set
from vit_jax.lab.data.vtab_tasks import TASKS, Task


class Benchmark(NamedTuple):
  """The tasks of a benchmark, and the names of their splits."""

  title: str
  mean: str  # title of the mean of all tasks
  tasks: Mapping[str, Task | Set]
  source: str  # the source of a task's data is 'SOURCE:TASK'
  train: str  # split to train on while hyperparameters are chosen
  val: str  # split on which hyperparameters are chosen
  trainval: str  # split of the final training

  @property
  def groups(self) -> dict[str, str]:
    """Returns {title of a task: title of its group, or ''}."""
    return {task.title: task.group.capitalize() for task in self.tasks.values()}

  def select(self, text: str) -> list[str]:
    """Selects tasks by 'all' or 'GROUP,NAME,...'; returns their names in order."""
    names = {'all': list(self.tasks), **{name: [name] for name in self.tasks}}
    for name, task in self.tasks.items():
      if task.group:
        names.setdefault(task.group, []).append(name)
    selected = {n for word in text.split(',') for n in choose('task', word, names)}
    return sorted(selected, key=names['all'].index)


VTAB = Benchmark(
  title='VTAB-1k',
  mean='Mean of 19',
  tasks=TASKS,
  source='vtab',
  train='train800',
  val='val200',
  trainval='train800val200',
)
FGVC = Benchmark(
  title='FGVC',
  mean='Mean of 5',
  tasks=SETS,
  source='fgvc',
  train='train',
  val='val',
  trainval='trainval',
)


class Setting(NamedTuple):
  """A protocol's settings for one task."""

  resolution: int
  # Size to which images are resized before a random crop, as a multiple of the resolution.
  # None: no crops and no flips.
  precrop: float | None
  batch_size: int
  changes: Mapping  # changes to the config of `finetune`
  warmup: float  # share of the steps that are warmup
  # {config key: values}. The combination that is best on the validation split is used.
  grid: Mapping[str, Sequence] = {}
  seeds: Sequence[int] = (0, 1, 2)
  # Whether images are photographs. If so, the shorter side is resized, instead of squashing
  # the image to a square; test images are cropped to the centre; and the final training
  # uses the training split only.
  photographs: bool = False


_SGD = dict(name='sgd', momentum=0.9)


def paper(task: Task | Set, tune: dict) -> Setting:
  """One setting for all tasks, from the ViT paper.

  See Table 4 and appendices B.1.1 and D.10. The preprocessing is BiT's. The warmup takes a
  fifth of the steps, as in the reference code.
  """
  optim = dict(_SGD, lr=0.01, clip=1.0, schedule=dict(decay='cosine'))
  # configs/finetune.py has the same moment_dtype.
  optim['moment_dtype'] = 'bfloat16'
  return Setting(
    resolution=384,
    precrop=7 / 6,
    batch_size=512,
    changes={'optim': optim, 'steps': 2500},
    warmup=0.2,
  )


def bit(task: Task | Set, tune: dict) -> Setting:
  """BiT-HyperRule: steps and resolution depend on the task.

  See arXiv 1912.11370, section 3.3, and its code. The rate drops three times after the
  warmup. Sets of 20,000 and more examples get more steps, and MixUp.
  """
  large = task.sizes[1] >= 20_000
  warmup, *drops, steps = (100, 200, 300, 400, 500)
  if large:
    warmup, *drops, steps = (500, 3000, 6000, 9000, 10_000)
  at = [(step - warmup) / (steps - warmup) for step in drops]
  schedule = dict(decay='multistep', at=at, factor=0.1)
  changes = {'optim': dict(_SGD, lr=0.003, schedule=schedule), 'steps': steps}
  if large:
    changes['task.mixup'] = 0.1
  resolution, precrop = (128, 5 / 4) if task.small else (384, 7 / 6)
  return Setting(
    resolution=resolution,
    precrop=precrop,
    batch_size=512,
    changes=changes,
    warmup=warmup / steps,
  )


# Learning rates for 256 images per batch: SGD's for heads and prompts, AdamW's for bodies.
_HEADS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
_BODIES = (0.0001, 0.0005, 0.001, 0.005)
_BATCH = {'full': 384, 'linear': 1024, 'mlp': 1024}


def vpt(task: Task | Set, tune: dict) -> Setting:
  """A grid of rates and weight decays for each task, from VPT.

  See arXiv 2203.12119, appendix A. Each combination runs once on the training split. The
  final accuracy on the validation split chooses; ties go to the smaller rate. The best one
  then runs with five seeds. VTAB-1k trains on both splits; FGVC, whose photographs are
  cropped and mirrored, trains on the training split only.
  """
  method, photographs = tune.get('method', 'full'), isinstance(task, Set)
  many = method == 'vpt' and (tune.get('number') or 0) >= 100
  batch_size = 64 if many else _BATCH.get(method, 128)
  sgd = method in ('linear', 'mlp', 'vpt')
  rates = _HEADS if sgd else _BODIES
  optim = dict(_SGD) if sgd else dict(name='adamw')
  optim |= dict(lr=rates[0], schedule=dict(decay='cosine'))
  return Setting(
    resolution=224,
    precrop=256 / 224 if photographs else None,
    batch_size=min(batch_size, task.sizes[0]),
    changes={'optim': optim, 'epochs': 100},
    warmup=0.1,
    grid={
      'optim.lr': [float(f'{rate * batch_size / 256:.6g}') for rate in rates],
      'optim.wd': [0.01, 0.001, 0.0001, 0.0],
    },
    seeds=(42, 44, 82, 100, 800),
    photographs=photographs,
  )


PROTOCOLS = {'paper': paper, 'bit': bit, 'vpt': vpt}
