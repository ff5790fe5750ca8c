"""The command line of `vit_jax figures`: the figures, and the options of each."""

import argparse

from vit_jax import cli
from vit_jax.errors import choose
from vit_jax.registry import Registry
from vit_jax.tools import source

# Name -> help, for figures of images, of a model alone, of a data set, and of runs.
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
  'interpolation': 'position embeddings before and after resizing',
}
OF_DATA = {
  'slots': 'where each query of a detector finds boxes (DETR paper, figure 7)',
}
OF_RUNS = {
  'compute': 'accuracy against compute, the paper beside (figure 5, Table 6)',
  'data': 'accuracy against pre-training data, the paper beside (figure 3, Table 5)',
  'vtab': 'VTAB-1k by groups, the paper beside (figure 2, Table 9)',
  'shape': 'the scaling of depth, width, MLP width and patch size (figure 8)',
}
# Name -> function(args) -> `Drawn`.
FIGURES = Registry(
  'figure',
  {
    **dict.fromkeys(OF_IMAGES, 'vit_jax.tools.figures.maps:draw'),
    'distance': 'vit_jax.tools.figures.distance:draw',
    **{name: f'vit_jax.tools.figures.parameters:{name}' for name in OF_A_MODEL},
    'slots': 'vit_jax.detection.tools.slots:draw',
    **{name: f'vit_jax.lab.figures.runs:{name}' for name in OF_RUNS},
  },
)
NAMES = {**OF_IMAGES, **OF_A_MODEL, **OF_DATA, **OF_RUNS}
FORMATS = ('png', 'pdf', 'svg')


def parse(argv: list[str], description: str) -> argparse.Namespace:
  """Returns the arguments: `name`, those that all figures have, and its own.

  Raises:
    UserError: for an unknown name, or an option that the figure does not have.
  """
  if argv and not argv[0].startswith('-'):
    choose('figure', argv[0], list(NAMES))
  parser = cli.Parser('vit_jax figures', description=description)
  names = parser.add_subparsers(
    dest='name', metavar='NAME', required=True, prog='vit_jax figures'
  )
  for name, what in NAMES.items():
    options = names.add_parser(name, help=what, description=f'Draws {what}.')
    if name in OF_RUNS:
      _of_runs(options)
    else:
      _of_a_model(options, images=name in OF_IMAGES)
    if name in _OWN:
      _OWN[name](options)
    _of_all(options)
  args, rest = parser.parse_known_args(argv)
  if rest:
    names.choices[args.name].error(f'unrecognized arguments: {" ".join(rest)}')
  return args


def _of_all(parser) -> None:
  parser.add_argument(
    '--out', metavar='DIR', default='figures', help='folder to write to: %(default)s'
  )
  parser.add_argument(
    '--format',
    type=cli.words(FORMATS),
    default=['png'],
    help='png, pdf or svg, or several: png,pdf',
  )
  cli.add_json_option(parser)


def _of_runs(parser) -> None:
  parser.add_argument('runs', metavar='RUN', nargs='*', help='folders of runs')
  parser.add_argument('--metric', help="result to draw, such as 'test/top1'")


def _of_a_model(parser, images: bool) -> None:
  source.add_options(parser)
  if images:
    parser.add_argument('images', metavar='IMAGE_OR_FOLDER', nargs='+')


def _slots(parser) -> None:
  parser.add_argument('--data', help="a source with boxes; default: a run's own")
  parser.add_argument('--split', help="'test', 'val2017', ...; default: likewise")
  parser.add_argument(
    '--count',
    type=cli.positive,
    default=20,
    help='how many of the queries, the first ones: %(default)s',
  )
  parser.add_argument('--pp', help='preprocessing in place of that of the weights')
  parser.add_argument('--batch', type=cli.positive, help='images per step; default: 8')


def _overlay(parser, default: str = 'mask') -> None:
  parser.add_argument(
    '--overlay',
    choices=('mask', 'heat'),
    default=default,
    help="the image times the map, as in the paper, or the map's colours over it: "
    '%(default)s',
  )


def _rollout(parser) -> None:
  parser.add_argument(
    '--fusion', choices=('mean', 'max', 'min'), default='mean', help='of the heads'
  )
  parser.add_argument(
    '--no_residual', action='store_true', help='without the identity of the residual'
  )
  parser.add_argument(
    '--discard',
    type=float,
    default=0.0,
    help='share of the smallest weights to drop: %(default)s',
  )
  _overlay(parser)


def _attention(parser) -> None:
  parser.add_argument(
    '--layer',
    type=_layer,
    default=-1,
    help="number from 0, or 'pooling'; default: the last layer",
  )
  parser.add_argument(
    '--head', type=int, help='number from 0; default: the mean of all heads'
  )
  _overlay(parser)


def _layer(text: str) -> int | str:
  try:
    return text if text == 'pooling' else int(text)
  except ValueError:
    raise argparse.ArgumentTypeError(
      f"{text!r} is neither a number nor 'pooling'"
    ) from None


def _of_a_class(parser) -> None:
  parser.add_argument(
    '--class',
    dest='class_name',
    metavar='NAME',
    help='or its number; default: the most probable class of each image',
  )


def _class_rollout(parser) -> None:
  _of_a_class(parser)
  _overlay(parser, 'heat')  # with 'mask' all but a few patches would be black


def _integrated(parser) -> None:
  _of_a_class(parser)
  parser.add_argument(
    '--steps', type=cli.positive, default=32, help='gradients on the way: %(default)s'
  )


def _distance(parser) -> None:
  parser.add_argument(
    '--plain',
    action='store_true',
    help='weights on patches as they are, not scaled to a sum of 1',
  )


def _filters(parser) -> None:
  parser.add_argument(
    '--count', type=cli.positive, help='how many; default: 28 components, or 64 filters'
  )


def _interpolation(parser) -> None:
  parser.add_argument(
    '--to',
    type=cli.resolution,
    help='pixels: 384, or 384x256 (HxW); default: 384 / 224 times as many as before',
  )
  parser.add_argument('--resize', choices=('bilinear', 'bicubic'), default='bilinear')


_OWN = {
  'rollout': _rollout,
  'attention': _attention,
  'class_rollout': _class_rollout,
  'gradient': _of_a_class,
  'integrated': _integrated,
  'distance': _distance,
  'filters': _filters,
  'interpolation': _interpolation,
  'slots': _slots,
}
