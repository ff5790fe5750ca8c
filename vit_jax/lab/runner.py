"""Grids of runs: a recipe with changed values, each trained with every seed.

A cell is a set of changes, {config key: value}; a grid has named cells. Each run is an
ordinary run in the folder OUT/runs/CELL-seedN. The same command resumes it; once it has
finished, the command only reads its result. OUT/results.csv has a row per run, OUT/table.md
the means over seeds. Both are written after every run.
"""

import collections
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

from vit_jax import cli, files, models, optim, terminal
from vit_jax import config as config_lib
from vit_jax.check import prefix_errors
from vit_jax.config import DURATIONS
from vit_jax.errors import DiskFull, Diverged, RunError, Stopped, UserError
from vit_jax.lab import table
from vit_jax.tools import out_folder
from vit_jax.tools.inspect import recipe
from vit_jax.tools.inspect.model import cost
from vit_jax.train import program, progress, schema

# A run's file with its row of results.csv, or with the reason why it diverged.
RESULT = 'result.json'


class RunOf(NamedTuple):
  """A placeholder in a cell: the folder of another cell's run with the same seed.

  That cell must come earlier in the grid: `{'weights': {'source': RunOf('pretrain')}}`.
  """

  cell: str


class Run(NamedTuple):
  """A run: one cell, trained with one seed."""

  cell: str
  changes: Mapping
  seed: int
  config: dict
  folder: Path

  @property
  def name(self) -> str:
    return self.folder.name


@dataclasses.dataclass(frozen=True)
class Grid:
  """Runs to train. If `final` is set, the best cell is then trained again, for the report."""

  title: str
  spec: str  # the recipe of all cells
  runs: Sequence[Run]
  out: Path
  notes: Sequence[str] = ()  # lines below the table
  pick: str | None = None  # the metric whose mean over seeds chooses the best cell
  larger: bool = True  # whether larger values of `pick` are better
  # maps the best cell to the runs to report
  final: Callable[[str], list[Run]] | None = None
  # Title of an extra column, and its texts by cell.
  beside: tuple[str, Mapping[str, str]] = ('', {})


# -- plan -----------------------------------------------------------------------------


def change(config: dict, changes: Mapping) -> dict:
  """Copies a config and changes values in it, such as {'optim.lr': 0.1}.

  A dict replaces a whole section; None removes a section, such as an evaluation. Setting
  one duration removes the others.
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
      section[key] = config_lib.to_dicts(value)
  return config


def plan(
  config: dict,
  cells: Mapping[str, Mapping],
  seeds: Sequence[int],
  out: Path,
  model: Mapping = {},
) -> list[Run]:
  """Plans the runs of a grid, seed by seed; raises UserError for a run that cannot work.

  Args:
    cells: {name: changes}.
    model: the section `model` that the weights will provide; the checks need it.
  """
  folder = lambda name, seed: out.absolute() / 'runs' / f'{name}-seed{seed}'
  runs = []
  for seed in seeds:
    for name, changes in cells.items():
      assert re.fullmatch(r'[\w.=,+-]+', name), name  # the name becomes a folder's name
      values = _resolve(changes, lambda cell, seed=seed: str(folder(cell, seed)))
      own = change(config, {**values, 'seed': seed})
      runs.append(Run(name, changes, seed, own, folder(name, seed)))
  for run in runs[: len(cells)]:  # the others differ only in the seed
    with name_errors(f'cell {run.cell!r}'):
      _check(run.config, model)
  return runs


def needs(value) -> set[str]:
  """Returns the names of the cells whose runs are used in a cell's changes."""
  cells = set()
  _resolve(value, cells.add)
  return cells


def _resolve(value, folder: Callable):
  if isinstance(value, RunOf):
    return folder(value.cell)
  if isinstance(value, Mapping):
    return {key: _resolve(item, folder) for key, item in value.items()}
  return value


