"""What an ablation is."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.lab.grid.cells import Cell


class Base(NamedTuple):
  """What an ablation changes: a config, made short enough for a table of runs.

  Attributes:
    config: 'NAME:ARGS'.
    changes: see `grid.cells.changed`.
    options: further arguments of the ablation's `cells`.
  """

  config: str
  changes: Mapping = {}
  options: Mapping = {}


class Ablation(NamedTuple):
  """An ablation.

  Attributes:
    cells: (config, **options) -> cells; UserError for a config that they do not fit.
    bases: bundled data -> what is run on it; the first is the default.
    seeds: the default.
    draw: name in `draw.py` of how it is drawn.
    published: cell -> what the paper prints for it, as text.
    published_as: of what that is: the title of the column.
  """

  cells: Callable[..., list[Cell]]
  bases: Mapping[str, Base]
  seeds: Sequence[int] = (0,)
  draw: str = 'compared'
  published: Mapping[str, str] = {}
  published_as: str = ''


# Changes to configs/digits.py for short runs: an average would lag behind, and position
# embeddings that start at 0.02 would hardly grow, so they start at 1 / sqrt(width).
SHORT_DIGITS = {'optim.ema': None, 'evals.test_ema': None, 'log.every': 0.25}
SHORT_DIGITS |= {'model.posemb_std': None}
# An evaluation of colour models of 32 x 32 pixels on data that they were not trained on.
TRANSFER_TO_DIGITS = dict(
  type='fewshot',
  datasets=dict(digits=dict(source='digits', train='train', test='test')),
  pp="decode(3)|resize(32, method='bicubic')|value_range(-1, 1)",
  batch_size=360,
  shots=[5, 10],
)


def need_vit(config: dict, name: str) -> dict:
  """Returns a config's section `model`; UserError unless that is a ViT without ResNet."""
  family, fields = resolved(config, name)
  if family != 'vit' or fields.get('stem_blocks') is not None:
    what = f'a {family}' if family != 'vit' else 'a hybrid'
    raise UserError(
      f'{name} is of ViTs, and config.model is {what}: choose another --config.'
    )
  return config['model']


def resolved(config: dict, name: str) -> tuple[str, dict]:
  """Returns (family, fields given by name or variant) of a config's model."""
  section = dict(config.get('model', {}))
  if 'name' not in section:
    raise UserError(
      f'{name} trains from scratch: it needs config.model.name, which this config leaves '
      'to its weights. Choose another --config.'
    )
  return models.resolve(section.pop('name'), section.pop('variant', None), **section)
