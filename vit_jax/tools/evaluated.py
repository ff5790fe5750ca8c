"""What a tool measures weights on: data that is named, or a run's own evaluation."""

from vit_jax import config as config_lib
from vit_jax.errors import UserError

# Types of evaluations that are repeated on weights: of classifiers, of detectors.
TYPES = ('classification', 'coco')


def section(args) -> tuple[str | None, dict]:
  """Returns (the run's name for an evaluation or None, its section as in a config).

  Of a run's evaluations that is the one that chooses its best step, or else the first.

  Args:
    args: with `source`, `data`, `split`, `ema`; maybe `classes`.

  Raises:
    UserError: where neither the arguments nor a run say what to evaluate on.
  """
  classes = getattr(args, 'classes', None)
  if args.data and args.split:
    data = {'source': args.data, 'split': args.split}
    return None, {'data': data | ({'classes': classes} if classes else {})}
  from vit_jax import tasks
  from vit_jax.weights import runs

  run = None if args.data else runs.find(args.source)
  if run is None:
    lacks = 'split' if args.data else 'data'
    raise UserError(
      f'--{lacks} is missing: what to evaluate {args.source} on. A run knows, '
      'unless --data says otherwise; for others give --data and --split.'
    )
  config = config_lib.read(run[0])
  if not tasks.classifies(config):
    raise UserError(
      f'{args.source} was trained without a head, so it has no classes to compare: vit_jax '
      f'train --config=finetune:weights={args.source} trains one.'
    )
  best = (config.get('checkpoint', {}).get('best') or '').partition('/')[0]
  known = {
    name: found
    for name, found in config.get('evals', {}).items()
    if found.get('type') in TYPES and 'data' in found
  }
  if not known:
    raise UserError(
      f'{args.source} has no evaluation of type {" or ".join(TYPES)}: of a model for one of '
      'these give --data and --split.'
    )
  rank = lambda name: (known[name].get('use_ema', False) != args.ema, name != best)
  name = min(known, key=rank)
  data = dict(known[name]['data'])
  data |= {'split': args.split} if args.split else {}
  if classes:
    raise UserError(
      "--classes: a run's own evaluation has the classes that its config says. With "
      '--data and --split other data can be named.'
    )
  return name, known[name] | {'data': data}


def names_of_run(source: str) -> list[str] | None:
  """Returns the names of a run's classes, '' for those beyond the data's; None: no run."""
  from vit_jax.train import evaluations
  from vit_jax.weights import runs

  found = runs.find(source)
  return evaluations.class_names(config_lib.read(found[0])) if found else None
