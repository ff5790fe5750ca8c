"""vit_jax vtab SOURCE [--tasks natural,dmlab] [--protocol paper|bit|vpt] [--out DIR]"""

import argparse
import math
import shlex
import textwrap
from pathlib import Path

from vit_jax import cli

if __name__ == '__main__':
  # This comes before the imports, because they take a while.
  cli.exit_on_interrupt()

from vit_jax import config as config_lib
from vit_jax import terminal, weights
from vit_jax.errors import DataError, RunError, UserError
from vit_jax.lab import published, runner, sweep, table
from vit_jax.lab.protocols import FGVC, PROTOCOLS, VTAB, Setting
from vit_jax.tools import out_folder
from vit_jax.train import program

PICK, REPORTED = 'val/top1', 'test/top1'
# Images per micro-batch, few enough for any device; the same as in configs/finetune.py.
_MICRO_BATCH = 64
_EPILOG = """\
Protocols:
{}
Tasks, in the groups natural, specialized and structured:
{}
With --fgvc:
{}
SOURCE is a file, a hub folder, the folder of a run or a name of the zoo. TFDS prepares the
data sets of VTAB; those of FGVC are folders. A task without data is left out, and named.

--set KEY=VALUE overrides the protocol, as --config.KEY=VALUE of vit_jax train. If there are
several values, optim.lr=0.001,0.01, the validation split chooses one for each task. The seeds
seed=0,1,2 are those reported. Runs are in DIR/TASK/runs, and the same command resumes."""


def main(argv: list[str]) -> int:
  """Trains on all tasks and writes the results; returns the exit code."""
  args = _parse(argv)
  words = ['fgvc' if args.fgvc else 'vtab', args.protocol, Path(args.source).name]
  name = program.folder_name([*words, *sweep.single_values(args.set)])
  out = out_folder.check_folder(args.out or f'runs/{name}')
  model = read_model(args.source)
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
    try:
      # The checkpoints of runs that choose hyperparameters are not needed afterwards.
      discard = args.discard or bool(grid.final)
      report.add(name, runner.run(grid, command, say, discard, args.discard))
    except DataError as error:
      # Report the cause: unlike the error, it does not have the name of one of the runs.
      report.errors[name] = error.__cause__ or error
      say(f'left out: {report.errors[name]}')
  return runner.show(report, args, say, runs=runs)


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
  add('--fgvc', action='store_true', help='use the five sets of FGVC instead')
  add('--resolution', type=cli.positive, help="pixels; default: the protocol's")
  add('--data_dir', metavar='DIR', help="where the data is; default: TFDS's own folder")
  sweep.add_options(parser, 'runs/vtab-<protocol, source and changes>')
  args = parser.parse_args(argv)
  args.benchmark = FGVC if args.fgvc else VTAB
  args.tasks = args.benchmark.select(args.tasks)
  return args


# -- the runs of a task ---------------------------------------------------------------


def read_model(source: str) -> dict:
  """Returns the model of weights for colour images, as the section `model` of a config."""
  header = weights.from_section(source)
  if header.channels != 3:
    raise UserError(f'{source}: expected 3 channels, but it has {header.channels}.')
  return weights.complete({}, header)


def plan(args: argparse.Namespace, name: str, model: dict, out: Path) -> runner.Grid:
  """Plans the grid of a task in a folder of `out`; makes all checks that need no data."""
  benchmark, task = args.benchmark, args.benchmark.tasks[name]
  several, common, seeds = sweep.divide(args.set)
  own = {assignment.partition('=')[0] for assignment in common}
  _check_keys(args.protocol, several, own)
  with runner.name_errors('--set'):
    overrides: dict = {}
    config_lib.override(overrides, common)
    tune = overrides.get('tune', {})
    setting = PROTOCOLS[args.protocol](task, tune if isinstance(tune, dict) else {})
    config = sweep.assign(_config(args, name, setting, model), common)
    if 'val' not in config['evals']:
      raise UserError(
        'config.evals needs val, which measures the accuracy: change its keys instead.'
      )
    grid = {k: [*map(str, v)] for k, v in setting.grid.items() if k not in own}
    cells = sweep.combinations(config, grid | several)

  def plan_runs(cells: dict, seeds, examples: int) -> list[runner.Run]:
    for key, cell in cells.items():
      follows = _derive(runner.change(config, cell), overrides, setting, examples)
      cells[key] = {**cell, **follows}
    return runner.plan(config, cells, seeds, out / name, model)

  def final(cell: str) -> list[runner.Run]:
    both = not setting.photographs
    split = benchmark.trainval if both else benchmark.train
    values = {**cells[cell], 'data.split': split, 'evals': _use_test_split(config)}
    key = f'final-{cell}' if search else cell
    return plan_runs({key: values}, seeds or setting.seeds, task.sizes[both])

  spec = f'{args.source} on {name} by the protocol {args.protocol}'
  search = bool(grid | several)
  with runner.name_errors(f'{name}, --resolution or --set'):
    again = final(next(iter(cells)))
    runs = plan_runs(dict(cells), [0], task.sizes[0]) if search else again
  options = (PICK, True, final) if search else ()
  return runner.Grid(task.title, spec, runs, out / name, (), *options)


