"""What tuning costs in parameters: Table 1 of VPT, and its table of ConvNets.

The parameters of all tasks together, with one backbone shared by them (of full
fine-tuning with one each), divided by those of the backbone (arXiv 2203.12119).
"""

import math
from typing import NamedTuple

from vit_jax.lab.data import fgvc, vtab_tasks


class Row(NamedTuple):
  """A row of the table.

  Attributes:
    name: of the method, with its options.
    section: the config's section `tune`.
    paper: what the paper prints; None: it does not, or chose options for each task.
  """

  name: str
  section: dict
  paper: float | None = None


_VIT = (
  Row('full', dict(method='full'), 24.02),
  Row('linear', dict(method='linear'), 1.02),
  Row('partial-1', dict(method='partial', blocks=1), 3.00),
  Row('partial-2', dict(method='partial', blocks=2)),
  Row('partial-4', dict(method='partial', blocks=4)),
  *(
    Row(f'mlp-{k}', dict(method='mlp', layers=k), 1.35 if k == 3 else None)
    for k in (2, 3, 5, 9)
  ),
  Row('bias', dict(method='bias'), 1.05),
  *(
    Row(f'adapter, D / {r}', dict(method='adapter', reduction=r))
    for r in (8, 64, 128, 256)
  ),
  *(Row(f'lora, rank {r}', dict(method='lora', rank=r)) for r in (4, 8, 16)),
  *(
    Row(
      f'vpt {"deep" if deep else "shallow"}, {p}',
      dict(method='vpt', number=p, deep=deep),
    )
    for deep in (False, True)
    for p in (1, 5, 10, 50, 100, 200)
  ),
)
_CONVNET = (
  Row('full', dict(method='full')),
  Row('linear', dict(method='linear')),
  Row('partial-1', dict(method='partial', blocks=1)),
  Row('mlp-3', dict(method='mlp', layers=3)),
  Row('bias', dict(method='bias')),
  *(Row(f'vpt pad, {p}', dict(method='vpt', number=p)) for p in (1, 3, 5, 10, 16, 30)),
)
_VTAB = [task.classes for task in vtab_tasks.TASKS.values()]
_BOTH = [*_VTAB, *(s.classes for s in fgvc.SETS.values())]
# Model, classes of the tasks, rows, and what the paper prints for them.
TABLES = (
  ('vit:B/16', _BOTH, _VIT, {}),
  (
    'convnext:B',
    _VTAB,
    _CONVNET,
    {'full': 19.01, 'linear': 1.01, 'partial-1': 2.84, 'mlp-3': 1.47, 'bias': 1.04},
  ),
  (
    'resnet:50',
    _VTAB,
    _CONVNET,
    {'full': 19.08, 'linear': 1.08, 'partial-1': 4.69, 'mlp-3': 7.87, 'bias': 1.10},
  ),
)
_NOTES = """
  Of adapters and prompts the paper prints what was chosen for each task, on ViT-B/16 1.23
  (adapter), 1.04 (shallow) and 1.18 (deep), on ConvNeXt-B 1.02 and on ResNet-50 1.09 (pad).
  LoRA is not in it.
"""


def rows(tables=TABLES) -> list[dict]:
  """Returns a row for each model and method.

  A row has the keys model, tasks (their number), name, tune (the section), tuned
  (parameters for a task, without its head), ratio (of the total), paper.
  """
  found = []
  for model, classes, methods, printed in tables:
    every, head = _parameters(model, {'method': 'full'})
    # `head` is of one class: weights and a bias, of which a task has one for each.
    for name, section, paper in methods:
      tuned, _ = _parameters(model, section)
      total = len(classes) * tuned + head * sum(classes)
      if section['method'] != 'full':
        total += every
      found.append(
        {
          'model': model,
          'tasks': len(classes),
          'name': name,
          'tune': section,
          'tuned': tuned,
          'ratio': total / every,
          'paper': printed.get(name, paper),
        }
      )
  return found


def _parameters(name: str, section: dict) -> tuple[int, int]:
  """Returns the number of those that a task trains: (without its head, of the head)."""

  from vit_jax import models, trees, tune

  model = models.build(name, num_classes=1)
  shape = (224, 224, 3)
  tuned, rules = tune.attach(model, models.family_of(model), shape, **section)
  params = models.shapes_of(tuned, shape)['params']
  trained, _ = tune.partition(params, rules)
  sizes = {n: math.prod(x.shape) for n, x in trees.flatten(trained).items()}
  head = sum(size for n, size in sizes.items() if n.startswith('head/'))
  return sum(sizes.values()) - head, head


def render(rows: list[dict]) -> str:
  """Returns the tables as text."""
  lines = ['VPT: parameters of all tasks, divided by those of one backbone']
  for model in dict.fromkeys(row['model'] for row in rows):
    mine = [row for row in rows if row['model'] == model]
    title = f'{model}, {mine[0]["tasks"]} tasks'
    lines += ['', f'  {title:<24}{"tuned for a task":>18}{"ratio":>9}{"paper":>9}']
    for row in mine:
      paper = f'{row["paper"]:.2f}' if row['paper'] else ''
      text = f'  {row["name"]:<24}{row["tuned"]:>18,}{row["ratio"]:>9.3f}{paper:>9}'
      lines.append(text.rstrip())
  return '\n'.join(lines) + '\n' + _NOTES.rstrip()
