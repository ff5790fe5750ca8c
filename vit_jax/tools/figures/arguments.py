"""The command line of `vit_jax figures`: the figures, and the options of each."""

import argparse

from vit_jax import cli
from vit_jax.errors import choose
from vit_jax.registry import Registry
from vit_jax.tools import source

# Name -> help, for figures of images, of a model alone, and of runs.
OF_IMAGES = {
  'rollout': 'where a model looks, by the attention of all layers (figures 6, 14)',
  'attention': 'where one layer looks, or one head, or attention pooling',
  'class_rollout': 'which patches speak for a class, by attention and its gradient',
  'gradient': 'which pixels speak for a class: gradient times input',
  'integrated': 'which pixels speak for a class: integrated gradients',
  'distance': 'how far each head looks, by depth (figures 7 right, 11)',
}
OF_A_MODEL = {
  'posemb': 'how similar the position embeddings are (figures 7 centre, 10)',
  'filters': "the first layer's filters, or their principal components (figure 7 left)",
}
OF_RUNS = {
  'compute': 'accuracy against compute, the paper beside (figure 5, Table 6)',
  'data': 'accuracy against pre-training data, the paper beside (figure 3, Table 5)',
}
NAMES = {**OF_IMAGES, **OF_A_MODEL, **OF_RUNS}
# Name -> function(args) -> `Drawn`.
FIGURES = Registry(
  'figure',
  {
    **dict.fromkeys(OF_IMAGES, 'vit_jax.tools.figures.maps:draw'),
    'distance': 'vit_jax.tools.figures.distance:draw',
    **{name: f'vit_jax.tools.figures.parameters:{name}' for name in OF_A_MODEL},
    **{name: f'vit_jax.lab.figures:{name}' for name in OF_RUNS},
  },
)
FORMATS = ('png', 'pdf', 'svg')


def _layer(text: str) -> int | str:
  try:
    return text if text == 'pooling' else int(text)
  except ValueError:
    raise argparse.ArgumentTypeError(
      f"{text!r} is neither a number nor 'pooling'"
    ) from None


_OVERLAY = {
  'choices': ('mask', 'heat'),
  'default': 'mask',
  'help': 'the image times the map, or colours over it: %(default)s',
}
_CLASS = {'dest': 'class_name', 'metavar': 'NAME', 'help': 'default: the most probable'}
_NUMBER = {'type': cli.positive}
_FLAG = {'action': 'store_true'}
# Figure -> {option: keywords of `add_argument`}.
_OPTIONS = {
  'rollout': {
    '--fusion': {
      'choices': ('mean', 'max', 'min'),
      'default': 'mean',
      'help': 'of heads',
    },
    '--no_residual': {**_FLAG, 'help': 'without the identity of the residual'},
    '--overlay': _OVERLAY,
  },
  'attention': {
    '--layer': {
      'type': _layer,
      'default': -1,
      'help': "'pooling', or from 0: %(default)s",
    },
    '--head': {'type': int, 'help': 'number from 0; default: the mean of all heads'},
    '--overlay': _OVERLAY,
  },
  # With 'mask' all but a few patches would be black.
  'class_rollout': {'--class': _CLASS, '--overlay': {**_OVERLAY, 'default': 'heat'}},
  'gradient': {'--class': _CLASS},
  'integrated': {
    '--class': _CLASS,
    '--steps': {**_NUMBER, 'default': 32, 'help': 'gradients on the way: %(default)s'},
  },
  'distance': {'--plain': {**_FLAG, 'help': 'weights not scaled to a sum of 1'}},
  'filters': {'--count': {**_NUMBER, 'help': 'default: 28 components, or 64 filters'}},
}


def parse(argv: list[str], description: str) -> argparse.Namespace:
  """Returns the arguments: `name`, those that all figures have, and its own."""
  if argv and not argv[0].startswith('-'):
    choose('figure', argv[0], list(NAMES))
  parser = cli.Parser('vit_jax figures', description=description)
  names = parser.add_subparsers(
    dest='name', metavar='NAME', required=True, prog='vit_jax figures'
  )
  for name, text in NAMES.items():
    options = names.add_parser(name, help=text, description=f'Draws {text}.')
    add = options.add_argument
    if name in OF_RUNS:
      add('runs', metavar='RUN', nargs='*', help='folders of runs')
      add('--metric', help="result to draw, such as 'test/top1'")
    else:
      source.add_options(options)
    if name in OF_IMAGES:
      add('images', metavar='IMAGE_OR_FOLDER', nargs='+')
    for option, keywords in _OPTIONS.get(name, {}).items():
      add(option, **keywords)
    add('--out', metavar='DIR', default='figures', help='folder: %(default)s')
    add('--format', type=cli.words(FORMATS), default=['png'], help='png,pdf,svg')
    cli.add_json_option(options)
  args, rest = parser.parse_known_args(argv)
  if rest:
    names.choices[args.name].error(f'unrecognized arguments: {" ".join(rest)}')
  return args
