"""vit_jax sweep --config=CONFIG --set KEY=A,B [KEY=C,D] [--pick METRIC] [--out DIR]"""

import argparse
import hashlib
import itertools
import re
import shlex
import textwrap
from pathlib import Path

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax import config as config_lib
from vit_jax import terminal
from vit_jax.check import reported
from vit_jax.errors import UserError, choose
from vit_jax.lab import runner
from vit_jax.lab.ablations import ABLATIONS, Ablation
from vit_jax.tools import out_folder
from vit_jax.train import metrics, program

_EPILOG = """\
--set KEY=VALUE changes the config, as --config.KEY=VALUE of vit_jax train. Commas separate
values, and every combination is a cell: --set optim.lr=0.01,0.03 optim.wd=0,0.1 makes four.
A list is one value, in brackets: model.patch_size=(4,4),(8,8); put a string with commas in
quotes: 'data.split="a,b"'. Each cell runs with every seed of seed=0,1,2. The last key
changes fastest; of equal cells --pick takes the first.

--ablation NAME adds ready cells, on a small config of its own unless --config names another:
{names}
Each run is an ordinary run in DIR/runs, named by its values; the same command resumes it,
or only reads it once it has finished. DIR/results.csv has a row for each run, DIR/table.md
the means over seeds."""


def main(argv: list[str]) -> int:
  """Trains the runs of the grid and writes the tables; returns the exit code."""
  args = parse(argv)
  grid = plan(args, out_folder.check(args.out or default_out(args)))
  say = terminal.say if args.json else lambda line: print(line, flush=True)
  say(f'{grid.title}: {len(grid.runs)} runs in {grid.out}')
  if args.dry_run:
    for run in grid.runs:
      say(f'  {run.name}')
    if args.json:
      cli.print_json({'runs': [run.name for run in grid.runs]})
    return 0
  command = shlex.join(['vit_jax', 'sweep', *argv])
  results = runner.run(grid, command, say, args.discard)
  if args.json:
    cli.print_json(results.record())
  elif results.files:
    written = ', '.join(map(str, results.files.values()))
    say(f'\n{results.text()}\nwritten: {written}')
  for outcome in results.failed:
    terminal.say(f'error: {outcome.run.name} failed: {outcome.error}')
  return results.exit_code


