"""Ways to tune, on few labels of classes that the model has not seen (VPT, section 4).

Cells: pre-training on the first half of the classes; then, from this, the first 80 examples
of the other half by each of the methods of `vit_jax.tune`, each at a rate of its own. What
a table of VPT has beside the accuracies stands here, too: how many parameters are trained,
the time of a step, and the memory that it needs beside parameters and batch.
"""

from collections.abc import Mapping

from vit_jax.errors import UserError
from vit_jax.lab.ablate.ablation import SHORT_DIGITS, Ablation, Base
from vit_jax.lab.grid.cells import Cell, RunOf
from vit_jax.tools.inspect import recipe

LABELS = 80
PRETRAINED = 'pretrain'
# Cell -> the config's section `tune`.
CELLS = {
  'full': dict(method='full'),
  'linear': dict(method='linear'),
  'partial': dict(method='partial', blocks=1),
  'mlp': dict(method='mlp', layers=3),
  'bias': dict(method='bias'),
  'adapter': dict(method='adapter', reduction=8),
  'lora': dict(method='lora', rank=4, alpha=8.0),
  'vpt-shallow': dict(method='vpt', number=8),
  'vpt-deep': dict(method='vpt', number=8, deep=True),
}
# Of AdamW on digits: the best of 3e-4, 1e-3, 3e-3, 1e-2, 3e-2 and 0.1 on 200 other images
# of the training split, seed 0; ties go to the smaller.
_RATES = {
  'full': 1e-3,
  'linear': 0.1,
  'partial': 3e-3,
  'mlp': 1e-2,
  'bias': 3e-2,
  'adapter': 0.1,
  'lora': 1e-2,
  'vpt-shallow': 1e-2,
  'vpt-deep': 0.1,
}


def cells(
  config: dict,
  pretrain: Mapping = {},
  tuned: Mapping = {},
  rates: Mapping[str, float] = {},
) -> list[Cell]:
  """Returns the cells; UserError unless the config is of all of a split with its classes.

  Args:
    pretrain, tuned: further changes of pre-training, and of the other cells.
    rates: learning rates by cell, in place of the config's.
  """
  data = config['data']
  split, source = data['split'], recipe.opened(data)
  if not isinstance(data['source'], str) or '[' in split or '+' in split:
    raise UserError(
      f'tune takes the first {LABELS} labels of a split, and config.data.split={split!r} '
      'is not one whole split: name it, --set data.split=train'
    )
  number = getattr(source, 'num_classes', None)
  if number is None or number < 4:
    raise UserError(
      f'tune pre-trains on half of the classes and tunes on the others: {data["source"]!r} '
      f'has {number or "no"} classes that can be told here.'
    )
  few = {
    'data.classes': list(range(number // 2, number)),
    'data.split': f'{split}[:{LABELS}]',
    'weights': {'source': RunOf(PRETRAINED), 'skip': ['head/.*']},
    **tuned,
  }
  rate = lambda name: {'optim.lr': rates[name]} if name in rates else {}
  return [
    Cell(PRETRAINED, {'data.classes': list(range(number // 2)), **pretrain}),
    *(
      Cell(name, few | {'tune': section} | rate(name))
      for name, section in CELLS.items()
    ),
  ]


ABLATION = Ablation(
  cells=cells,
  bases={
    'digits': Base(
      'digits:epochs=30',
      {**SHORT_DIGITS, 'evals.fewshot': None, 'evals.test.every': None},
      {
        'tuned': {'steps': 200, 'data.batch_size': 40, 'checkpoint.every': 200},
        'rates': _RATES,
      },
    )
  },
  seeds=(0, 1, 2),
)
