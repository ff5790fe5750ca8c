"""Measures weights on a data set, every example counted once.

  vit_jax evaluate RUN[@best] [--out DIR]                   on the run's own evaluation
  vit_jax evaluate SOURCE --data folder:photos --split val [--out DIR]
  vit_jax evaluate SOURCE --probe knn --data tfds:NAME --split test [--train train]

SOURCE is what `vit_jax.load` takes. Of a run's evaluations, the one that chooses its best
step is repeated, or else the first. Preprocessing comes with the weights; `--pp`
replaces it. The classes of the data are matched with those of the weights by WordNet id or
name, see `evaluators.class_match`. `--out` gets summary.json, per_class.csv, confusion.csv
(rows: the true class, columns: the predicted one) and predictions.npz, see
`evaluators.predictions`.

For a detector, the evaluator `coco` gives COCO's twelve numbers; `--out` gets summary.json,
per_class.csv and detections.json, which `vit_jax coco_ap` reads.

`--probe` measures features, not the head: by few-shot regression, nearest neighbours or a
linear classifier, fitted to another split of the data.
"""

import contextlib
import importlib
import sys
import tempfile
from pathlib import Path

from vit_jax import cli, terminal
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.tools import out_folder, probe, source

FILES = ('summary.json', 'per_class.csv', 'confusion.csv', 'predictions.npz')
_BATCH = 64
# Outputs of a model other than classes -> the module that evaluates them.
OTHERS = {'boxes': 'vit_jax.detection.tools.evaluate_boxes'}
TYPES = ('classification', 'coco')  # of a run's evaluations that can be repeated
_MOST_CLASSES = 5_000  # Largest confusion matrix, 200 MB


def main(argv: list[str]) -> int:
  """Prints accuracy and loss, or average precision; writes the tables of `--out`."""
  with contextlib.ExitStack() as stack:
    # After a crash, which leaves the folder, its reason is there.
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix='vit_jax-'))
    stack.enter_context(terminal.noise_to(Path(folder) / 'evaluate.txt'))
    return _evaluate(argv)


def _evaluate(argv: list[str]) -> int:
  args = _parser().parse_args(argv)
  if args.probe:
    return probe.run(args)
  probe.check_unused(args)
  out = args.out and out_folder.check(args.out)
  own, section = evaluation(args)
  chosen = {key: getattr(args, key) for key in ('labels', 'class_map', 'among')}
  section |= {key: value for key, value in chosen.items() if value}
  if out and (labels := section.get('labels')):
    raise UserError(
      f'--out: {labels} has several labels per image, a confusion matrix is of one. '
      'Without --out the accuracy is measured.'
    )
  import jax

  from vit_jax import models, sharding
  from vit_jax.evaluators import base, class_match, classification
  from vit_jax.train import evaluations, metrics

  loaded = source.load(args)
  if other := OTHERS.get(models.family_of(loaded.model).outputs):
    return importlib.import_module(other).run(args, loaded, own, section)
  models.check_outputs(loaded.model, 'classes', args.source)
  K = getattr(loaded.model, 'num_classes', None)
  if K is None:
    raise UserError(
      f'{args.source} has no head, and so no classes: vit_jax train '
      f'--config=finetune:weights={args.source} trains one.'
    )
  mesh = sharding.make_mesh()
  data = {'pp': loaded.pp, **section['data'], 'batch_size': args.batch or _BATCH}
  if args.pp or args.resolution:  # at which the run was not evaluated
    data['pp'] = args.pp or loaded.pp
  if out:
    data['bad_log'] = out / 'bad_images.jsonl'
  with jax.set_mesh(mesh):
    evaluator = classification.Classification(
      mesh,
      lambda: None,
      data=data,
      loss=args.loss or section.get('loss', 'softmax'),
      model=class_match.Classes(loaded.class_names or names_of_run(args.source), K),
      **{k: section.get(k) for k in ('labels', 'class_map', 'among')},
      confusion=out is not None,
    )
    note = evaluator.note
    source.check_images(loaded, evaluator.batches)
    if out:
      _check_tables(evaluator, K, data['source'])
    if out:  # nothing was written before
      out_folder.make(out)
    variables = jax.device_put(loaded.variables, sharding.replicated(mesh))

    def predict(variables, batch):
      logits, _ = loaded.model.apply(variables, batch['image'])
      return {'logits': logits}

    values = evaluator.run(predict, variables)
  for name in ('examples', 'bad_images'):
    if name in values:
      values[name] = int(values[name])
  record = {'source': args.source, 'step': loaded.step}
  record |= {
    'evaluation': own,
    'data': data['source'],
    'split': data['split'],
    'classes': data.get('classes'),
    **values,
  }
  if out:
    names = _names(evaluator, loaded.class_names)
    _write(out, record, evaluator, names, metrics.write_json)
    # Under the run's name where it is the run's evaluation, which `report` looks up.
    name = own if own and not args.split else data['split']
    evaluations.write_predictions(out, name, loaded.step or 0, evaluator.predictions)
  if args.json:
    if note:
      print(note, file=sys.stderr)
    cli.print_json(record)
    return 0
  if loaded.step is not None:
    print(f'{"step":12} {loaded.step:,}')
  if own:
    print(
      f"{'data':12} {data['source']}, {data['split']}: the run's evaluation {own!r}"
    )
  if note:
    print(note)
  for name, value in values.items():
    print(f'{name:12} {base.find(evaluator.METRICS, name).text(value)}')
  if out:
    print(f'written to {out}: {", ".join(FILES)}')
  return 0


