"""How the tasks of a benchmark are learned: three published protocols."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vit_jax.lab.vtab.benchmarks import Task


class Setting(NamedTuple):
  """What a protocol says of a task.

  Attributes:
    resolution: pixels on each side.
    precrop: the size before a random crop, as a multiple of the resolution; None: no
      crops and flips, images are resized alone.
    batch_size: of training.
    changes: to the config of `finetune`, see `grid.cells.changed`.
    warmup: the part of the steps over which the rate rises.
    grid: {config key: values}, of which one combination is chosen by the validation
      split; {} if there is nothing to choose.
    seeds: of the runs that are reported.
    square: images are resized to a square; else their shorter side is, and the middle of
      a test image is cropped.
    more_data: what is reported is trained on the examples of the choice, too.
  """

  resolution: int
  precrop: float | None
  batch_size: int
  changes: Mapping
  warmup: float
  grid: Mapping[str, Sequence] = {}
  seeds: Sequence[int] = (0, 1, 2)
  square: bool = True
  more_data: bool = True


class Protocol(NamedTuple):
  """A protocol.

  Attributes:
    title: what it is, for --help and tables.
    setting: (task, the config's section `tune`) -> what it says.
    one_value: keys of the config that it follows from: not to be chosen by the grid.
  """

  title: str
  setting: Callable[[Task, dict], Setting]
  one_value: frozenset[str] = frozenset()


_SGD = dict(name='sgd', momentum=0.9)


def paper(task: Task, tune: dict) -> Setting:
  """The ViT paper's (Table 4, appendix B.1.1 and D.10): one setting for all tasks.

  The preprocessing is BiT's; the warmup that of the reference code, a fifth of the steps.
  """
  optim = dict(_SGD, lr=0.01, clip=1.0, schedule=dict(decay='cosine'))
  optim['moment_dtype'] = 'bfloat16'  # as in configs/finetune.py
  return Setting(384, 7 / 6, 512, {'optim': optim, 'steps': 2500}, 0.2)


def bit(task: Task, tune: dict) -> Setting:
  """BiT-HyperRule (arXiv 1912.11370, section 3.3): by the sizes of set and images.

  As in its code: (steps of warmup, of the three drops of the rate, in all), MixUp for sets
  of 20,000 and more.
  """
  ends = (100, 200, 300, 400, 500)
  if task.trainval >= 20_000:
    ends = (500, 3000, 6000, 9000, 10_000)
  if task.trainval >= 500_000:
    ends = (500, 6000, 12_000, 18_000, 20_000)
  warmup, *drops, steps = ends
  at = [(step - warmup) / (steps - warmup) for step in drops]
  schedule = dict(decay='multistep', at=at, factor=0.1)
  changes = {'optim': dict(_SGD, lr=0.003, schedule=schedule), 'steps': steps}
  if task.trainval >= 20_000:
    changes['task.mixup'] = 0.1
  resolution, precrop = (128, 5 / 4) if task.small else (384, 7 / 6)
  return Setting(resolution, precrop, 512, changes, warmup / steps)


# By method: rates for 256 images, and the batch size.
_HEADS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
_BODIES = (0.0001, 0.0005, 0.001, 0.005)
_VPT_BATCH = {'full': 384, 'linear': 1024, 'mlp': 1024}
_VPT_SGD = ('linear', 'mlp', 'vpt')
_VPT_WD = (0.01, 0.001, 0.0001, 0.0)


def vpt(task: Task, tune: dict) -> Setting:
  """VPT's (arXiv 2203.12119, appendix A): a grid of rates and weight decays.

  A combination is run once on the training split; the accuracy on the validation split
  after the last step chooses, and ties go to the smaller rate. Then five seeds: of VTAB-1k
  on both splits, of FGVC, whose photographs are cropped and mirrored, on the first alone.
  """
  method = tune.get('method', 'full')
  many = method == 'vpt' and (tune.get('number') or 0) >= 100
  batch_size = 64 if many else _VPT_BATCH.get(method, 128)
  sgd = method in _VPT_SGD
  rates = _HEADS if sgd else _BODIES
  optim = dict(_SGD) if sgd else dict(name='adamw')
  optim |= dict(lr=rates[0], schedule=dict(decay='cosine'))
  return Setting(
    224,
    256 / 224 if task.fine_grained else None,
    min(batch_size, task.train),
    {'optim': optim, 'epochs': 100},
    0.1,
    {
      'optim.lr': [float(f'{rate * batch_size / 256:.6g}') for rate in rates],
      'optim.wd': list(_VPT_WD),
    },
    (42, 44, 82, 100, 800),
    square=not task.fine_grained,
    more_data=not task.fine_grained,
  )


PROTOCOLS = {
  'paper': Protocol('one setting for all tasks, of the ViT paper', paper),
  'bit': Protocol('BiT-HyperRule: steps and resolution by the task', bit),
  'vpt': Protocol(
    'a grid of rates and weight decays for each task, of VPT',
    vpt,
    frozenset({'tune', 'tune.method'}),
  ),
}
