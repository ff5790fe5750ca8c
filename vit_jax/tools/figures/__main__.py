"""Draws attention, filters and positions of a model, and results of runs.

  vit_jax figures rollout SOURCE photo.jpg folder/ --out DIR
  vit_jax figures posemb SOURCE --format pdf
  vit_jax figures compute RUN RUN ...

A figure is written to DIR/NAME.png (`--format` names pdf and svg as well), and its numbers to
DIR/NAME.csv. SOURCE is any source that `vit_jax.load` takes, and RUN the folder of a run.
"""

import argparse
import sys

from vit_jax import cli
from vit_jax.errors import UserError, choose
from vit_jax.registry import Registry
from vit_jax.tools import out_folder, source

# {name: help} of the figures of images, of a model alone, and of runs.
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
OF_RUNS = Registry('figure of runs', {})
# For each name: a function(args) that returns a `Drawing`.
FIGURES = Registry(
  'figure',
  {
    **dict.fromkeys(OF_IMAGES, 'vit_jax.tools.figures.maps:draw'),
    'distance': 'vit_jax.tools.figures.maps:distance',
    **{name: f'vit_jax.tools.figures.parameters:{name}' for name in OF_A_MODEL},
  },
)
FORMATS = ('png', 'pdf', 'svg')


def main(argv: list[str]) -> int:
  """Writes the figure and its numbers; returns 0."""
  args = _parse(argv)
  out = out_folder.check_folder(args.out)
  try:
    from vit_jax.explain import plots
  except ImportError as error:
    raise UserError(f"{error}: pip install 'vit_jax[plots]'.") from None
  drawing = FIGURES[args.name](args)
  out_folder.make(out)
  paths = [out / f'{args.name}.csv']
  out_folder.write_csv(paths[0], drawing.rows)
  for suffix in args.format:
    paths.append(out / f'{args.name}.{suffix}')
    plots.save(drawing.figure, paths[-1])
  record = {'figure': args.name, 'source': getattr(args, 'source', None)}
  record |= {'files': [str(path) for path in paths], 'notes': list(drawing.notes)}
  text = '\n'.join([*drawing.notes, f'written: {", ".join(record["files"])}'])
  return cli.show(args, record, text)


def _layer(text: str) -> int | str:
  try:
    return text if text == 'pooling' else int(text)
  except ValueError:
    raise argparse.ArgumentTypeError(
      f"{text!r} is neither a number nor 'pooling'"
    ) from None


def _parse(argv: list[str]) -> argparse.Namespace:
  """Parses the arguments: `name`, the arguments of all figures, and those of this figure."""
  if argv and not argv[0].startswith('-'):
    choose('figure', argv[0], list(FIGURES))
  summary = __doc__.split('\n')[0]
  parser = cli.Parser('vit_jax figures', description=summary, json=False)
  names = parser.add_subparsers(
    dest='name', metavar='NAME', required=True, prog='vit_jax figures'
  )
  for name, text in {**OF_IMAGES, **OF_A_MODEL, **OF_RUNS.data}.items():
    options = names.add_parser(name, help=text, description=f'Draws {text}.')
    add = options.add_argument
    if name in OF_RUNS:
      add('runs', metavar='RUN', nargs='*', help='folders of runs')
      add('--metric', help="result to draw, such as 'test/top1'")
    else:
      source.add_options(options, names=name in OF_IMAGES)
    if name in OF_IMAGES:
      add('images', metavar='IMAGE_OR_FOLDER', nargs='+')
    if name == 'attention':
      layers = "'pooling', or from 0: %(default)s"
      add('--layer', type=_layer, default=-1, help=layers)
      add('--head', type=int, help='number from 0; default: the mean of all heads')
    if name in ('class_rollout', 'gradient', 'integrated'):
      default = 'default: the most probable'
      add('--class', dest='class_name', metavar='NAME', help=default)
    if name in ('rollout', 'attention', 'class_rollout'):
      overlay = 'colours over the image, or the image times the map: %(default)s'
      add('--overlay', choices=('heat', 'mask'), default='heat', help=overlay)
    add('--out', metavar='DIR', default='figures', help='folder: %(default)s')
    add('--format', type=cli.words(FORMATS), default=['png'], help='png,pdf,svg')
  args, rest = parser.parse_known_args(argv)
  if rest:
    names.choices[args.name].error(f'unrecognized arguments: {" ".join(rest)}')
  return args


if __name__ == '__main__':
  sys.exit(cli.run(main))
