"""Masked patch prediction, then few labels (ViT paper, section 4.6 and appendix B.1.2).

Cells: pre-training on the images of a split without their labels, for each of the three
targets and with 15 per cent of the patches corrupted in place of half of them; then the
recipe with the first 100 labels, from each of these and from scratch. Few-shot regression
on the frozen features stands beside, where the recipe has it, as the paper chose by it:
the mean colour was best, pixels slightly worse, 15 per cent slightly worse. Of few labels
it has no numbers.
"""

from collections.abc import Mapping

from vit_jax.errors import UserError
from vit_jax.lab import published
from vit_jax.lab.ablate.ablation import Ablation, Base, need_vit
from vit_jax.lab.grid import cells as grid
from vit_jax.lab.grid.cells import Cell, RunOf

LABELS = 100
TASKS = {
  **{name: dict(target=name) for name in ('mean_color', 'downsized', 'pixels')},
  'mean_color-15pct': dict(target='mean_color', rate=0.15),
}


def cells(config: dict, pretrain: Mapping = {}) -> list[Cell]:
  """Returns the cells; UserError unless the config is of a ViT, on all of a split.

  Args:
    config: of the training with labels.
    pretrain: further changes of it for pre-training, see `grid.cells.changed`.
  """
  need_vit(config, 'masked')
  split = config['data']['split']
  if not isinstance(config['data']['source'], str) or '[' in split or '+' in split:
    raise UserError(
      f'masked takes the first {LABELS} labels of a split, and config.data.split={split!r} '
      'is not one whole split: name it, --set data.split=train'
    )
  without = grid.changed(config, {**_without_labels(config), **pretrain})
  few = {'data.split': f'{split}[:{LABELS}]'}
  return [
    *(
      Cell(f'pretrain-{name}', {'task': dict(name='masked_patches', **task)}, without)
      for name, task in TASKS.items()
    ),
    Cell('scratch', few),
    *(
      Cell(name, few | {'weights': {'source': RunOf(f'pretrain-{name}')}})
      for name in TASKS
    ),
  ]


def _without_labels(config: dict) -> dict:
  """Returns what pre-training changes besides the task: no head, evaluations of its own."""
  evals = {}
  for name, section in config.get('evals', {}).items():
    section = {key: x for key, x in section.items() if key != 'use_ema'}
    if section['type'] == 'fewshot':
      evals[name] = section
    elif section['type'] == 'classification':
      kept = {key: section[key] for key in ('data', 'every') if key in section}
      evals[f'masked_{name}'] = dict(type='masked_patches', **kept)
  changes = {'evals': evals, 'weights': {}}
  changes |= {key: None for key in ('checkpoint.best', 'checkpoint.patience')}
  if 'num_classes' in config['model']:  # of the data, not of a head
    model = {k: v for k, v in config['model'].items() if k != 'num_classes'}
    changes |= {'model': model, 'data.num_classes': config['model']['num_classes']}
  return changes


ABLATION = Ablation(
  cells=cells,
  bases={
    'digits': Base(
      'digits:epochs=500,batch=50',
      {
        'optim.ema': None,
        'evals.test_ema': None,
        'evals.test.every': None,
        'evals.fewshot.shots': [10],
        'log.every': 0.25,
      },
      {'pretrain': {'steps': 1000, 'data.batch_size': 128}},
    ),
  },
  published={'mean_color': '79.9', 'scratch': str(published.TABLE_5['ViT-B/16'][0])},
  published_as='B/16, all labels of ImageNet (%), paper, section 4.6 and Table 5',
)
