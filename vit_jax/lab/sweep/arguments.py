"""The command line of `vit_jax sweep`."""

import argparse
import os
from collections.abc import Mapping

from vit_jax import cli
from vit_jax.errors import UserError

_EPILOG = """\
--set KEY=VALUE changes the config, as --config.KEY=VALUE of vit_jax train. With several
values, separated by commas, every combination of them is run: --set optim.lr=0.01,0.03
optim.wd=0,0.1 is four runs. A list is one value, in brackets: model.patch_size=(4,4),(8,8);
a text with commas is one in quotes: 'data.split="a,b"'. The results of several seeds,
seed=0,1,2, are averaged. Cells are numbered in the order given, the last key fastest; of
equal ones --pick takes the first.

Each run is an ordinary run in DIR/runs, named by its values; the same command resumes it,
or only reads it if it is finished. Several processes may share a DIR: a run that another
one is at is skipped. --task I/N makes every N-th run, from the I-th; in an array job of
SLURM that is the default. DIR/results.csv has a row for each run, DIR/table.md the means
over seeds."""


def parse(argv: list[str]) -> argparse.Namespace:
  """Returns the arguments, `task` as (number from 0, count); UserError for bad ones."""
  parser = cli.Parser(
    'vit_jax sweep',
    description='Trains a recipe with every combination of values, and compares them.',
    epilog=_EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add('--config', required=True, metavar='NAME|FILE.py[:ARGS]', help='the recipe')
  settings = dict(nargs='+', action='extend', default=[], metavar='KEY=VALUE[,VALUE]')
  add('--set', help='values of config keys, see below', **settings)
  add('--pick', metavar='METRIC', help="what chooses the best cell, such as 'val/top1'")
  add(
    '--final',
    help='run the best cell again with these, such as data.split=train+val seed=3,4',
    **settings,
  )
  add('--task', type=_task, metavar='I/N', help='the I-th of N shares of the runs')
  add(
    '--discard',
    action='store_true',
    help='remove the checkpoints of finished runs, but those of --final',
  )
  add('--out', metavar='DIR', help='default: runs/sweep-<config and its changes>')
  add('--dry_run', action='store_true', help='only list the runs')
  cli.add_json_option(parser)
  args = parser.parse_args(argv)
  if args.final and not args.pick:
    raise UserError(
      '--final runs the best cell again: say by what it is, --pick METRIC.'
    )
  return args


def _task(text: str) -> tuple[int, int]:
  number, slash, count = text.partition('/')
  if not (slash and number.isdigit() and count.isdigit()):
    raise argparse.ArgumentTypeError(f'{text!r} is not I/N, such as 1/4')
  number, count = int(number), int(count)
  if not 1 <= number <= count:
    raise argparse.ArgumentTypeError(
      f'{text!r}: I is from 1 to N; for an array from 0, use $((SLURM_ARRAY_TASK_ID + 1))'
    )
  return number - 1, count


def of_slurm(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
  """Returns (number from 0, count) of this task of a SLURM array; None outside of one.

  Raises:
    UserError: for an array whose numbers are not at equal distances, or where some of
      the variables are missing: a share that is not run would not be noticed.
  """
  if 'SLURM_ARRAY_TASK_ID' not in environment:
    return None
  names = ('ID', 'COUNT', 'MIN', 'STEP')
  texts = [environment.get(f'SLURM_ARRAY_TASK_{n}', '') for n in names]
  if all(text.isdigit() for text in texts):
    number, count, first, step = map(int, texts)
    index, rest = divmod(number - first, max(step, 1))
    if step and not rest and 0 <= index < count:
      return index, count
  given = ', '.join(
    f'SLURM_ARRAY_TASK_{n}={t}' for n, t in zip(names, texts, strict=True)
  )
  raise UserError(f'{given}: which share that is cannot be told; say it, --task I/N.')
