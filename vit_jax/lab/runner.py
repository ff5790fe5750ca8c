"""Grids of runs: a recipe with other values, each trained with every seed.

A cell is data, {config key: value}; a grid maps the names of cells to cells. Each run is
an ordinary run in OUT/runs/CELL-seedN: the same command resumes it, or only reads its
result once it has finished. OUT/results.csv has a row for each run and OUT/table.md the
means over seeds, both written after every run.
"""

import contextlib
import copy
import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from vit_jax import config as config_lib
from vit_jax import files, models, optim
from vit_jax.check import reported
from vit_jax.config import DURATIONS
from vit_jax.errors import DiskFull, Diverged, RunError, Stopped, UserError
from vit_jax.lab import table
from vit_jax.tools import out_folder
from vit_jax.tools.inspect import recipe
from vit_jax.tools.inspect.model import cost
from vit_jax.train import program, progress, schema

RESULT = 'result.json'  # in a run's folder: the row of results.csv, or why it diverged


class RunOf(NamedTuple):
  """Stands in a cell for the folder of another cell's run of the same seed.

  That cell comes first in the grid: `{'weights': {'source': RunOf('pretrain')}}`.
  """

  cell: str


class Run(NamedTuple):
  """A cell with a seed."""

  cell: str
  changes: Mapping
  seed: int
  config: dict
  folder: Path

  @property
  def name(self) -> str:
    """The name of its folder."""
    return self.folder.name


class Outcome(NamedTuple):
  """The row of a finished run, see `table.row`, or the error that ended it."""

  run: Run
  row: dict | None
  error: RunError | None = None


@dataclasses.dataclass(frozen=True)
class Grid:
  """A grid of runs and, where one is chosen, its best cell once more.

  Attributes:
    title: of the table.
    spec: the recipe of every cell.
    runs: see `plan`.
    out: folder of the runs and tables.
    notes: lines below the table.
    pick: metric whose mean over seeds chooses the best cell; None: none is chosen.
    larger: whether a larger value of `pick` is better.
    final: name of the best cell -> the runs of it that are reported.
    beside: title of a further column, and its texts by cell.
  """

  title: str
  spec: str
  runs: Sequence[Run]
  out: Path
  notes: Sequence[str] = ()
  pick: str | None = None
  larger: bool = True
  final: Callable[[str], list[Run]] | None = None
  beside: tuple[str, Mapping[str, str]] = ('', {})


# -- plan -----------------------------------------------------------------------------


def changed(config: dict, changes: Mapping) -> dict:
  """Returns a copy of a config with other values.

  Args:
    changes: {'optim.lr': value}. A dict replaces a whole section; None removes one, such
      as an evaluation. A duration removes the others.
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


def plan(
  config: dict,
  cells: Mapping[str, Mapping],
  seeds: Sequence[int],
  out: Path,
  model: Mapping = {},
) -> list[Run]:
  """Returns the runs of a grid in their order: seed by seed, all cells of each.

  Args:
    config: the config that the cells change.
    out: the grid's folder.
    model: the section `model` that weights will add, for the checks.

  Raises:
    UserError: for a cell that a run would refuse; nothing has run yet.
  """
  folder = lambda name, seed: out.absolute() / 'runs' / f'{name}-seed{seed}'
  runs = []
  for seed in seeds:
    for name, changes in cells.items():
      assert re.fullmatch(r'[\w.=,+-]+', name), name  # a folder's name
      values = {key: _resolved(value, seed, folder) for key, value in changes.items()}
      # A report for each run would take as long as the run.
      own = changed(config, {**values, 'seed': seed, 'log.report': False})
      runs.append(Run(name, changes, seed, own, folder(name, seed)))
  for run in runs[: len(cells)]:  # the others differ in their seed alone
    with named(f'cell {run.cell!r}'):
      _check(run.config, model)
  return runs


def needs(value) -> set[str]:
  """Returns the names of the cells that a cell's changes start from."""
  if isinstance(value, RunOf):
    return {value.cell}
  if isinstance(value, Mapping):
    return set().union(*map(needs, value.values()))
  return set()


