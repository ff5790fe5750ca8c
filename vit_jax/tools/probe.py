"""`vit_jax evaluate --probe`: measures how good frozen features are."""

import argparse

from vit_jax import check, cli
from vit_jax.errors import UserError, choose
from vit_jax.tools import source

# Names in `vit_jax.evaluators.EVALUATORS`.
PROBES = ('fewshot', 'knn', 'linear_probe')


def add_options(parser: argparse.ArgumentParser) -> None:
  """Adds --probe and its options."""
  add = parser.add_argument
  add('--probe', metavar='|'.join(PROBES), help='classify by features, not by the head')
  add('--train', metavar='SPLIT', help="the split to fit to; default: 'train'")
  add(
    '--val', metavar='SPLIT', help='the split that chooses the penalty of linear_probe'
  )
  add('--set', action=cli.Fields, help="an option of a probe: 'k=[5,20]'")


def run(args) -> int:
  """Probes the features of SOURCE, and prints the numbers."""
  own, section = _section(args)
  import jax

  from vit_jax import evaluators, sharding

  # Check the options before loading the weights, with any `pp` in place of the weights' own.
  options = {'pp': args.pp or 'value_range(-1, 1)', **section}
  del options['type']
  signature = evaluators.EVALUATORS.signature(args.probe)
  check.bind(f'--probe {args.probe}', options, signature)
  loaded = source.load(args)
  loaded.model.check_outputs('classes', args.source)
  if 'pp' not in section or args.pp or args.resolution:
    section['pp'] = args.pp or loaded.pp
  mesh = sharding.make_mesh()
  with jax.set_mesh(mesh):
    evaluator = evaluators.build(**section, mesh=mesh)
    for splits in evaluator.datasets.values():
      loaded.check_shape(splits['train'].spec['image'].shape[1:], section['pp'])
    values = evaluator.run(*source.predictor(loaded, mesh))
  record = {'source': args.source, 'step': loaded.step, 'probe': args.probe}
  record |= {'evaluation': own, **section}
  notes = [
    f'{name:15} fitted to {data["train"]}, tested on {data["test"]}'
    for name, data in section['datasets'].items()
  ]
  source.print_values(args, record, values, evaluator.METRICS, notes)
  return 0


def _section(args) -> tuple[str | None, dict]:
  """Returns (name of the run's evaluation or None, the section of the evaluation)."""
  choose('--probe', args.probe, dict.fromkeys(PROBES))
  names = ('out', 'loss', 'labels', 'class_map', 'among')
  cli.refuse(args, names, 'is of a classification by the head: not with --probe')
  own, section = None, {'type': args.probe}
  if args.data and args.split:
    data = {'source': args.data, 'train': args.train or 'train', 'test': args.split}
    more = {'val': args.val, 'classes': args.classes}
    data |= {key: value for key, value in more.items() if value}
    section['datasets'] = {args.data: data}
  else:
    cli.refuse(args, ['split'], "goes with --data, not with a run's own evaluation")
    _, evals = source.evaluations(args, (args.probe,))
    own, section = next(iter(evals.items()))
    # These two keys say when, and with which parameters, a run evaluates.
    unused = ('every', 'use_ema')
    section = {key: value for key, value in section.items() if key not in unused}
  section['batch_size'] = args.batch or 64
  section |= args.set
  if section['type'] != args.probe:
    raise UserError(f'--set type={section["type"]}: use --probe {section["type"]}.')
  return own, section
