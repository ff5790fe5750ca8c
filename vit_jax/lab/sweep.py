"""vit_jax sweep --config=CONFIG --set KEY=A,B [KEY=C,D] [--pick METRIC] [--out DIR]"""

import argparse
import copy
import hashlib
import itertools
import re
import shlex
import textwrap
from pathlib import Path

from vit_jax import cli

if __name__ == '__main__':
  # This comes before the imports, because they take a while.
  cli.exit_on_interrupt()

from vit_jax import config as config_lib
from vit_jax import terminal
from vit_jax.check import prefix_errors
from vit_jax.errors import UserError, choose
from vit_jax.lab import runner
from vit_jax.lab.ablations import ABLATIONS, Ablation
from vit_jax.tools import out_folder
from vit_jax.train import metrics, program

_EPILOG = """\
--set KEY=VALUE changes the config, like --config.KEY=VALUE of vit_jax train. Commas separate
values, and every combination is a cell: --set optim.lr=0.01,0.03 optim.wd=0,0.1 makes four.
A list is one value, in brackets: model.patch_size=(4,4),(8,8); put a string with commas in
quotes: 'data.split="a,b"'. Each cell runs with every seed of seed=0,1,2. Of equal cells
--pick takes the first.

--ablation NAME adds ready cells, on a small config of its own unless --config names another:
{names}
Runs are in DIR/runs, and the same command resumes. DIR/results.csv has a row for each run,
DIR/table.md the means over seeds."""
_SETTINGS = dict(nargs='+', action='extend', default=[], metavar='KEY=VALUE[,VALUE]')


def main(argv: list[str]) -> int:
  """Trains the runs of a grid and writes their tables; returns the exit code."""
  args = parse(argv)
  grid = plan(args, out_folder.check_folder(args.out or default_out(args)))
  say = terminal.say if args.json else lambda line: print(line, flush=True)
  say(f'{grid.title}: {len(grid.runs)} runs in {grid.out}')
  if args.dry_run:
    names = [run.name for run in grid.runs]
    say('\n'.join(f'  {name}' for name in names))
    if args.json:
      cli.print_json({'runs': names})
    return 0
  command = shlex.join(['vit_jax', 'sweep', *argv])
  return runner.show(runner.run(grid, command, say, args.discard), args, say)


