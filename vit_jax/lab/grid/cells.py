"""The cells of a grid, and the runs that they stand for: one for each seed."""

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_jax import config as config_lib
from vit_jax import models, optim
from vit_jax.check import reported
from vit_jax.config import DURATIONS
from vit_jax.errors import DataError, InUse, RunError, UserError
from vit_jax.tools.inspect import cost, recipe
from vit_jax.train import schema


class RunOf(NamedTuple):
  """Stands in a cell's changes for the folder of another cell's run, of the same seed.

  That cell has to come first in the grid: `{'weights': {'source': RunOf('pretrain')}}`.
  """

  cell: str


class Cell(NamedTuple):
  """One setting of a grid.

  Attributes:
    name: of its row, and in the names of its folders.
    changes: to the config, see `changed`.
    config: what it changes; None: the grid's.
  """

  name: str
  changes: Mapping
  config: dict | None = None


class Run(NamedTuple):
  """One run of a grid: a cell with a seed."""

  cell: Cell
  seed: int
  config: dict
  folder: Path

  @property
  def name(self) -> str:
    """The name of its folder."""
    return self.folder.name


def changed(config: dict, changes: Mapping) -> dict:
  """Returns a copy of a config with other values.

  Args:
    changes: {'optim.lr': value}. A dict takes the place of a whole section; None removes
      one, such as an evaluation. A duration removes the others.
  """
  config = copy.deepcopy(config)
  for path, value in changes.items():
    *parents, key = path.split('.')
    if path in DURATIONS and value is not None:
      config = {k: v for k, v in config.items() if k not in DURATIONS}
    section = config
    for parent in parents:
      section = section.setdefault(parent, {})
    if value is None and isinstance(section.get(key), dict):
      del section[key]
    else:
      section[key] = config_lib.plain(value)
  return config


def assign(config: dict, assignment: str) -> None:
  """Applies 'KEY=VALUE' to a config in place; a duration takes the place of the others.

  Raises:
    UserError: as `config.override`, and for what a grid sets itself.
  """
  key, _, value = assignment.partition('=')
  if key == 'log.report' and value != 'False':
    raise UserError('log.report: for pages, vit_jax report DIR/runs/RUN.')
  if key in DURATIONS and value != 'None':
    for other in DURATIONS:
      if other != key:
        config.pop(other, None)
  config_lib.override(config, [assignment])


def plan(
  config: dict, cells: Sequence[Cell], seeds: Sequence[int], out: Path
) -> list[Run]:
  """Returns the runs of a grid, in the order in which they are made: seed by seed.

  So a grid that is not finished yet has all cells, of fewer seeds.

  Args:
    config: what the cells change.
    out: the grid's folder; runs are in `out/runs/CELL-seedN`.

  Raises:
    UserError: if a cell's config would be refused; it names the cell. Nothing was run.
  """
  for cell in cells:
    assert re.fullmatch(r'[\w.=,+-]+', cell.name), cell.name  # a folder's name
  folder = lambda name, seed: out.absolute() / 'runs' / f'{name}-seed{seed}'
  runs = []
  for seed in seeds:
    for cell in cells:
      resolved = lambda value, seed=seed: _resolved(value, seed, folder)
      changes = {key: resolved(value) for key, value in cell.changes.items()}
      base = cell.config or config
      # A page for each run would take as long as the run.
      mine = changed(base, {**changes, 'seed': seed, 'log.report': False})
      runs.append(Run(cell, seed, mine, folder(cell.name, seed)))
  for run in runs[: len(cells)]:  # the others differ in their seed
    with named(f'cell {run.cell.name!r}'):
      check(run.config)
  return runs


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
  """Puts a name before a `UserError`, and our flags in place of those of `train`."""
  try:
    yield
  except UserError as error:
    text = re.sub(
      r'--config\.(?=\w)', '--set ', str(error).replace('--workdir', '--out')
    )
    kind = next(k for k in (DataError, InUse, UserError) if isinstance(error, k))
    raise kind(f'{what}: {text}') from error


def needs(cell: Cell) -> list[str]:
  """Returns the names of the cells whose runs a cell starts from."""
  values = [cell.changes]
  found = []
  while values:
    value = values.pop()
    if isinstance(value, RunOf):
      found.append(value.cell)
    elif isinstance(value, Mapping):
      values += value.values()
  return found


def _resolved(value, seed: int, folder):
  if isinstance(value, RunOf):
    return str(folder(value.cell, seed))
  if isinstance(value, Mapping):
    return {key: _resolved(item, seed, folder) for key, item in value.items()}
  return value


def check(config: dict) -> None:
  """Refuses what a run would refuse, as far as that is known without its data.

  Raises:
    UserError: for the config, for a model that does not take such images, or a schedule
      that is longer than the run.
  """
  config = schema.check(config)
  data, model = config['data'], config['model']
  if 'name' not in model:  # the weights will tell
    return
  source = recipe.opened(data)
  shape = image_shape(config)
  if shape is not None:
    classes = getattr(source, 'num_classes', None)
    cost.of({'num_classes': classes or 10, **model}, shape)
  if source is not None or config.get('epochs') is None:
    steps = config_lib.total_steps(config, len(source or ()), data['batch_size'])
    family = models.family(**model)
    with reported('config.optim'):
      optim.build(**config['optim'], total_steps=steps, family=family)


def image_shape(config: dict) -> tuple[int, int, int] | None:
  """Returns [H, W, C] of a config's images; None where only its data tell."""
  data = config['data']
  try:
    return recipe.image_shape(data['pp'], recipe.opened(data))
  except RunError:
    return None