def _check(config: dict, model: Mapping) -> None:
  """Raises the UserErrors of a run that can be found without the run's data."""
  config = schema.check(config)
  data, model = config['data'], {**model, **config['model']}
  if 'name' not in model:  # the weights will provide the name
    return
  source = recipe.open_bundled(data)
  try:
    _, spec = recipe.trace(config, source)
  except (RunError, ValueError):
    pass  # the size depends on data that is not here yet
  else:
    classes = getattr(source, 'num_classes', None) or 10
    cost({'num_classes': classes, **model}, spec['image'].shape[1:])
  if source is not None or config.get('epochs') is None:
    steps = config_lib.total_steps(config, len(source or ()), data['batch_size'])
    with prefix_errors('config.optim'):
      optim.build(
        **config['optim'], total_steps=steps, family=models.family(model['name'])
      )


@contextlib.contextmanager
def name_errors(where: str) -> Iterator[None]:
  """Prefixes errors with a name, and writes flags of `vit_jax train` as those of a sweep."""
  try:
    yield
  except (UserError, Stopped, DiskFull) as error:
    text = str(error).replace('--workdir', '--out')
    text = re.sub(r'--config\.(?=\w)', '--set ', text)
    raise type(error)(f'{where}: {text}') from error


# -- run ------------------------------------------------------------------------------


class Results:
  """The outcomes of a grid, and their tables.

  An outcome is the row of a run, or the error that ended the run.
  """

  def __init__(self, grid: Grid):
    self.grid, self.best, self.files = grid, None, []
    self.outcomes: list[tuple[Run, dict | RunError]] = []
    self.evals: dict = {}

  @property
  def errors(self) -> dict[str, RunError]:
    """{name of a run: the error that ended it}."""
    return {run.name: x for run, x in self.outcomes if isinstance(x, RunError)}

  def rows(self) -> list[dict]:
    """Returns the rows of finished runs, cell by cell."""
    cells = list(dict.fromkeys(run.cell for run, _ in self.outcomes))
    rows = [row for _, row in self.outcomes if isinstance(row, dict)]
    return sorted(rows, key=lambda row: cells.index(row['cell']))

  def add(self, run: Run, outcome: dict | RunError) -> str:
    """Adds a run, writes the tables again, and returns a line to print."""
    self.outcomes.append((run, outcome))
    self.evals |= run.config.get('evals', {})
    if isinstance(outcome, RunError):
      return f'{run.name}  failed: {outcome}'
    self.write()
    keys = table.metrics([outcome], self.evals, self.grid.pick)[:2]
    return f'{run.name}  {progress.format_numbers({k: outcome[k] for k in keys}, self.evals)}'

  def write(self) -> None:
    """Writes results.csv and table.md if any run has a result."""
    if rows := self.rows():
      self.files = table.write(self.grid.out, rows, self.text())

  def records(self) -> list[dict]:
    """Returns the means of all cells, see `table.summary`."""
    rows = self.rows()
    return table.summary(rows, table.metrics(rows, self.evals, self.grid.pick))

  def text(self) -> str:
    """Returns the tables as Markdown."""
    grid, notes = self.grid, [*self.grid.notes]
    if grid.pick:
      kind = 'largest' if grid.larger else 'smallest'
      notes.append(f'The best cell has the {kind} mean of {grid.pick}.')
    notes += [f'{name} failed: {error}' for name, error in self.errors.items()]
    rows, (title, texts) = table.cells(self.records(), self.evals), grid.beside
    for row in rows:
      if texts:
        row[title] = texts.get(row['cell'], '')
      if self.best:
        row[''] = 'best' if row['cell'] == self.best else ''
    return table.markdown(grid.title, rows, notes)

  def record(self) -> dict:
    """Returns the record that --json prints."""
    means = lambda metrics: {key: x._asdict() for key, x in metrics.items()}
    return {
      'runs': self.rows(),
      'cells': [{**x, 'metrics': means(x['metrics'])} for x in self.records()],
      'best': self.best,
      'failed': {name: str(error) for name, error in self.errors.items()},
      'files': list(map(str, self.files)),
    }