def parse(argv: list[str]) -> argparse.Namespace:
  """Parses the arguments; raises UserError for a bad command line."""
  names = [f'{name:<10} {a.title}' for name, a in ABLATIONS.items()]
  parser = cli.Parser(
    'vit_jax sweep',
    description='Trains a recipe with every combination of values, and compares them.',
    epilog=_EPILOG.format(names=textwrap.indent('\n'.join(names), '  ')),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add('--config', metavar='NAME|FILE.py[:ARGS]', help='the recipe')
  add('--ablation', metavar='NAME', help='cells of an ablation, see below')
  add('--cells', metavar='A,B', help='only these cells, and the cells they start from')
  add('--pick', metavar='METRIC', help="chooses the best cell, such as 'val/top1'")
  add_options(parser, 'runs/sweep-<config and its changes>')
  args = parser.parse_args(argv)
  if args.ablation:
    choose('ablation', args.ablation, ABLATIONS)
  elif not args.config:
    raise UserError('Name a recipe, --config=NAME, or an --ablation.')
  return args


def add_options(parser: argparse.ArgumentParser, out: str) -> None:
  """Adds the options of every command that trains a grid."""
  add = parser.add_argument
  add('--set', help='values of config keys, see below', **_SETTINGS)
  add('--discard', action='store_true', help='keep no checkpoints of finished runs')
  add('--out', metavar='DIR', help=f'default: {out}')
  add('--dry_run', action='store_true', help='only list the runs')


def default_out(args: argparse.Namespace) -> str:
  """Returns the folder of a sweep that has no --out."""
  specs = filter(None, [args.ablation, args.config])
  words = single_values(args.set)
  return '-'.join(['runs/sweep', *(program.default_name(s, words) for s in specs)])


def single_values(assignments: list[str]) -> list[str]:
  """Returns 'KEY=VALUE' for each key with a single value; the default folder shows them."""
  return [f'{key}={x[0]}' for key, x in parse_values(assignments) if len(x) == 1]


def plan(args: argparse.Namespace, out: Path) -> runner.Grid:
  """Plans the grid of a command line; checks everything before anything runs."""
  plain = Ablation(lambda config: {'base': {}}, '', '')
  ablation = ABLATIONS.get(args.ablation, plain)
  spec = args.config or ablation.config
  changes = {} if args.config else ablation.changes
  base = runner.change(config_lib.load(spec), changes)
  several, common, seeds = divide(args.set)
  with runner.name_errors('--set'):
    config = assign(base, common)
    values = combinations(config, several)
  with prefix_errors(f'--ablation {args.ablation}'):
    cells = _cross(ablation.cells(config), values)
    _check_effect(ablation, base, cells, common)
  cells = _select(cells, args.cells)
  seeds = seeds or (ablation.seeds if args.ablation else [config.get('seed', 0)])
  runs = runner.plan(config, cells, seeds, out)
  larger = not args.pick or metrics.larger_is_better(
    args.pick, config.get('evals', {}), '--pick'
  )
  notes = [f'Each cell is {spec} with changes. ± is the standard deviation over seeds.']
  if shown := [*(f'{k}={v}' for k, v in changes.items()), *common]:
    notes.append(f'All cells: {", ".join(shown)}.')
  title = f'{args.ablation}: {ablation.title}' if args.ablation else f'Sweep of {spec}'
  options = dict(pick=args.pick, larger=larger, beside=ablation.beside)
  return runner.Grid(title, spec, runs, out, notes, **options)


def _cross(ready: dict, cells: dict) -> dict:
  """Combines every cell of an ablation with every combination of values."""
  if len(cells) > 1 and any(map(runner.needs, ready.values())):
    raise ValueError(
      'some of its cells start from the result of another cell: give one value per --set'
    )
  join = lambda *names: '-'.join(name for name in names if name != 'base') or 'base'
  return {
    join(name, combination): {**cell, **values}
    for name, cell in ready.items()
    for combination, values in cells.items()
  }


def _check_effect(ablation, base: dict, cells: dict, assignments: list[str]) -> None:
  """Raises UserError for a --set without effect, because every cell sets that key itself."""
  try:
    unchanged = ablation.cells(base) == cells
  except ValueError:  # without --set, the ablation does not suit the config
    return
  for key in (assignment.partition('=')[0] for assignment in assignments):
    sets = lambda cell, key=key: any(f'{key}.'.startswith(f'{k}.') for k in cell)
    if unchanged and all(map(sets, cells.values())):
      raise UserError(
        f'--set {key}: the cells of this ablation set this key themselves.'
      )


def _select(cells: dict, names: str | None) -> dict:
  """Selects the cells of --cells, and the cells that they start from."""
  if names is None:
    return cells
  selected, waiting = set(), names.split(',')
  while waiting:
    name = waiting.pop()
    selected.add(name)
    waiting += runner.needs(choose('cell', name, cells))
  return {name: cell for name, cell in cells.items() if name in selected}


# -- values ---------------------------------------------------------------------------


def divide(assignments: list[str]) -> tuple[dict, list[str], list[int] | None]:
  """Divides --set into {key: several values}, ['KEY=VALUE', ...], and seeds or None."""
  several, common, seeds = {}, [], None
  for key, texts in parse_values(assignments):
    if key == 'seed':
      if not all(text.isdigit() for text in texts):
        raise UserError(
          f'seed={",".join(texts)}: expected whole numbers, such as seed=0,1,2'
        )
      seeds = list({int(text): None for text in texts})  # 0 and 00 are the same seed
    elif key == 'log.report':
      raise UserError(
        f'--set {key}: the runs of a sweep write no report: write one with `vit_jax report`.'
      )
    elif len(texts) == 1:
      common.append(f'{key}={texts[0]}')
    else:
      several[key] = texts
  return several, common, seeds


# Regex of one value in 'A,B'. Commas within a value stand in brackets, nested up to three
# times, or in quotes that begin the value.
_GROUP = r'[({[][^][(){}]*[])}]'
for _ in range(3):
  _GROUP = rf'[({{[](?:[^][(){{}}]|{_GROUP})*[])}}]'
_QUOTED = r"""(?<![^,])(?:"[^"]*"|'[^']*')"""
_VALUE = re.compile(rf"""(?:{_QUOTED}|{_GROUP}|(?!(?<![^,])["'])[^][(){{}},])+""")


def parse_values(assignments: list[str]) -> list[tuple[str, list[str]]]:
  """Parses 'KEY=A,B' to [(key, texts of its values)]."""
  values: dict[str, list[str]] = {}
  for assignment in assignments:
    key, equals, text = assignment.partition('=')
    text = text if equals else 'True'
    # Not split: the errors of a run suggest values of resume_allow that have commas.
    texts = [text] if key == 'resume_allow' else _VALUE.findall(text)
    if not key or ','.join(texts) != text or not 0 < len(set(texts)) == len(texts):
      raise UserError(
        f'--set {assignment}: expected KEY=VALUE,VALUE, no value twice; a list in '
        f'brackets, {key or "KEY"}=({text}), a string with commas in quotes'
      )
    texts = [text.strip() for text in texts]
    if key in values:
      raise UserError(f'--set {key} appears twice: give all its values in one.')
    values[key] = texts
  durations = [k for k in config_lib.DURATIONS if values.get(k, ['None']) != ['None']]
  if len(durations) > 1:
    raise UserError(f'--set {" and ".join(durations)}: a run takes only one of them.')
  return list(values.items())


def assign(config: dict, assignments: list[str]) -> dict:
  """Copies a config and sets 'KEY=VALUE's in it. Setting a duration removes the others."""
  config = copy.deepcopy(config)
  for assignment in assignments:
    key, _, text = assignment.partition('=')
    if key in config_lib.DURATIONS and text != 'None':
      config = {k: v for k, v in config.items() if k not in config_lib.DURATIONS}
    config_lib.override(config, [assignment])
  return config


def combinations(config: dict, several: dict[str, list[str]]) -> dict[str, dict]:
  """Makes a cell for each combination of values; without values the one cell is 'base'."""
  pairs = [[(key, text) for text in texts] for key, texts in several.items()]
  cells = {}
  for each in itertools.product(*pairs):
    # This checks the types.
    assign(config, [f'{key}={text}' for key, text in each])
    values = {key: config_lib.literal(text) for key, text in each}
    words = [name_cell(key, value) for key, value in values.items()]
    cells[program.folder_name(words) or 'base'] = values
  return cells


def name_cell(key: str, value) -> str:
  """Names a cell by a value: 'optim.lr=0.001', with a hash if characters were replaced."""
  numbers = isinstance(value, list) and all(isinstance(x, int | float) for x in value)
  text = 'x'.join(map(str, value)) if numbers else str(value)
  safe = re.sub(r'[^A-Za-z0-9._+-]+', '_', text)
  if safe != text:
    digest = hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()
    safe = f'{safe.strip("_")}-{digest[:6]}'
  return f'{key}={safe}'


if __name__ == '__main__':
  program.run_and_exit(main)
