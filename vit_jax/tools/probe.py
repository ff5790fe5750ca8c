"""`vit_jax evaluate --probe`: how good frozen features are, by an evaluator of them."""

import argparse

from vit_jax import check, cli
from vit_jax import config as config_lib
from vit_jax.errors import UserError, choose
from vit_jax.tools import source

PROBES = ('fewshot', 'knn', 'linear_probe')  # Names in `vit_jax.evaluators.EVALUATORS`


def add_options(parser: argparse.ArgumentParser) -> None:
  """Adds --probe and its options."""
  parser.add_argument(
    '--probe',
    metavar='|'.join(PROBES),
    help='classify by frozen features, as this evaluator does, and not by the head',
  )
  parser.add_argument(
    '--train', metavar='SPLIT', help="of a probe: the split to fit to; default: 'train'"
  )
  parser.add_argument(
    '--val', metavar='SPLIT', help='of linear_probe: the split that chooses the penalty'
  )
  parser.add_argument(
    '--set',
    action=cli.Fields,
    help="of a probe: an option such as 'k=[5,20]', 'solver=ridge'; any number of them",
  )


def check_unused(args) -> None:
  """Raises UserError for options of a probe where there is none."""
  unused = [f'--{name}' for name in ('train', 'val', 'set') if getattr(args, name)]
  if unused:
    raise UserError(f'{", ".join(unused)}: only with --probe {"|".join(PROBES)}.')


def run(args) -> int:
  """Prints the probe's numbers of the features of SOURCE."""
  own, section = _section(args)
  import jax

  from vit_jax import evaluators, models, sharding
  from vit_jax.evaluators import base

  options = {
    'pp': args.pp or 'value_range(-1, 1)',
    **section,
  }  # the weights bring theirs
  del options['type']
  check.bind(
    f'--probe {args.probe}', options, evaluators.EVALUATORS.signature(args.probe)
  )
  loaded = source.load(args)
  models.check_outputs(loaded.model, 'classes', args.source)
  if 'pp' not in section or args.pp or args.resolution:
    section['pp'] = args.pp or loaded.pp
  mesh = sharding.make_mesh()
  with jax.set_mesh(mesh):
    evaluator = evaluators.build(**section, mesh=mesh)
    for splits in evaluator.datasets.values():
      source.check_images(loaded, splits['train'])
    variables = jax.device_put(loaded.variables, sharding.replicated(mesh))

    def predict(variables, batch):
      logits, features = loaded.model.apply(variables, batch['image'])
      return {**features, 'logits': logits}

    values = evaluator.run(predict, variables)
  if args.json:
    record = {'source': args.source, 'step': loaded.step, 'probe': args.probe}
    cli.print_json(record | {'evaluation': own, **section, **values})
    return 0
  if loaded.step is not None:
    print(f'{"step":12} {loaded.step:,}')
  for name, data in section['datasets'].items():
    print(f'{name:12} fitted to {data["train"]}, tested on {data["test"]}')
  for name, value in values.items():
    metric = base.find(evaluator.METRICS, name)
    if not metric.detail:
      std = metric.std and values.get(name + metric.std)
      spread = f' ± {metric.text(std)}' if std is not None else ''
      print(f'{name:12} {metric.text(value)}{spread}')
  return 0


def _section(args) -> tuple[str | None, dict]:
  """Returns (the run's name for its evaluation or None, a section of a config's evals).

  Raises:
    UserError: where neither the arguments nor a run name the data.
  """
  choose('--probe', args.probe, dict.fromkeys(PROBES))
  for name in ('out', 'loss', 'labels', 'class_map', 'among'):
    if getattr(args, name):
      raise UserError(f'--{name} is of a classification by the head: not with --probe.')
  own, section = None, {'type': args.probe}
  if args.data and args.split:
    data = {'source': args.data, 'train': args.train or 'train', 'test': args.split}
    more = {'val': args.val, 'classes': args.classes}
    data |= {key: value for key, value in more.items() if value}
    section['datasets'] = {args.data: data}
  else:
    own, section = _of_run(args)
  section['batch_size'] = args.batch or 64
  section |= args.set
  if section['type'] != args.probe:
    raise UserError(f'--set type={section["type"]}: use --probe {section["type"]}.')
  return own, section


def _of_run(args) -> tuple[str, dict]:
  from vit_jax.weights import runs

  run = None if args.data else runs.find(args.source)
  evals = config_lib.read(run[0]).get('evals', {}) if run else {}
  own = {k: v for k, v in evals.items() if v.get('type') == args.probe}
  if not own:
    lacks = 'split' if args.data else 'data'
    raise UserError(
      f'--{lacks} is missing: {args.source} has no evaluation of type {args.probe} of its own, '
      'so name the images to probe it on with --data and --split.'
    )
  for name in ('split', 'train', 'val', 'classes'):
    if getattr(args, name):
      raise UserError(
        f"--{name}: a run's own evaluation has the splits and classes that its config "
        'says. With --data and --split other data can be named.'
      )
  name, section = next(iter(own.items()))
  unused = ('every', 'use_ema')  # when and of which parameters a run evaluates
  return name, {key: value for key, value in section.items() if key not in unused}