def run(
  grid: Grid,
  command: str,
  say: Callable[[str], None],
  discard: bool = False,
  discard_final: bool = False,
) -> Results:
  """Trains the runs of a grid, then those of its best cell.

  A run that diverges, or needs too much memory, is left out, as are runs that start from
  it. Any other error ends the grid; the same call then continues from there.

  Args:
    command: the command line, recorded in every run.
    discard: whether to remove the checkpoints of finished runs.
    discard_final: the same for the final runs of the best cell.
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
  """Returns the first cell with the best mean. Cells with a failed run do not count."""
  grid, means = results.grid, {}
  for name, count in collections.Counter(run.cell for run in grid.runs).items():
    mean = table.mean([r for r in results.rows() if r['cell'] == name], grid.pick)
    if mean and mean.number == count:
      means[name] = mean.mean if grid.larger else -mean.mean
  return max(means, key=means.get, default=None)


def show(report, args, say: Callable[[str], None], **more) -> int:
  """Prints a report as text or, with --json and `more`, as JSON; returns the exit code."""
  if args.json:
    cli.print_json({**more, **report.record()})
  elif report.files:
    say(f'\n{report.text()}\nwritten: {", ".join(map(str, report.files))}')
  for name, error in report.errors.items():
    terminal.say(f'error: {name}: {error}')
  return next((error.exit_code for error in report.errors.values()), 0)


def _train(runs: Sequence[Run], results: Results, command, say, discard: bool) -> None:
  sources = set().union(*(needs(run.changes) for run in runs))
  for run in runs:
    start = time.perf_counter()
    outcome = _read(run) or _outcome(run, results, command)
    if discard and isinstance(outcome, dict) and run.cell not in sources:
      shutil.rmtree(run.folder / 'checkpoints', ignore_errors=True)
    say(f'{results.add(run, outcome)}  {time.perf_counter() - start:.0f} s')


def _outcome(run: Run, results: Results, command: str) -> dict | RunError:
  for cell in needs(run.changes):
    if error := results.errors.get(f'{cell}-seed{run.seed}'):
      return RunError(f'{cell}, from which it starts, failed: {error}')
  log = run.folder.parents[1] / 'logs' / f'{run.name}.txt'
  log.parent.mkdir(parents=True, exist_ok=True)
  try:
    with name_errors(run.name), log.open('a') as file, contextlib.redirect_stdout(file):
      program.train(run.config, run.folder, command, results.grid.spec)
  except (UserError, Stopped, DiskFull):
    raise
  except RunError as error:
    if isinstance(error, Diverged):  # if run again, it would diverge again
      _write(run, {'diverged': str(error)})
    return error
  # The traces of hundreds of runs would fill the memory, so delete them.
  jax.clear_caches()
  row = table.row(run.folder, run.cell, run.changes, run.seed)
  _write(run, {'row': row})
  return row


def _write(run: Run, result: dict) -> None:
  run.folder.mkdir(parents=True, exist_ok=True)
  text = json.dumps({'config': run.config, **result}, indent=1)
  files.replace(run.folder / RESULT, text + '\n')


def _read(run: Run) -> dict | RunError | None:
  """Reads the outcome of a run that has ended; None if it has not."""
  try:
    result = json.loads((run.folder / RESULT).read_bytes())
    config = result.pop('config')
  except (OSError, ValueError, KeyError):
    return None
  if config == run.config:
    return result.get('row') or Diverged(result['diverged'])
  if (run.folder / 'checkpoints').exists():
    return None  # training will resume, and name the keys that differ
  raise UserError(
    f'{run.folder} holds a run of another config, but no checkpoints. Use another --out, '
    'or remove that folder.'
  )
