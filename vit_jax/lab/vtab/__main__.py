"""vit_jax vtab SOURCE [--tasks natural,dmlab] [--protocol paper|bit|vpt] [--out DIR]"""

import argparse
import math
import shlex
import statistics
import textwrap
from pathlib import Path

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax import config as config_lib
from vit_jax import files, terminal, weights
from vit_jax.errors import DataError, RunError, UserError
from vit_jax.lab import published, runner, sweep, table
from vit_jax.lab.vtab.protocols import FGVC, PROTOCOLS, VTAB, Setting
from vit_jax.tools import out_folder
from vit_jax.train import program

PICK, REPORTED = 'val/top1', 'test/top1'
_MICRO_BATCH = 64  # images that a device is sure to hold, as in configs/finetune.py
_EVAL_BATCH = 128
# Keys that a benchmark sets, and where to say something else.
_FIXED = {
  'data.source': '--tasks',
  'data.source_options': '--data_dir',
  'data.split': 'vit_jax sweep, which has no benchmark',
}
_EPILOG = """\
Protocols:
{}
Tasks, in the groups natural, specialized and structured:
{}
With --fgvc:
{}
SOURCE is a file, a hub folder, the folder of a run or a name of the zoo. Data sets are those
that TFDS prepared, of FGVC also folders; a task without data is left out, and named.

--set KEY=VALUE overrides the protocol, as --config.KEY=VALUE of vit_jax train: --set
tune.method=linear steps=500. Of several values, optim.lr=0.001,0.01, the validation split
chooses for each task; seed=0,1,2 are the seeds that are reported. Each run is an ordinary
run in DIR/TASK/runs, and the same command resumes. DIR/table.md and DIR/results.csv have the
tasks, groups and mean, beside the ViT paper's Table 9."""


def main(argv: list[str]) -> int:
  """Trains on the tasks and writes the results; returns the exit code."""
  args = _parse(argv)
  out = out_folder.check(args.out or _default_out(args))
  model = model_of(args.source)
  grids = {name: plan(args, name, model, out) for name in args.tasks}
  say = terminal.say if args.json else lambda line: print(line, flush=True)
  report, runs = Report(args, out), 0
  for name, grid in grids.items():
    number = len(grid.runs) + (len(grid.final(grid.runs[0].cell)) if grid.final else 0)
    runs += number
    say(f'{name}: {number} runs')
  say(f'{args.source}: tasks: {len(grids)}, runs: {runs}, in {out}')
  for name, grid in {} if args.dry_run else grids.items():
    say(f'\n== {grid.title}')
    command = shlex.join(['vit_jax', 'vtab', *argv])
    try:  # checkpoints of runs to choose by are of no use afterwards
      discard = args.discard or bool(grid.final)
      report.add(name, runner.run(grid, command, say, discard, args.discard))
    except DataError as error:
      report.errors[name] = error.__cause__ or error  # without the name of the run
      say(f'left out: {report.errors[name]}')
  if args.json:
    cli.print_json({'runs': runs, **report.record()})
  elif report.files:
    written = ', '.join(map(str, report.files.values()))
    say(f'\n{report.text()}\nwritten: {written}')
  for name, error in report.errors.items():
    terminal.say(f'error: {name}: {error}')
  return next((error.exit_code for error in report.errors.values()), 0)


