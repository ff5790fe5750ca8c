"""Adam or SGD for pre-training ResNets (ViT paper, appendix D.1 and Table 7).

Cells: AdamW and SGD with momentum. The one that the recipe has is as it is there; the
other has the paper's settings for ResNets: AdamW at 1e-3 with weight decay 0.1 (Table 3),
or SGD as BiT has it, at 0.03 per 256 images with weight decay 1e-3 of the rate. Schedule,
clipping and accumulation are the recipe's. On bundled data a small BiT learns the classes
of 'shapes', and few-shot regression on handwritten digits is the transfer; SGD's rate is
0.3 there, the best of 0.03, 0.1 and 0.3: BiT's is meant for a thousand times the steps.
"""

import statistics

from vit_jax.errors import UserError
from vit_jax.lab import published
from vit_jax.lab.ablate.ablation import TRANSFER_TO_DIGITS, Ablation, Base, resolved
from vit_jax.lab.grid.cells import Cell

_COMMON = ('schedule', 'clip', 'accum', 'ema')


def cells(config: dict, sgd_lr: float | None = None) -> list[Cell]:
  """Returns the cells; UserError unless the config is of a ResNet by one of the two.

  Args:
    sgd_lr: the rate of SGD, where the config is not of that; None: as BiT has it.
  """
  family, _ = resolved(config, 'optimizer')
  if family not in ('bit', 'resnet_gn'):
    raise UserError(
      f'optimizer is of ResNets (bit, resnet_gn), and config.model is a {family}: choose '
      'another --config, such as bit_i21k.'
    )
  given = config['optim']
  common = {key: given[key] for key in _COMMON if key in given}
  sections = {
    'adam': dict(name='adamw', lr=1e-3, wd=0.1, **common),
    'sgd': dict(
      name='sgd',
      lr=sgd_lr or 0.03 * config['data']['batch_size'] / 256,
      wd=1e-3,
      momentum=0.9,
      **common,
    ),
  }
  kinds = {'adamw': 'adam', 'adam': 'adam', 'sgd': 'sgd'}
  if given['name'] not in kinds:
    raise UserError(
      f'optimizer compares adamw and sgd, and config.optim is {given["name"]!r}: choose '
      'another --config.'
    )
  sections[kinds[given['name']]] = given
  return [Cell(name, {'optim': section}) for name, section in sections.items()]


def _published(optimizer: str) -> str:
  of = lambda model: statistics.fmean(published.TABLE_7[model, optimizer])
  return ', '.join(f'{of(model):.2f} ({model})' for model in ('R50x1', 'R152x2'))


ABLATION = Ablation(
  cells=cells,
  bases={
    'shapes:class': Base(
      'shapes:steps=400,test=test[:1000]',
      {
        'model': dict(name='bit', blocks=[1, 1, 1], width=32),
        'evals.transfer': TRANSFER_TO_DIGITS,
      },
      {'sgd_lr': 0.3},
    ),
  },
  published={name: _published(name) for name in ('adam', 'sgd')},
  published_as='fine-tuned after JFT, mean of 5 sets (%), paper, Table 7',
)
