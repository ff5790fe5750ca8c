"""The benchmarks VTAB-1k and FGVC, and three published protocols to learn their tasks."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.errors import choose
from vit_jax.lab.data.fgvc import SETS, Set
from vit_jax.lab.data.vtab_tasks import TASKS, Task


class Benchmark(NamedTuple):
  """Tasks, and the splits of each: to choose by, and to train on in the end.

  `mean` is the title of the mean of all tasks; a source is 'SOURCE:TASK'.
  """

  title: str
  mean: str
  tasks: Mapping[str, Task | Set]
  source: str
  train: str
  val: str
  trainval: str

  @property
  def groups(self) -> dict[str, str]:
    """{title of a task: title of its group, or ''}."""
    return {task.title: task.group.capitalize() for task in self.tasks.values()}

  def select(self, text: str) -> list[str]:
    """Returns the names of the tasks of 'all', or of 'GROUP,NAME,...', in their order."""
    names = {'all': list(self.tasks), **{name: [name] for name in self.tasks}}
    for name, task in self.tasks.items():
      if task.group:
        names.setdefault(task.group, []).append(name)
    selected = {n for word in text.split(',') for n in choose('task', word, names)}
    return sorted(selected, key=names['all'].index)


_SPLITS = ('train800', 'val200', 'train800val200')
VTAB = Benchmark('VTAB-1k', 'Mean of 19', TASKS, 'vtab', *_SPLITS)
FGVC = Benchmark('FGVC', 'Mean of 5', SETS, 'fgvc', 'train', 'val', 'trainval')


class Setting(NamedTuple):
  """The settings of a protocol for a task."""

  resolution: int
  # The size before a random crop, as a multiple of the resolution; None: no crops, flips.
  precrop: float | None
  batch_size: int
  changes: Mapping  # To the config of `finetune`.
  warmup: float  # Share of the steps.
  # {config key: values}; the validation split chooses one combination.
  grid: Mapping[str, Sequence] = {}
  seeds: Sequence[int] = (0, 1, 2)
  # Resizes the shorter side, not to a square, crops test images to the middle, and trains
  # on the training split alone in the end.
  photographs: bool = False


_SGD = dict(name='sgd', momentum=0.9)


def paper(task: Task | Set, tune: dict) -> Setting:
  """One setting for all tasks, of the ViT paper.

  Table 4, appendix B.1.1 and D.10. The preprocessing is BiT's; the warmup is a fifth of
  the steps, as in the reference code.
  """
  optim = dict(_SGD, lr=0.01, clip=1.0, schedule=dict(decay='cosine'))
  optim['moment_dtype'] = 'bfloat16'  # as in configs/finetune.py
  return Setting(384, 7 / 6, 512, {'optim': optim, 'steps': 2500}, 0.2)


def bit(task: Task | Set, tune: dict) -> Setting:
  """BiT-HyperRule: steps and resolution by the task.

  arXiv 1912.11370, section 3.3, and its code: steps of warmup, of the three drops of the
  rate, and in all; MixUp for sets of 20,000 and more.
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
  return Setting(resolution, precrop, 512, changes, warmup / steps)


# Rates for 256 images: of heads and prompts by SGD, of bodies by AdamW.
_HEADS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
_BODIES = (0.0001, 0.0005, 0.001, 0.005)
_BATCH = {'full': 384, 'linear': 1024, 'mlp': 1024}


def vpt(task: Task | Set, tune: dict) -> Setting:
  """A grid of rates and weight decays for each task, of VPT.

  arXiv 2203.12119, appendix A. A combination is run once on the training split; the
  accuracy on the validation split after the last step chooses, and ties go to the smaller
  rate. Then five seeds: of VTAB-1k on both splits, of FGVC, whose photographs are cropped
  and mirrored, on the first alone.
  """
  method, photographs = tune.get('method', 'full'), isinstance(task, Set)
  many = method == 'vpt' and (tune.get('number') or 0) >= 100
  batch_size = 64 if many else _BATCH.get(method, 128)
  sgd = method in ('linear', 'mlp', 'vpt')
  rates = _HEADS if sgd else _BODIES
  optim = dict(_SGD) if sgd else dict(name='adamw')
  optim |= dict(lr=rates[0], schedule=dict(decay='cosine'))
  return Setting(
    224,
    256 / 224 if photographs else None,
    min(batch_size, task.sizes[0]),
    {'optim': optim, 'epochs': 100},
    0.1,
    {
      'optim.lr': [float(f'{rate * batch_size / 256:.6g}') for rate in rates],
      'optim.wd': [0.01, 0.001, 0.0001, 0.0],
    },
    (42, 44, 82, 100, 800),
    photographs,
  )


PROTOCOLS = {'paper': paper, 'bit': bit, 'vpt': vpt}
