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
  'tune': 'ways to tune, on few labels of new classes (VPT, section 4)',
  'families': 'a ViT beside models of other families that cost as much',
  'axial': 'full attention, or along rows and columns (Figure 13)',
}

_EPILOG = """\
NAME is one of
{names}
Without --config and --data it trains on bundled data, for minutes on two cores; --data of
your own takes the recipe `folder`. Each run is an ordinary run in DIR/runs; the same
command resumes it, or only reads it if it is finished. DIR/results.csv has a row for each
run, DIR/table.md the means over seeds, DIR/NAME.png the figure."""


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
  add(
    '--seeds',
    type=_seeds,
    metavar='0,1,2',
    help='of each cell; default: 0, or 0,1,2 (posemb, tune, families)',
  )
  add('--data', metavar='SOURCE', help='digits, shapes:..., a folder or tfds:NAME')
  add(
    '--config', metavar='NAME|FILE.py[:ARGS]', help='the recipe that the cells change'
  )
  add(
    '--set',
    nargs='+',
    action='extend',
    default=[],
    metavar='KEY=VALUE',
    help="change every cell's config, as --config.KEY=VALUE of vit_jax train",
  )
  add(
    '--cells',
    metavar='A,B',
    help='only these cells, and those that they start from; a wrong name lists them',
  )
  add('--metric', help="what is drawn first, such as 'test/top1'")
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