def _check_keys(protocol: str, several: dict, own: set[str]) -> None:
  for key in {*several, *own}:
    if key == 'data' or key.startswith(('data.source', 'data.split')):
      instead = '--tasks, --data_dir, or vit_jax sweep for other data'
      raise UserError(f'--set {key}: the benchmark fixes this key. Use {instead}.')
  if protocol == 'vpt' and (wrong := {'tune', 'tune.method'} & several.keys()):
    raise UserError(
      f'--set {min(wrong)}: give one value, because the grid of vpt depends on it.'
    )


def _config(args, name: str, setting: Setting, model: dict) -> dict:
  benchmark, task = args.benchmark, args.benchmark.tasks[name]
  size = args.resolution or setting.resolution
  resize = lambda size: f"resize({size}, rounding='nearest')"
  small = lambda size: f"resize_small({size}, rounding='nearest')"
  before = round(size * (setting.precrop or 1))
  crops = setting.precrop and task.crop
  first = small if setting.photographs else resize
  ops = [first(before), f'random_crop({size})'] if crops else [resize(size)]
  if setting.precrop and task.flip:
    ops.append('flip_lr')
  tests = [resize(size)]
  if setting.photographs:
    tests = [small(before), f'central_crop({size})']
  pp = lambda ops: '|'.join(['decode(3)', *ops, 'value_range'])
  data = {'source': f'{benchmark.source}:{name}'}
  if args.data_dir:
    data['source_options'] = {'data_dir': args.data_dir}
  val = dict(data, split=benchmark.val, batch_size=128, pp=pp(tests))
  train = dict(data, split=benchmark.train, batch_size=setting.batch_size, pp=pp(ops))
  # The recipe sets the keys that protocols leave open: weights, a new head, no pre_logits.
  recipe = config_lib.load('finetune')
  recipe = {k: v for k, v in recipe.items() if k not in config_lib.DURATIONS}
  # The recipe's keys are for a ViT: drop those that another family lacks.
  section = {k: v for k, v in recipe['model'].items() if k in (*model, 'dtype')}
  changes = {
    'model': section,
    'weights.source': args.source,
    'data': train,
    'evals': {'val': dict(type='classification', data=val)},
    'checkpoint': {'every': 0.25, 'keep_latest': 2},
    'log': {'every': 0.1, 'tensorboard': False},
  }
  return runner.change(recipe, {**changes, **setting.changes})


def _use_test_split(config: dict) -> dict:
  """Returns the section `evals` with the test split instead of the validation split."""
  evals = runner.change(config, {'evals.val.data.split': 'test'})['evals']
  evals['test'] = evals.pop('val')
  return evals


