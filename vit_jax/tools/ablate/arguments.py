"""The command line of `vit_jax ablate`."""

import argparse
import importlib
import textwrap
from collections.abc import Mapping

from vit_jax import cli
from vit_jax import config as config_lib
from vit_jax.errors import UserError, choose
from vit_jax.tools.grid import cells as grid

# Ablation -> what it compares. Each is a module here, with `ABLATION`.
NAMES = {
  'posemb': 'position embeddings (Table 8)',
  'head': 'class token or pooling, with their learning rates (Figure 9)',
  'shape': "scaling a ViT's depth, width, MLP width and patches (Figure 8)",
  'optimizer': 'Adam or SGD for pre-training ResNets (Table 7)',
  'masked': 'masked patch prediction, then few labels (section 4.6, B.1.2)',
  'data_size': 'size of the pre-training data, ViT and ResNet (Figures 3 and 4)',
}

_EPILOG = """\
NAME is one of
{names}
Without --config and --data it takes bundled data, and minutes on two cores. Each run is
an ordinary run in DIR/runs, resumed or only read by the same command; DIR/results.csv has
a row for each, DIR/table.md the means over seeds, DIR/NAME.png draws them."""


def parse(argv: list[str]) -> argparse.Namespace:
  """Returns the arguments; UserError for a bad command line."""
  if argv and not argv[0].startswith('-'):
    choose('ablation', argv[0], list(NAMES))
  rows = (f'{name:<10} {what}' for name, what in NAMES.items())
  parser = cli.Parser(
    'vit_jax ablate',
    description='Trains the cells of an ablation of the ViT paper, and compares them.',
    epilog=_EPILOG.format(names=textwrap.indent('\n'.join(rows), '  ')),
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add('name', metavar='NAME', choices=list(NAMES), help='what to ablate, see below')
  add('--seeds', type=_seeds, metavar='0,1,2', help='one run of each cell for each')
  add('--data', metavar='SOURCE', help='bundled data, or a folder or tfds:NAME')
  add('--config', metavar='NAME|FILE.py[:ARGS]', help='the recipe that cells change')
  add(
    '--set',
    nargs='+',
    action='extend',
    default=[],
    metavar='KEY=VALUE',
    help="keys of every cell's config",
  )
  add('--cells', metavar='A,B', help='these alone')
  add('--metric', help="what is drawn, such as 'test/top1'")
  add('--out', metavar='DIR', help='default: runs/ablate-NAME')
  cli.add_json_option(parser)
  args = parser.parse_args(argv)
  args.out = args.out or f'runs/ablate-{args.name}'
  return args


def _seeds(text: str) -> list[int]:
  words = text.split(',')
  if not all(word.isdigit() for word in words):
    raise argparse.ArgumentTypeError(f'{text!r} is not a list of whole numbers: 0,1,2')
  return list(dict.fromkeys(int(word) for word in words))


def ablation(name: str):
  """Returns the `Ablation` of a name."""
  return importlib.import_module(f'vit_jax.tools.ablate.{name}').ABLATION


def base(args: argparse.Namespace, found) -> tuple[str, dict, Mapping]:
  """Returns ('NAME:ARGS', config, options of the cells) of what an ablation changes.

  --data that is bundled chooses a base of the ablation; other data is the argument `data`
  of the config, which is `folder` unless --config names another.

  Raises:
    UserError: for a config, data or --set that cannot be.
  """
  known, data = found.bases, args.data
  spec, changes, options = args.config, {}, {}
  if spec is None and data is None:
    spec, changes, options = next(iter(known.values()))
  elif spec is None and data.partition(':')[0] in ('digits', 'shapes'):
    spec, changes, options = choose(f'bundled data of {args.name}', data, known)
  elif data is not None:
    spec = spec or 'folder'
    spec += f'{"," if ":" in spec else ":"}data={data}'
  config = grid.changed(config_lib.load(spec), changes)
  with grid.named('--set'):
    for assignment in args.set:
      _set(config, assignment)
  return spec, config, options


def _set(config: dict, assignment: str) -> None:
  key, _, value = assignment.partition('=')
  if key in ('seed', 'log.report'):
    raise UserError(f'{key}: use --seeds' if key == 'seed' else f'{key}: no pages here')
  if key in config_lib.DURATIONS and value != 'None':  # it takes the place of another
    for other in config_lib.DURATIONS:
      if other != key:
        config.pop(other, None)
  config_lib.override(config, [assignment])


def chosen(args: argparse.Namespace, found: list) -> list:
  """Returns the cells that --cells names, or all.

  Raises:
    UserError: for an unknown name, or a --set that the cells would override.
  """
  for assignment in args.set:
    key = assignment.partition('=')[0]
    for cell in found:
      clash = [c for c in cell.changes if c == key or key.startswith(f'{c}.')]
      if clash:
        raise UserError(f'--set {key}: the cells of {args.name} set {clash[0]}.')
  if args.cells is None:
    return found
  names = {cell.name: cell for cell in found}
  return [
    choose(f'cell of {args.name}', name, names)
    for name in dict.fromkeys(args.cells.split(','))
  ]
