"""The command line of `vit_jax ablate`."""

import argparse
import textwrap

from vit_jax import cli
from vit_jax.errors import choose

# Ablation -> what it compares. Each is a module here, with `ABLATION`.
NAMES = {
  'posemb': 'position embeddings (Table 8)',
  'head': 'class token or pooling, with their learning rates (Figure 9)',
  'shape': "scaling a ViT's depth, width, MLP width and patches (Figure 8)",
  'optimizer': 'Adam or SGD for pre-training ResNets (Table 7)',
  'masked': 'masked patch prediction, then few labels (section 4.6, B.1.2)',
  'data_size': 'size of the pre-training data, ViT and ResNet (Figures 3 and 4)',
  'axial': 'full attention, or along rows and columns (Figure 13)',
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