def _derive(config: dict, overrides: dict, setting: Setting, examples: int) -> dict:
  """Derives warmup and accumulation from steps and batch size, unless --set gives them."""
  changes, batch = {}, config['data']['batch_size']
  own = config_lib.lookup(overrides, 'optim.schedule.warmup')
  if own is None and isinstance(config['optim'].get('schedule'), dict):
    steps = config_lib.total_steps(config, examples, batch)
    changes['optim.schedule.warmup'] = math.floor(steps * setting.warmup)
  if config_lib.lookup(overrides, 'optim.accum') is None:
    parts = max(batch // _MICRO_BATCH, 1)
    changes['optim.accum'] = parts if batch % parts == 0 else 1
  return changes


# -- the report -----------------------------------------------------------------------


class Report:
  """Results of the tasks, errors of those that failed, and their tables."""

  def __init__(self, args: argparse.Namespace, out: Path):
    self._args, self._out, self._benchmark = args, out, args.benchmark
    self.results: dict[str, runner.Results] = {}
    self.errors: dict[str, RunError] = {}
    self.files: list[Path] = []

  def add(self, name: str, results: runner.Results) -> None:
    """Adds a task, and writes the tables again."""
    self.results[name] = results
    # One combination that diverges is merely a bad one; it is a failure if all diverge.
    prefix = 'final-' if results.best else ''
    if errors := [x for run, x in results.errors.items() if run.startswith(prefix)]:
      self.errors[name] = errors[0]
    if self.accuracies():
      self.files = table.write(self._out, self._rows(), self.text())

  def accuracies(self) -> dict[str, list[float]]:
    """Returns {task: test accuracies of its runs, in per cent}."""
    accuracies = {}
    for name, results in self.results.items():
      final = f'final-{results.best}' if results.grid.final else None
      rows = [row for row in results.rows() if final in (None, row['cell'])]
      if rows:
        accuracies[name] = [100 * row[REPORTED] for row in rows]
    return accuracies

  def means(self) -> dict[str, table.Mean]:
    """Returns {title: mean} over all tasks and over each group, where no result is missing."""
    benchmark, accuracies = self._benchmark, self.accuracies()
    by_title = {benchmark.tasks[name].title: x for name, x in accuracies.items()}
    return table.scores(benchmark.groups, benchmark.mean, by_title)

  def _rows(self) -> list[dict[str, str]]:
    keys, rows = ('task', 'group', 'accuracy', 'std', 'runs', 'chosen'), []
    for name, values in self.accuracies().items():
      task, chosen = self._benchmark.tasks[name], self.results[name].best or ''
      mean = table.Mean.compute(values)
      rows.append((task.title, task.group, *mean.texts(), str(mean.number), chosen))
    rows += [(title, '', *mean.texts(), '', '') for title, mean in self.means().items()]
    return [dict(zip(keys, row, strict=True)) for row in rows]

  def text(self) -> str:
    """Returns the table as Markdown, with the numbers of the paper's Table 9."""
    args, benchmark, accuracies = self._args, self._benchmark, self.accuracies()
    rows = [
      {
        'task': row['task'],
        'group': row['group'],
        'test accuracy (%)': ' ± '.join(filter(None, (row['accuracy'], row['std']))),
        'runs': row['runs'],
        'chosen': row['chosen'],
      }
      for row in self._rows()
    ]
    for name, numbers in published.TABLE_9.items() if benchmark is VTAB else ():
      paper = {k: [x] for k, x in zip(VTAB.groups, numbers, strict=True)}
      means = table.scores(VTAB.groups, VTAB.mean, paper)
      for row in rows:
        number = means[x].mean if (x := row['task']) in means else paper[x][0]
        row[f'{name}, paper'] = f'{number:.1f}'
    words = [f'--resolution {args.resolution}'] if args.resolution else []
    notes = [
      f'Protocol {", ".join([args.protocol, *args.set, *words])}.',
      '± is the standard deviation over runs, of a task or of the mean.',
    ]
    if len(accuracies) < len(benchmark.tasks):
      mean = table.score(list(accuracies.values())).mean
      notes.append(
        f'{len(accuracies)} of {len(benchmark.tasks)} tasks: their plain mean, '
        f'{mean:.2f} %, is not that of {benchmark.title}.'
      )
    notes += [f'{benchmark.tasks[name].title}: {e}' for name, e in self.errors.items()]
    title = f'{benchmark.title}: {Path(args.source).name}'
    return table.markdown(title, rows, notes)

  def record(self) -> dict:
    """Returns the record that --json prints, with accuracies in per cent."""
    means = {title: score._asdict() for title, score in self.means().items()}
    return {
      'tasks': {
        name: {'accuracies': values, 'chosen': self.results[name].best}
        for name, values in self.accuracies().items()
      },
      'mean': means.pop(self._benchmark.mean, None),
      'groups': means,
      'failed': {name: str(error) for name, error in self.errors.items()},
      'files': list(map(str, self.files)),
    }


if __name__ == '__main__':
  program.run_and_exit(main)