def parse(argv: list[str]) -> argparse.Namespace:
  """Returns the arguments; UserError for a bad command line."""
  names = [f'{name:<10} {a.title}' for name, a in ABLATIONS.items()]
  parser = cli.Parser(
    'vit_jax sweep',
    description='Trains a recipe with every combination of values, and compares them.',
    epilog=_EPILOG.format(names=textwrap.indent('\n'.join(names), '  ')),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  settings = dict(nargs='+', action='extend', default=[], metavar='KEY=VALUE[,VALUE]')
  add('--config', metavar='NAME|FILE.py[:ARGS]', help='the recipe')
  add('--ablation', metavar='NAME', help='cells of an ablation, see below')
  add('--cells', metavar='A,B', help='only these cells, and those they start from')
  add('--set', help='values of config keys, see above', **settings)
  add('--pick', metavar='METRIC', help="chooses the best cell, such as 'val/top1'")
  add(
    '--final',
    help='run the best cell again with these, such as data.split=train+val seed=3,4',
    **settings,
  )
  add(
    '--discard',
    action='store_true',
    help='remove the checkpoints of finished runs, but those of --final',
  )
  add('--out', metavar='DIR', help='default: runs/sweep-<config and its changes>')
  add('--dry_run', action='store_true', help='only list the runs')
  cli.add_json_option(parser)
  args = parser.parse_args(argv)
  if args.ablation:
    choose('ablation', args.ablation, ABLATIONS)
  elif not args.config:
    raise UserError('Name a recipe, --config=NAME, or an --ablation.')
  if args.final and not args.pick:
    raise UserError('--final runs the best cell again: choose it by --pick METRIC.')
  return args


def default_out(args: argparse.Namespace) -> str:
  """Returns the folder of a sweep without --out; more values do not make another."""
  words = [f'{key}={texts[0]}' for key, texts in parsed(args.set) if len(texts) == 1]
  specs = filter(None, [args.ablation, args.config])
  return '-'.join(['runs/sweep', *(program.default_name(s, words) for s in specs)])


def plan(args: argparse.Namespace, out: Path) -> runner.Grid:
  """Returns the grid of a command line, all of it checked.

  Raises:
    UserError: for a config, key, value, cell or metric that cannot be; nothing has run.
  """
  plain = Ablation(lambda config: {'base': {}}, '', '')
  ablation = ABLATIONS.get(args.ablation, plain)
  spec, changes = args.config, {}
  if not args.config:
    spec, changes = ablation.config, ablation.changes
  base = runner.changed(config_lib.load(spec), changes)
  several, common, seeds = divided(args.set)
  with runner.named('--set'):
    config = assigned(base, common)
    values = combinations(config, several)
  with reported(f'--ablation {args.ablation}'):
    cells = _crossed(ablation.cells(config), values)
    _check_effect(ablation, base, cells, common)
  cells = _selected(cells, args.cells)
  seeds = seeds or (ablation.seeds if args.ablation else [config.get('seed', 0)])
  runs = runner.plan(config, cells, seeds, out)
  evals, final, larger = config.get('evals', {}), None, True
  if args.pick:
    larger = metrics.larger_is_better(args.pick, evals, '--pick')
  if args.final:
    several, again, seeds_again = divided(args.final)
    if several:
      raise UserError(f'--final {min(several)}: only seed can have several values.')
    with runner.named('--final'):
      pairs = (assignment.partition('=') for assignment in again)
      values = {key: config_lib.literal(text) for key, _, text in pairs}

      def final(cell: str):
        renamed = {f'final-{cell}': {**cells[cell], **values}}
        return runner.plan(config, renamed, seeds_again or seeds, out)

      final(next(iter(cells)))
  notes = [f'Each cell is {spec} with changes. ± is the standard deviation over seeds.']
  if common or changes:
    shown = [*(f'{k}={v}' for k, v in changes.items()), *common]
    notes.append(f'All cells: {", ".join(shown)}.')
  title = f'{args.ablation}: {ablation.title}' if args.ablation else f'Sweep of {spec}'
  options = args.pick, larger, final, ablation.beside
  return runner.Grid(title, spec, runs, out, notes, *options)


def _crossed(ready: dict, cells: dict) -> dict:
  """Returns every cell of an ablation with every combination of values."""
  if len(cells) > 1 and any(map(runner.needs, ready.values())):
    raise ValueError('its cells start from one another: one value for each --set')
  join = lambda *names: '-'.join(name for name in names if name != 'base') or 'base'
  return {
    join(name, combination): {**cell, **values}
    for name, cell in ready.items()
    for combination, values in cells.items()
  }


def _check_effect(ablation, base: dict, cells: dict, assignments: list[str]) -> None:
  """Raises UserError for a --set that changes no cell, as all of them set that key."""
  try:
    unchanged = ablation.cells(base) == cells
  except ValueError:  # it fits only with --set
    return
  for key in (assignment.partition('=')[0] for assignment in assignments):
    sets = lambda cell, key=key: any(f'{key}.'.startswith(f'{k}.') for k in cell)
    if unchanged and all(map(sets, cells.values())):
      raise UserError(f'--set {key}: the cells of this ablation set that themselves.')


def _selected(cells: dict, names: str | None) -> dict:
  """Returns the cells of --cells, with those that they start from, in their order."""
  if names is None:
    return cells
  selected, waiting = set(), names.split(',')
  while waiting:
    name = waiting.pop()
    selected.add(name)
    waiting += runner.needs(choose('cell', name, cells))
  return {name: cell for name, cell in cells.items() if name in selected}


# -- values ---------------------------------------------------------------------------


def divided(assignments: list[str]) -> tuple[dict, list[str], list[int] | None]:
  """Divides --set into keys with several values, those with one, and the seeds.

  Returns:
    ({key: texts of its values}, ['KEY=VALUE'], seeds or None).
  """
  several, common, seeds = {}, [], None
  for key, texts in parsed(assignments):
    if key == 'seed':
      if not all(text.isdigit() for text in texts):
        raise UserError(f'seed={",".join(texts)}: expected whole numbers, seed=0,1,2')
      seeds = [int(text) for text in texts]
    elif len(texts) == 1:
      common.append(f'{key}={texts[0]}')
    else:
      several[key] = texts
  return several, common, seeds


def parsed(assignments: list[str]) -> list[tuple[str, list[str]]]:
  """Returns [(key, texts of its values)] of 'KEY=A,B'."""
  values: dict[str, list[str]] = {}
  for assignment in assignments:
    key, equals, text = assignment.partition('=')
    # resume_allow is a list in one text, as messages suggest it.
    texts = [text] if key == 'resume_allow' else split(text if equals else 'True')
    if not key or '' in texts or len(set(texts)) < len(texts):
      raise UserError(
        f'--set {assignment}: expected KEY=VALUE or KEY=VALUE,VALUE, no value twice; a '
        f'list is one value, in brackets: {key or "KEY"}=({text})'
      )
    if key in values:
      raise UserError(f'--set {key} is there twice: give all its values at once.')
    values[key] = texts
  durations = [k for k in config_lib.DURATIONS if values.get(k, ['None']) != ['None']]
  if len(durations) > 1:
    raise UserError(f'--set {" and ".join(durations)}: a run has one duration.')
  return list(values.items())


def split(text: str) -> list[str]:
  """Splits a text at its commas, but those within brackets or quotes.

  Raises:
    UserError: for a bracket or quote without its other half.
  """
  parts, depth, quote = [''], 0, ''
  for letter in text:
    if quote:
      quote = '' if letter == quote else quote
    elif letter in '\'"' and (depth or not parts[-1]):
      quote = letter
    else:
      depth += (letter in '([{') - (letter in ')]}')
    if letter == ',' and not (depth or quote):
      parts.append('')
    else:
      parts[-1] += letter
    if depth < 0:
      break
  if depth or quote:
    raise UserError(f'--set {text}: a bracket or quote has no other half.')
  return [part.strip() for part in parts]


def assigned(config: dict, assignments: list[str]) -> dict:
  """Returns a copy of a config with 'KEY=VALUE's; a duration replaces the others."""
  for assignment in assignments:
    key, _, text = assignment.partition('=')
    if key == 'log.report' and text != 'False':
      raise UserError('log.report: for reports, vit_jax report DIR/runs/RUN.')
    replaces = key in config_lib.DURATIONS and text != 'None'
    drop = config_lib.DURATIONS if replaces else ()
    config = runner.changed({k: v for k, v in config.items() if k not in drop}, {})
    config_lib.override(config, [assignment])
  return config


def combinations(config: dict, several: dict[str, list[str]]) -> dict[str, dict]:
  """Returns a cell for each combination of values; 'base' alone without any."""
  pairs = [[(key, text) for text in texts] for key, texts in several.items()]
  cells = {}
  for each in itertools.product(*pairs):
    assigned(config, [f'{key}={text}' for key, text in each])  # checks types
    values = {key: config_lib.literal(text) for key, text in each}
    words = [name_of(key, value) for key, value in values.items()]
    cells[program.folder_name(words) or 'base'] = values
  return cells


def name_of(key: str, value) -> str:
  """Returns 'optim.lr=0.001' in characters that a folder's name can have.

  A hash stands for characters that such a name cannot show.
  """
  numbers = isinstance(value, list) and all(isinstance(x, int | float) for x in value)
  text = 'x'.join(map(str, value)) if numbers else str(value)
  safe = re.sub(r'[^A-Za-z0-9._+-]+', '_', text)
  if safe != text:
    digest = hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()
    safe = f'{safe.strip("_")}-{digest[:6]}'
  return f'{key}={safe}'


if __name__ == '__main__':
  program.run_and_exit(main)
