"""The command line of `vit_jax vtab`."""

import argparse
import textwrap

from vit_jax import cli
from vit_jax.lab.vtab.benchmarks import FGVC, VTAB, Benchmark
from vit_jax.lab.vtab.protocols import PROTOCOLS

_EPILOG = """\
Protocols:
{protocols}
Tasks, in groups:
{tasks}
With --fgvc:
{fgvc}
SOURCE is a file, a hub folder, the folder of a run or a name of the zoo. Data sets are those
that TFDS prepared, of FGVC also folders; a task whose data is missing is left out, and said.

--set KEY=VALUE overrides the protocol, as --config.KEY=VALUE of vit_jax train: --set
tune.method=linear steps=500. With several values, optim.lr=0.001,0.01, each combination is
tried, and the validation split chooses for each task; seed=0,1,2 are the seeds of what is
reported. Each run is an ordinary run in DIR/TASK/runs; the same command resumes, and several
processes may share a DIR. DIR/table.md and DIR/results.csv have the tasks, groups and mean,
DIR/figure.png the groups."""


def parse(argv: list[str]) -> argparse.Namespace:
  """Returns the arguments, `tasks` as names, `benchmark`; UserError for bad ones."""
  parser = cli.Parser(
    'vit_jax vtab',
    description='Fine-tunes weights on the tasks of VTAB-1k, and reports their accuracy.',
    epilog=_epilog(),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add('source', metavar='SOURCE', help='the weights to start from')
  add(
    '--tasks',
    default='all',
    metavar='NAME,NAME',
    help="'all', or groups and names: natural,dmlab; default: %(default)s",
  )
  add(
    '--protocol',
    choices=list(PROTOCOLS),
    default='paper',
    help='see below; default: %(default)s',
  )
  add(
    '--set',
    nargs='+',
    action='extend',
    default=[],
    metavar='KEY=VALUE[,VALUE]',
    help='values of config keys, see below',
  )
  add('--fgvc', action='store_true', help='the five sets of FGVC in their place')
  add('--resolution', type=cli.positive, help="pixels; default: the protocol's")
  add('--data_dir', metavar='DIR', help="where the data is; default: TFDS's own folder")
  add('--discard', action='store_true', help='keep no checkpoints of finished runs')
  add('--out', metavar='DIR', help='default: runs/vtab-<protocol, source and changes>')
  add('--dry_run', action='store_true', help='only list the runs')
  cli.add_json_option(parser)
  args = parser.parse_args(argv)
  args.benchmark = FGVC if args.fgvc else VTAB
  args.tasks = args.benchmark.chosen(args.tasks)
  return args


def _epilog() -> str:
  protocols = (f'{name:<6} {what.title}' for name, what in PROTOCOLS.items())
  indent = lambda lines: textwrap.indent('\n'.join(lines), '  ')
  return _EPILOG.format(
    protocols=indent(protocols), tasks=indent(_listed(VTAB)), fgvc=indent(_listed(FGVC))
  )


def _listed(benchmark: Benchmark) -> list[str]:
  groups: dict[str, list[str]] = {}
  for name, task in benchmark.tasks.items():
    groups.setdefault(task.group, []).append(name)
  lines = []
  for group, names in groups.items():
    lines += textwrap.wrap(
      f'{group or "all":<11} {", ".join(names)}', 84, subsequent_indent=' ' * 12
    )
  return lines