def _resolved(value, seed: int, folder):
  if isinstance(value, RunOf):
    return str(folder(value.cell, seed))
  if isinstance(value, Mapping):
    return {key: _resolved(item, seed, folder) for key, item in value.items()}
  return value


def _check(config: dict, model: Mapping) -> None:
  """Raises the UserError that a run would raise, as far as no data is needed."""
  config = schema.check(config)
  data, model = config['data'], {**model, **config['model']}
  if 'name' not in model:  # the weights will tell
    return
  source = recipe.opened(data)
  try:
    shape = recipe.image_shape(data['pp'], source)
  except (RunError, ValueError):
    pass  # only the data tells the size
  else:
    cost({'num_classes': getattr(source, 'num_classes', None) or 10, **model}, shape)
  if source is not None or config.get('epochs') is None:
    steps = config_lib.total_steps(config, len(source or ()), data['batch_size'])
    with reported('config.optim'):
      optim.build(
        **config['optim'], total_steps=steps, family=models.family(model['name'])
      )


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
  """Puts a name before an error, and our flags in place of those of `vit_jax train`."""
  try:
    yield
  except (UserError, Stopped, DiskFull) as error:
    text = str(error).replace('--workdir', '--out')
    text = re.sub(r'--config\.(?=\w)', '--set ', text)
    raise type(error)(f'{where}: {text}') from error


# -- run ------------------------------------------------------------------------------


class Results:
  """The outcomes of a grid and their tables.

  Attributes:
    outcomes: in the order in which the runs ended.
    best: name of the chosen cell, or None.
    files: {name: path} of the tables that were written.
  """

  def __init__(self, grid: Grid):
    self.grid, self.outcomes, self.best = grid, [], None
    self.files: dict[str, Path] = {}
    self.evals: dict = {}

  @property
  def failed(self) -> list[Outcome]:
    """The runs without a result."""
    return [outcome for outcome in self.outcomes if outcome.error]

  @property
  def exit_code(self) -> int:
    """That of the first failure, or 0."""
    return next((outcome.error.exit_code for outcome in self.failed), 0)

  def rows(self, final: bool = False) -> list[dict]:
    """Returns the rows of the grid's cells, or those of the best cell's final runs."""
    cells = list(dict.fromkeys(run.cell for run in self.grid.runs))
    rows = [outcome.row for outcome in self.outcomes if outcome.row]
    if final:
      return [row for row in rows if row['cell'] not in cells]
    rows = [row for row in rows if row['cell'] in cells]
    return sorted(rows, key=lambda row: cells.index(row['cell']))

  def add(self, outcome: Outcome) -> str:
    """Adds a run, writes the tables with it, and returns its line."""
    self.outcomes.append(outcome)
    self.evals |= outcome.run.config.get('evals', {})
    if outcome.error:
      return f'{outcome.run.name}  failed: {outcome.error}'
    self.write()
    keys = table.metrics([outcome.row], self.evals, self.grid.pick)[:2]
    shown = progress.shown({key: outcome.row[key] for key in keys}, self.evals)
    return f'{outcome.run.name}  {shown}'

  def write(self) -> None:
    """Writes results.csv and table.md, if any run has a result."""
    if rows := [*self.rows(), *self.rows(final=True)]:
      out = self.grid.out
      self.files |= {name: out / name for name in ('results.csv', 'table.md')}
      out_folder.write_csv(out / 'results.csv', table.csv_rows(rows))
      files.replace(out / 'table.md', self.text())

  def records(self) -> list[dict]:
    """Returns the means of each cell, see `table.summary`."""
    rows = [*self.rows(), *self.rows(final=True)]
    return table.summary(rows, table.metrics(rows, self.evals, self.grid.pick))

  def text(self) -> str:
    """Returns the tables as Markdown."""
    grid, notes = self.grid, [*self.grid.notes]
    if grid.pick:
      kind = 'largest' if grid.larger else 'smallest'
      notes.append(f'The best cell has the {kind} mean of {grid.pick}.')
    notes += [f'{x.run.name} failed: {x.error}' for x in self.failed]
    title, texts = grid.beside
    columns = {title: lambda record: texts.get(record['cell'], '')} if texts else {}
    if self.best:
      columns[''] = lambda record: 'best' if record['cell'] == self.best else ''
    return table.cells(grid.title, self.records(), columns, self.evals, notes)

  def record(self) -> dict:
    """Returns the record that --json prints."""
    return {
      'runs': [*self.rows(), *self.rows(final=True)],
      'cells': [table.plain(record) for record in self.records()],
      'best': self.best,
      'failed': {outcome.run.name: str(outcome.error) for outcome in self.failed},
      'files': [str(path) for path in self.files.values()],
    }