def _parse(argv: list[str]) -> argparse.Namespace:
  titles = [f'  {n:<6} {p.__doc__.splitlines()[0]}' for n, p in PROTOCOLS.items()]
  names = lambda benchmark: textwrap.fill(', '.join(benchmark.tasks), 86)
  parser = cli.Parser(
    'vit_jax vtab',
    description='Fine-tunes weights on the tasks of VTAB-1k, and reports their accuracy.',
    epilog=_EPILOG.format('\n'.join(titles), names(VTAB), names(FGVC)),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add('source', metavar='SOURCE', help='the weights to start from')
  help_ = "'all', or groups and names: natural,dmlab; default: %(default)s"
  add('--tasks', default='all', metavar='NAME,NAME', help=help_)
  add('--protocol', choices=list(PROTOCOLS), default='paper', help='see below')
  settings = dict(nargs='+', action='extend', default=[], metavar='KEY=VALUE[,VALUE]')
  add('--set', help='values of config keys, see below', **settings)
  add('--fgvc', action='store_true', help='the five sets of FGVC in their place')
  add('--resolution', type=cli.positive, help="pixels; default: the protocol's")
  add('--data_dir', metavar='DIR', help="where the data is; default: TFDS's own folder")
  add('--discard', action='store_true', help='keep no checkpoints of finished runs')
  add('--out', metavar='DIR', help='default: runs/vtab-<protocol, source and changes>')
  add('--dry_run', action='store_true', help='only count the runs')
  cli.add_json_option(parser)
  args = parser.parse_args(argv)
  args.benchmark = FGVC if args.fgvc else VTAB
  args.tasks = args.benchmark.select(args.tasks)
  return args


def _default_out(args) -> str:
  words = [
    f'{key}={texts[0]}' for key, texts in sweep.parsed(args.set) if len(texts) == 1
  ]
  words = [
    'fgvc' if args.fgvc else 'vtab',
    args.protocol,
    Path(args.source).name,
    *words,
  ]
  return f'runs/{program.folder_name(words)}'


# -- the runs of a task ---------------------------------------------------------------


def model_of(source: str) -> dict:
  """Returns the model of weights for colour images, as a config's section `model`."""
  loaded = weights.from_section(source)
  if loaded.channels != 3:
    raise UserError(
      f'{source} takes {loaded.channels}-channel images, not colour images.'
    )
  return weights.complete({}, loaded)


def plan(args: argparse.Namespace, name: str, model: dict, out: Path) -> runner.Grid:
  """Returns the grid of a task, checked as far as its data is not needed.

  Args:
    model: see `model_of`.
    out: the folder of all tasks.

  Raises:
    UserError: for a --set that cannot be, or images that the model does not take.
  """
  benchmark, task = args.benchmark, args.benchmark.tasks[name]
  several, common, seeds = sweep.divided(args.set)
  own = {assignment.partition('=')[0] for assignment in common}
  _check_keys(args.protocol, several, own)
  with runner.named('--set'):
    overrides: dict = {}
    config_lib.override(overrides, common)
    tune = overrides.get('tune', {})
    setting = PROTOCOLS[args.protocol](task, tune if isinstance(tune, dict) else {})
    config = sweep.assigned(_config(args, name, setting, model), common)
    if 'val' not in config['evals']:
      raise UserError('evals has no val, which measures the accuracy: change its keys.')
    grid = {
      k: [*map(str, v)] for k, v in setting.grid.items() if k not in own
    } | several
    cells = sweep.combinations(config, grid)
  follow = lambda cell, examples: {
    **cell,
    **_following(runner.changed(config, cell), overrides, setting, examples),
  }
  examples = task.sizes[setting.more_data]
  final = {
    'data.split': benchmark.trainval if setting.more_data else benchmark.train,
    'evals': _reported(config),
  }
  seeds = seeds or setting.seeds
  planned = lambda cells, seeds: runner.plan(config, cells, seeds, out / name, model)

  def again(cell: str) -> list[runner.Run]:
    changes = follow({**cells[cell], **final}, examples)
    return planned({f'final-{cell}': changes}, seeds)

  spec = f'{args.source} on {name} by the protocol {args.protocol}'
  with runner.named(f'{name}, --resolution or --set'):
    if not grid:
      runs = planned({'base': follow(final, examples)}, seeds)
      return runner.Grid(task.title, spec, runs, out / name)
    runs = planned({k: follow(cell, task.sizes[0]) for k, cell in cells.items()}, [0])
    again(next(iter(cells)))
  return runner.Grid(task.title, spec, runs, out / name, (), PICK, True, again)


def _check_keys(protocol: str, several: dict, own: set[str]) -> None:
  for key in {*several, *own}:
    for name, instead in _FIXED.items():
      if key in (name, 'data') or key.startswith(f'{name}.'):
        raise UserError(
          f'--set {key}: a task has data and splits of its own. See {instead}.'
        )
  if protocol == 'vpt' and (wrong := {'tune', 'tune.method'} & several.keys()):
    raise UserError(
      f'--set {min(wrong)}: the grid of the protocol vpt follows from it: one value.'
    )


def _config(args, name: str, setting: Setting, model: dict) -> dict:
  benchmark, task = args.benchmark, args.benchmark.tasks[name]
  size = args.resolution or setting.resolution
  resize = lambda size: f"resize({size}, rounding='nearest')"
  small = lambda size: f"resize_small({size}, rounding='nearest')"
  before = round(size * (setting.precrop or 1))
  crops = setting.precrop and task.crop
  first = resize if setting.square else small
  ops = [first(before), f'random_crop({size})'] if crops else [resize(size)]
  if setting.precrop and task.flip:
    ops.append('flip_lr')
  tests = [resize(size)] if setting.square else [small(before), f'central_crop({size})']
  pp = lambda ops: '|'.join(['decode(3)', *ops, 'value_range(-1, 1)'])
  data = {'source': f'{benchmark.source}:{name}'}
  if args.data_dir:
    data['source_options'] = {'data_dir': args.data_dir}
  val = dict(data, split=benchmark.val, batch_size=_EVAL_BATCH, pp=pp(tests))
  train = dict(data, split=benchmark.train, batch_size=setting.batch_size, pp=pp(ops))
  # The recipe has what a protocol leaves open: weights, a new head, no pre_logits.
  recipe = config_lib.load('finetune')
  recipe = {k: v for k, v in recipe.items() if k not in config_lib.DURATIONS}
  # Its keys are those of a ViT; another family has no pre_logits to leave out.
  section = {k: v for k, v in recipe['model'].items() if k in (*model, 'dtype')}
  return runner.changed(
    recipe,
    {
      'model': section,
      'weights.source': args.source,
      'data': train,
      'evals': {'val': dict(type='classification', data=val)},
      'checkpoint': {'every': 0.25, 'keep_latest': 2},
      'log': {'every': 0.1, 'tensorboard': False},
      **setting.changes,
    },
  )


def _reported(config: dict) -> dict:
  """Returns the section `evals` with the test split in place of the validation split."""
  evals = runner.changed(config, {})['evals']
  evals['test'] = evals.pop('val')
  evals['test']['data']['split'] = 'test'
  return evals


def _following(config: dict, overrides: dict, setting: Setting, examples: int) -> dict:
  """Returns the changes that follow from steps and batch size, unless --set has them.

  Args:
    overrides: the sections that --set has alone.
    examples: of the training split.
  """
  changes, batch = {}, config['data']['batch_size']
  schedule = config['optim'].get('schedule')
  own = config_lib.lookup(overrides, 'optim.schedule.warmup')
  if own is None and isinstance(schedule, dict):
    steps = config_lib.total_steps(config, examples, batch)
    changes['optim.schedule.warmup'] = math.floor(steps * setting.warmup)
  if config_lib.lookup(overrides, 'optim.accum') is None:
    parts = max(batch // _MICRO_BATCH, 1)
    changes['optim.accum'] = parts if batch % parts == 0 else 1
  return changes


# -- the report -----------------------------------------------------------------------


class Report:
  """The results of the tasks and their tables.

  Attributes:
    accuracies: {task: test accuracies of its runs, per cent}.
    chosen: {task: the cell that the validation split chose}.
    errors: {task: why it has no result, or lacks runs}.
    files: the files that were written.
  """

  def __init__(self, args: argparse.Namespace, out: Path):
    self._args, self._out, self._benchmark = args, out, args.benchmark
    self.accuracies: dict[str, list[float]] = {}
    self.chosen: dict[str, str | None] = {}
    self.errors: dict[str, RunError] = {}
    self.files: dict[str, Path] = {}

  def add(self, name: str, results: runner.Results) -> None:
    """Adds a task and writes the tables with it."""
    final = bool(results.grid.final)
    if rows := results.rows(final):
      self.accuracies[name] = [100 * row[REPORTED] for row in rows]
      self.chosen[name] = results.best
    # A combination that diverges is a bad one, no failure; unless all do.
    failed = results.failed
    if results.best:
      failed = [x for x in failed if x.run.cell.startswith('final-')]
    if failed:
      self.errors[name] = failed[0].error
    if self.accuracies:
      self.files |= {key: self._out / key for key in ('results.csv', 'table.md')}
      out_folder.write_csv(self.files['results.csv'], self._rows())
      files.replace(self.files['table.md'], self.text())

  def means(self) -> dict[str, table.Score]:
    """Returns the mean of all tasks, and of each group that is complete, by title."""
    return table.scores(self._benchmark.groups, self._benchmark.mean, self._by_title())

  def _by_title(self) -> dict[str, list[float]]:
    tasks = self._benchmark.tasks
    return {tasks[name].title: values for name, values in self.accuracies.items()}

  def _rows(self) -> list[tuple]:
    rows = [('task', 'group', 'accuracy', 'std', 'runs', 'chosen')]
    for name, values in self.accuracies.items():
      task, chosen = self._benchmark.tasks[name], self.chosen[name] or ''
      rows.append((task.title, task.group, *table.texts(values), chosen))
    for title, (mean, std) in self.means().items():
      shown = '' if std is None else f'{std:.2f}'
      rows.append((title, '', f'{mean:.2f}', shown, '', ''))
    return rows

  def text(self) -> str:
    """Returns the table as Markdown."""
    args, benchmark = self._args, self._benchmark
    columns = {
      'task': lambda row: row[0],
      'group': lambda row: row[1],
      'test accuracy (%)': lambda row: f'{row[2]} ± {row[3]}' if row[3] else row[2],
      'runs': lambda row: str(row[4]),
      'chosen': lambda row: row[5],
    }
    for name, row in published.TABLE_9.items() if benchmark is VTAB else ():
      paper = {task: [x] for task, x in zip(VTAB.groups, row, strict=True)}
      means = table.scores(VTAB.groups, VTAB.mean, paper)
      paper = {task: x for task, (x,) in paper.items()} | {
        k: m.mean for k, m in means.items()
      }
      columns[f'{name}, paper'] = lambda row, paper=paper: f'{paper[row[0]]:.1f}'
    words = [f'--resolution {args.resolution}'] if args.resolution else []
    notes = [
      f'Protocol {args.protocol}{"".join(f", {x}" for x in [*args.set, *words])}.',
      '± is the standard deviation over runs; of a mean, that of the mean.',
    ]
    if len(self.accuracies) < len(benchmark.tasks):
      mean = statistics.fmean(map(statistics.fmean, self.accuracies.values()))
      notes.append(
        f'{len(self.accuracies)} of {len(benchmark.tasks)} tasks: their plain mean, '
        f'{mean:.2f} %, is not that of {benchmark.title}.'
      )
    notes += [f'{benchmark.tasks[name].title}: {e}' for name, e in self.errors.items()]
    title = f'{benchmark.title}: {Path(args.source).name}'
    return table.markdown(title, self._rows()[1:], columns, notes)

  def record(self) -> dict:
    """Returns the record that --json prints; accuracies in per cent."""
    means = {title: score._asdict() for title, score in self.means().items()}
    return {
      'tasks': {
        name: {'accuracies': values, 'chosen': self.chosen[name]}
        for name, values in self.accuracies.items()
      },
      'mean': means.pop(self._benchmark.mean, None),
      'groups': means,
      'failed': {name: str(error) for name, error in self.errors.items()},
      'files': list(map(str, self.files.values())),
    }


if __name__ == '__main__':
  program.run_and_exit(main)
