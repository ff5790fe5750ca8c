"""The argument SOURCE of a tool: the weights to load, any source that `vit_jax.load` takes."""

import argparse
import dataclasses
from pathlib import Path

from vit_jax import cli
from vit_jax import config as config_lib
from vit_jax.errors import UserError


def add_options(
  parser: argparse.ArgumentParser,
  *,
  variant: bool = True,
  resolution: bool = True,
  names: bool = False,
) -> None:
  """Adds SOURCE, --ema and --weights, and by default --variant and --resolution.

  Without --variant, the source itself has to name the size of its model. Without
  --resolution, the tool takes the model at its own resolution. With `names` also adds
  --class_names, for tools that print classes.
  """
  add = parser.add_argument
  add('source', metavar='SOURCE', help='file, hub folder, RUN[@best], zoo name')
  if variant:
    add('--variant', help="model size where SOURCE does not say: 'B/16'")
  if resolution:
    add('--resolution', type=cli.resolution, help='pixels: 384, or 384x256 (HxW)')
  if names:
    add('--class_names', metavar='FILE', help='names of the classes, one in each line')
  add('--ema', action='store_true', help="a run's averaged parameters")
  weights = (
    'weights that the run started from, if they moved and it has frozen parameters'
  )
  add('--weights', metavar='SOURCE', help=weights)


def loss_of(source: str) -> str:
  """Returns the loss of a run that classifies, and 'softmax' for other sources."""
  from vit_jax import tasks
  from vit_jax.weights import runs

  config = config_lib.read(run[0]) if (run := runs.find(source)) else {}
  classifies = tasks.class_of(config).CLASSES is not None
  return config.get('task', {}).get('loss', 'softmax') if classifies else 'softmax'


def load(args: argparse.Namespace, **fields):
  """Loads the weights that the options name, as `weights.Loaded`.

  Args:
    **fields: fields of the model that replace those of SOURCE, such as `dtype='float32'`.
  """
  from vit_jax import weights

  loaded = weights.load(
    args.source,
    variant=args.variant,
    image_size=args.resolution,
    ema=args.ema,
    weights=args.weights,
    **fields,
  )
  path = getattr(args, 'class_names', None)
  if path is None:
    return loaded
  return dataclasses.replace(loaded, class_names=_read_names(path, loaded))


def _read_names(path: str, loaded) -> list[str]:
  """Reads the name of each class of a model, one in each line of a file."""
  try:
    lines = Path(path).read_text(encoding='utf-8').rstrip().splitlines()
  except (OSError, ValueError) as error:
    reason = getattr(error, 'strerror', None) or 'not UTF-8 text'
    raise UserError(f'--class_names {path}: {reason}.') from None
  if len(lines) != (number := loaded.model.num_classes):
    raise UserError(
      f'--class_names {path}: {len(lines):,} lines, but the model has {number} classes.'
    )
  return [line.strip() for line in lines]


def evaluations(args: argparse.Namespace, types: tuple[str, ...]) -> tuple[dict, dict]:
  """Returns (config of the run SOURCE, {name: section} of its evaluations of given types).

  Raises:
    UserError: if SOURCE is no run or has no such evaluation, or if options of --data are
      given, which do not go with a run's own evaluation.
  """
  from vit_jax.weights import runs

  run = None if args.data else runs.find(args.source)
  config = config_lib.read(run[0]) if run else {}
  evals = config.get('evals', {}).items()
  own = {name: section for name, section in evals if section.get('type') in types}
  if not own:
    lacks = 'split' if args.data else 'data'
    raise UserError(
      f'--{lacks} is missing: {args.source} has no evaluation of type '
      f'{" or ".join(types)}. Pass --data and --split, or a run that has one.'
    )
  why = "goes with --data, not with a run's own evaluation"
  cli.refuse(args, ('train', 'val', 'classes'), why)
  return config, own


def predictor(loaded, mesh) -> tuple:
  """Returns the arguments of a classification evaluator: (predict, variables on the mesh)."""
  import jax

  from vit_jax import sharding

  def predict(variables, batch):
    logits, features = loaded.model.apply(variables, batch['image'])
    return {**features, 'logits': logits}

  return predict, jax.device_put(loaded.variables, sharding.replicated_sharding(mesh))


def print_values(args, record: dict, values: dict, metrics, notes: list[str]) -> None:
  """Prints an evaluator's values as text or, for --json, together with the record.

  Args:
    notes: lines about the data, for the text.
  """
  from vit_jax.evaluators import base

  if args.json:
    cli.print_json(record | values)
    return
  if record['step'] is not None:
    print(f'{"step":15} {record["step"]:,}')
  for line in notes:
    print(line)
  for name in values:
    metric = base.match_metric(metrics, name)
    if not metric.detail:
      print(f'{name:15} {metric.format_with_std(values, name)}')