def evaluation(args) -> tuple[str | None, dict]:
  """Returns (the run's name for an evaluation or None, its section as in a config).

  Of a run's evaluations that is the one that chooses its best step, or else the first.

  Args:
    args: with `source`, `data`, `split`, `ema`; maybe `classes`.

  Raises:
    UserError: where neither the arguments nor a run name the data.
  """
  args.classes = getattr(args, 'classes', None)
  if args.data and args.split:
    data = {'source': args.data, 'split': args.split, 'classes': args.classes}
    return None, {'data': {key: value for key, value in data.items() if value}}
  from vit_jax import tasks
  from vit_jax.weights import runs

  run = None if args.data else runs.find(args.source)
  if run is None:
    lacks = 'split' if args.data else 'data'
    raise UserError(
      f'--{lacks} is missing: the data to evaluate {args.source} on. A run has '
      'its own; other weights need --data and --split.'
    )
  config = config_lib.read(run[0])
  if not tasks.classifies(config):
    raise UserError(
      f'{args.source} was trained without a head, so it has no classes to compare: vit_jax '
      f'train --config=finetune:weights={args.source} trains one.'
    )
  best = (config.get('checkpoint', {}).get('best') or '').partition('/')[0]
  repeatable = {
    name: section
    for name, section in config.get('evals', {}).items()
    if section.get('type') in TYPES and 'data' in section
  }
  if not repeatable:
    raise UserError(
      f'{args.source} has no evaluation of type {" or ".join(TYPES)}: of a model for one of '
      'these give --data and --split.'
    )
  rank = lambda name: (repeatable[name].get('use_ema', False) != args.ema, name != best)
  name = min(repeatable, key=rank)
  data = dict(repeatable[name]['data'])
  data |= {'split': args.split} if args.split else {}
  if args.classes:
    raise UserError(
      "--classes: a run's own evaluation has the classes that its config says. With "
      '--data and --split other data can be named.'
    )
  return name, repeatable[name] | {'data': data}


def names_of_run(source: str) -> list[str] | None:
  """Returns the names of a run's classes, '' for those beyond the data's; None: no run."""
  from vit_jax.train import evaluations
  from vit_jax.weights import runs

  run = runs.find(source)
  return evaluations.class_names(config_lib.read(run[0])) if run else None


def _check_tables(evaluator, num_classes: int, data: str) -> None:
  """Raises UserError for classes that cannot have a confusion matrix."""
  match = evaluator.match
  size = len(match.columns) if match else num_classes
  if size > _MOST_CLASSES:
    raise UserError(f'--out: a confusion matrix of {size} classes is too large.')
  several = match is not None and match.right.sum(1).max() > 1
  if several or evaluator.batches.spec['label'].ndim == 2:
    raise UserError(
      f'--out: {data} has several labels per image, a confusion matrix is of one. '
      'Without --out the accuracy is measured.'
    )


def _names(evaluator, ours: list[str] | None) -> list[str] | None:
  """Returns the names of the confusion matrix's rows: the data's, or the model's."""
  match, theirs = evaluator.match, evaluator.batches.class_names
  if match is None:
    size = len(evaluator.confusion)
    return next((x for x in (theirs, ours) if x and len(x) == size), None)
  if match.one_to_one:
    return theirs
  return [ours[i] if ours else str(i) for i in match.columns]


def _write(out: Path, record: dict, evaluator, names, write_json) -> None:
  matrix = evaluator.confusion
  names = names or [str(i) for i in range(len(matrix))]
  counts, right = matrix.sum(1), matrix.diagonal()
  rows = [('class', 'name', 'examples', 'right', 'accuracy')]
  for i, name in enumerate(names):
    share = f'{right[i] / counts[i]:.6f}' if counts[i] else ''
    rows.append((i, name, counts[i], right[i], share))
  out_folder.write_csv(out / 'per_class.csv', rows)
  table = [('true \\ predicted', *names)]
  table += [(name, *row) for name, row in zip(names, matrix, strict=True)]
  out_folder.write_csv(out / 'confusion.csv', table)
  write_json(out / 'summary.json', record)


def _classes(text: str) -> list[int | str]:
  """Returns '5,6,cat' as [5, 6, 'cat']."""
  return [int(word) if word.isdecimal() else word for word in text.split(',')]


def _parser() -> cli.Parser:
  parser = cli.Parser('vit_jax evaluate', description=__doc__.split('\n')[0])
  source.add_options(parser)
  parser.add_argument(
    '--data', help="digits, folder:PATH, tfds:NAME, ...; default: a run's own"
  )
  parser.add_argument('--split', help="'test', 'train[:10%%]', ...; default: likewise")
  parser.add_argument(
    '--classes',
    type=_classes,
    metavar='C,C,...',
    help='of --data, indices or names: those alone, as the model numbers them',
  )
  parser.add_argument(
    '--labels',
    metavar='FILE',
    help="sets of labels in place of the data's: ReaL's JSON",
  )
  parser.add_argument(
    '--class_map',
    metavar='HOW',
    help="how classes are matched where that is not clear: 'known', 'number', "
    "'imagenet1k', FILE",
  )
  parser.add_argument(
    '--among',
    metavar='CLASSES',
    help="of which classes a prediction is one: 'data', 'all', 'imagenet_a', ...",
  )
  probe.add_options(parser)
  parser.add_argument('--pp', help='preprocessing in place of that of the weights')
  parser.add_argument('--loss', choices=('softmax', 'sigmoid'))
  parser.add_argument(
    '--batch',
    type=cli.positive,
    help=f'images per step; default: {_BATCH}, for a detector 8',
  )
  parser.add_argument('--out', metavar='DIR', help='for the tables')
  cli.add_json_option(parser)
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
