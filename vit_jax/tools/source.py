"""SOURCE on a command line: the weights that a tool reads, and their options.

SOURCE is what `vit_jax.load` takes.
"""

import argparse

from vit_jax import cli
from vit_jax.errors import UserError


def add_options(
  parser: argparse.ArgumentParser, *, variant: bool = True, resolution: bool = True
) -> None:
  """Adds SOURCE, --ema and --weights, and by default --variant and --resolution.

  Without --variant the source has to tell its size; without --resolution the tool takes
  the model at its own.
  """
  parser.add_argument(
    'source', metavar='SOURCE', help='file, hub folder, RUN[@best], zoo name'
  )
  if variant:
    parser.add_argument(
      '--variant', help="model size where SOURCE does not say: 'B/16'"
    )
  if resolution:
    parser.add_argument(
      '--resolution', type=cli.resolution, help='pixels: 384, or 384x256 (HxW)'
    )
  parser.add_argument('--ema', action='store_true', help="a run's averaged parameters")
  parser.add_argument(
    '--weights', metavar='SOURCE', help='of a run with frozen parameters, if they moved'
  )


def load(args: argparse.Namespace, **fields):
  """Loads the weights that the options name, as `weights.Loaded`.

  Args:
    args: parsed by a parser with all options of `add_options`.
    **fields: of the model, in place of those of SOURCE: `dtype='float32'`.

  Raises:
    UserError: SOURCE cannot be read, or does not fit.
  """
  from vit_jax import weights

  return weights.load(
    args.source,
    variant=args.variant,
    image_size=args.resolution,
    ema=args.ema,
    weights=args.weights,
    **fields,
  )


def check_images(loaded, batches) -> None:
  """Raises UserError for batches of images of another size than the model takes.

  Args:
    loaded: `weights.Loaded`.
    batches: `data.pipeline.EvalBatches`.
  """
  H, W, C = batches.spec['image'].shape[1:]
  if (*loaded.image_size, loaded.channels) != (H, W, C):
    raise UserError(
      f'--pp gives images {(H, W, C)}, the model takes '
      f'{(*loaded.image_size, loaded.channels)}: change --pp or --resolution.'
    )