def run(
  grid: Grid,
  command: str,
  say: Callable[[str], None],
  discard: bool = False,
  discard_final: bool = False,
) -> Results:
  """Trains the runs of a grid, then those of its best cell.

  A run that diverges, or has too little memory, is left out, and with it those that
  start from it; the others go on.

  Args:
    command: the command line, recorded in every run.
    say: prints a line.
    discard, discard_final: remove the checkpoints of runs of the grid, or of the best
      cell, once they have finished.

  Raises:
    UserError: for a folder with a run of another config, or wrong data.
    Stopped, DiskFull: the same call goes on from there.
  """
  results = Results(grid)
  out_folder.make(grid.out)
  _train(grid.runs, results, command, say, discard)
  results.best = best(results)
  if results.best and grid.final:
    _train(grid.final(results.best), results, command, say, discard_final)
  results.write()
  return results


def best(results: Results) -> str | None:
  """Returns the cell with the best mean of a metric; ties go to the first.

  A cell with a run that has no result is never the best.
  """
  grid, means = results.grid, {}
  for name in dict.fromkeys(run.cell for run in grid.runs):
    mean = table.mean([r for r in results.rows() if r['cell'] == name], grid.pick)
    if mean and mean.number == sum(run.cell == name for run in grid.runs):
      means[name] = mean.mean if grid.larger else -mean.mean
  return max(means, key=means.get, default=None)


def _train(runs: Sequence[Run], results: Results, command, say, discard: bool) -> None:
  sources = set().union(*(needs(run.changes) for run in runs))
  for run in runs:
    start = time.perf_counter()
    outcome = _read(run) or _outcome(run, results, command)
    if discard and outcome.row and run.cell not in sources:
      shutil.rmtree(run.folder / 'checkpoints', ignore_errors=True)
    say(f'{results.add(outcome)}  {time.perf_counter() - start:.0f} s')


def _outcome(run: Run, results: Results, command: str) -> Outcome:
  failed = {(x.run.cell, x.run.seed): x.error for x in results.failed}
  for cell in needs(run.changes):
    if error := failed.get((cell, run.seed)):
      return Outcome(run, None, RunError(f'{cell}, its source, failed: {error}'))
  log = run.folder.parents[1] / 'logs' / f'{run.name}.txt'
  log.parent.mkdir(parents=True, exist_ok=True)
  try:
    with named(run.name), log.open('a') as file, contextlib.redirect_stdout(file):
      program.train(run.config, run.folder, command, results.grid.spec)
  except (UserError, Stopped, DiskFull):
    raise
  except RunError as error:
    if isinstance(error, Diverged):  # it would again
      _write(run, {'diverged': str(error)})
    return Outcome(run, None, error)
  jax.clear_caches()  # the traces of hundreds of runs would fill the memory
  row = table.row(run.folder, run.cell, run.changes, run.seed)
  _write(run, {'row': row})
  return Outcome(run, row)


def _write(run: Run, result: dict) -> None:
  run.folder.mkdir(parents=True, exist_ok=True)
  text = json.dumps({'config': run.config, **result}, indent=1)
  files.replace(run.folder / RESULT, text + '\n')


def _read(run: Run) -> Outcome | None:
  """Returns the outcome of a run that has ended, or None."""
  try:
    result = json.loads((run.folder / RESULT).read_bytes())
    config = result.pop('config')
  except (OSError, ValueError, KeyError):
    return None
  if config == run.config:
    error = Diverged(result['diverged']) if 'diverged' in result else None
    return Outcome(run, result.get('row'), error)
  if (run.folder / 'checkpoints').exists():
    return None  # the run itself tells what differs
  raise UserError(
    f'{run.folder} holds a run of another config, without its checkpoints. Use another '
    '--out, or remove that folder.'
  )
