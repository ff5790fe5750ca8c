"""Measures weights on a data set, every example counted once.

  vit_jax evaluate RUN[@best] [--out DIR]                   on the run's own evaluation
  vit_jax evaluate SOURCE --data folder:photos --split val [--out DIR]
  vit_jax evaluate CLIP --zero_shot --data folder:photos --split val
  vit_jax evaluate SOURCE --probe knn --data tfds:NAME --split test [--train train]

SOURCE is any source that `vit_jax.load` takes; images are preprocessed as its weights need.
For a run, the evaluation that chooses its best step is repeated, or the first one without such.
Classes of the data are matched with those of the weights by WordNet id or name, see
`evaluators.class_match`. `--out` gets summary.json, per_class.csv, confusion.csv (a row is a
true class; none if images have several labels) and predictions.npz. For a detector,
detections.json replaces confusion.csv.
"""

import os
import sys
from pathlib import Path

from vit_jax import cli, terminal
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.registry import Registry
from vit_jax.tools import out_folder, probe, source, zero_shot

FILES = ('summary.json', 'per_class.csv', 'confusion.csv', 'predictions.npz')
_BATCH = 64
# For each kind of outputs, except classes: a function(args, loaded, name of the run's
# evaluation or None, section of the evaluation).
PARTS = Registry('part of evaluate', {})
# Types of a run's evaluations that can be repeated.
TYPES = ('classification', 'coco')
# Number of classes up to which the confusion is counted without --out.
_COUNTED = 1_000
_SEVERAL = (
  '--out: {} has several labels per image, but a confusion matrix needs one; precision and '
  'recall need a loss of binary classes, such as --loss sigmoid.'
)
_TRAIN_ONE = 'vit_jax train --config=finetune:weights={} trains one.'


def main(argv: list[str]) -> int:
  """Prints accuracy and loss, or average precision; writes the tables of `--out`."""
  with terminal.noise_to(os.devnull):
    return _evaluate(argv)


def _evaluate(argv: list[str]) -> int:
  args = _parser().parse_args(argv)
  if args.probe and args.zero_shot:
    raise UserError('--probe and --zero_shot cannot be combined: pass one of them.')
  if args.probe:
    return probe.run(args)
  cli.refuse(
    args, ('train', 'val', 'set'), f'goes with --probe {"|".join(probe.PROBES)}'
  )
  out = args.out and out_folder.check_folder(args.out)
  own, section = evaluation(args)
  keys = ('labels', 'class_map', 'among')
  options: dict = {key: getattr(args, key) or section.get(key) for key in keys}
  if out and (labels := options['labels']):
    raise UserError(_SEVERAL.format(labels))
  import jax

  from vit_jax import losses, sharding
  from vit_jax.evaluators import class_match, classification

  loaded = zero_shot.classifier(args, source.load(args), section['data'])
  if (outputs := loaded.model.family.outputs) in PARTS:
    return PARTS[outputs](args, loaded, own, section)
  loaded.model.check_outputs('classes', args.source)
  if (K := loaded.model.num_classes) is None:
    raise UserError(f'{args.source} has no head: {_TRAIN_ONE.format(args.source)}')
  _check_kind(str(section['data']['source']), args.source)
  loss = args.loss or section.get('loss') or source.loss_of(args.source)
  losses.check_loss('--loss', loss, section)
  mesh = sharding.make_mesh()
  data = {'pp': loaded.pp, **section['data'], 'batch_size': args.batch or _BATCH}
  if args.pp or args.resolution:
    # These options replace the preprocessing of the run's evaluation.
    data['pp'] = args.pp or loaded.pp
  if out:
    data['bad_log'] = out / 'bad_images.jsonl'
  with jax.set_mesh(mesh):
    classes = class_match.Classes(loaded.class_names or names_of_run(args.source), K)
    confusion = out is not None or K <= _COUNTED
    options |= dict(data=data, loss=loss, confusion=confusion, ranking=None)
    evaluator = classification.Classification(mesh, lambda: None, classes, **options)
    loaded.check_shape(evaluator.batches.spec['image'].shape[1:], data['pp'])
    if out:
      _check_tables(evaluator, data['source'])
      out_folder.make(out)
    values = evaluator.run(*source.predictor(loaded, mesh))
  counts = ('examples', 'bad_images', 'bad_logits')
  values |= {k: int(values[k]) for k in counts if k in values}
  record = {'source': args.source, 'step': loaded.step, 'evaluation': own}
  record |= {'data': data['source'], **{k: data.get(k) for k in ('split', 'classes')}}
  if out:
    _write(out, record | values, evaluator, _names(evaluator, loaded.class_names))
  if args.json and evaluator.note:
    print(evaluator.note, file=sys.stderr)
  metrics, note = evaluator.METRICS, evaluator.note
  files = [x for x in FILES if evaluator.has_confusion or x != 'confusion.csv']
  return finish(args, out, record, values, metrics, evaluator.predictions, files, note)


def finish(args, out, record, values, metrics, predictions, files, note='') -> int:
  """Prints the values of an evaluation, and writes its predictions to `out`."""
  from vit_jax.train import evaluations

  own, split = record['evaluation'], record['split']
  if out:
    # Name the predictions as the run names its evaluation, because `report` looks that up.
    name = own if own and not args.split else split
    evaluations.write_predictions(out, name, record['step'] or 0, predictions)
  of_run = f": the run's evaluation {own!r}" if own else ''
  notes = [f'{"data":15} {record["data"]}, {split}{of_run}', *filter(None, [note])]
  source.print_values(args, record, values, metrics, notes)
  if out and not args.json:
    print(f'written to {out}: {", ".join(files)}')
  return 0


def evaluation(args) -> tuple[str | None, dict]:
  """Returns (name of the run's evaluation or None, the section of the evaluation).

  For a run it is the evaluation that chooses the best step, or the first one without such.
  """
  if args.data and args.split:
    data = {'source': args.data, 'split': args.split, 'classes': args.classes}
    return None, {'data': {key: value for key, value in data.items() if value}}
  config, own = source.evaluations(args, TYPES)
  best = (config.get('checkpoint', {}).get('best') or '').partition('/')[0]
  rank = lambda name: (own[name].get('use_ema', False) != args.ema, name != best)
  name = min(own, key=rank)
  split = {'split': args.split} if args.split else {}
  return name, own[name] | {'data': own[name]['data'] | split}


def names_of_run(source: str) -> list[str] | None:
  """Returns the class names of a run, '' for classes that its data lacks, or None."""
  from vit_jax.train import evaluations
  from vit_jax.weights import runs

  run = runs.find(source)
  return evaluations.class_names(config_lib.read(run[0])) if run else None


def _check_kind(data: str, weights: str) -> None:
  """Raises UserError for a source of boxes or of labelled pixels, before it is opened."""
  from vit_jax.data import sources

  if (scheme := data.partition(':')[0]) not in sources.SOURCES:
    return
  features = getattr(sources.SOURCES[scheme], 'features', {})
  for feature, kind in (('boxes', 'boxes'), ('segments', 'a class for every pixel')):
    if feature in features:
      raise UserError(
        f'--data {data} has {kind}, but {weights} gives classes of images: name data with '
        'these, or the weights of a detector or segmenter.'
      )


def _check_tables(evaluator, data: str) -> None:
  """Raises UserError for too many classes, or several labels, for a confusion matrix."""
  from vit_jax.evaluators import classification

  if evaluator.columns > classification.MOST_CLASSES:
    size = evaluator.columns
    raise UserError(f'--out: a confusion matrix of {size} classes is too large.')
  if not (evaluator.has_confusion or evaluator.has_counts):
    raise UserError(_SEVERAL.format(data))


def _names(evaluator, ours: list[str] | None) -> list[str] | None:
  """Returns the names of the confusion matrix's classes, those of the data if they fit."""
  match, theirs = evaluator.match, evaluator.batches.class_names
  if match is None:
    size = evaluator.columns
    return next((x for x in (theirs, ours) if x and len(x) == size), None)
  if match.one_to_one:
    return theirs
  return [ours[i] if ours else str(i) for i in match.columns]


def _write(out: Path, record: dict, evaluator, names) -> None:
  import numpy as np

  from vit_jax.train import metrics

  matrix = evaluator.confusion
  names = names or [str(i) for i in range(evaluator.columns)]
  scores = evaluator.score_classes()
  rows = [('class', 'name', 'examples', 'predicted', 'right', *scores)]
  right, examples, predicted = evaluator.counts
  counts = zip(examples, predicted, right, strict=True)
  for i, (name, count) in enumerate(zip(names, counts, strict=True)):
    shares = [x[i] for x in scores.values()]
    cells = ['' if np.isnan(x) else f'{x:.6f}' for x in shares]
    rows.append((i, name, *count, *cells))
  out_folder.write_csv(out / 'per_class.csv', rows)
  if matrix is not None:
    table = [('true \\ predicted', *names)]
    table += [(name, *row) for name, row in zip(names, matrix, strict=True)]
    out_folder.write_csv(out / 'confusion.csv', table)
  metrics.write_json(out / 'summary.json', record)


def _classes(text: str) -> list[int | str]:
  """Parses '5,6,cat' to [5, 6, 'cat']."""
  return [int(word) if word.isdecimal() else word for word in text.split(',')]


def _parser() -> cli.Parser:
  parser = cli.Parser('vit_jax evaluate', description=__doc__.split('\n')[0])
  source.add_options(parser, names=True)
  add = parser.add_argument
  add('--data', help="digits, folder:PATH, tfds:NAME, ...; default: a run's own")
  add('--split', help="'test', 'train[:10%%]', ...; default: likewise")
  add('--classes', type=_classes, metavar='C,C,...', help='those of --data alone')
  add('--labels', metavar='FILE', help="label sets such as ReaL's, not the data's")
  matches = "'known', 'number', 'imagenet1k', FILE"
  add('--class_map', metavar='HOW', help=f'how classes are matched: {matches}')
  among = "for predictions: 'data', 'all', 'imagenet_a', ..."
  add('--among', metavar='CLASSES', help=among)
  zero_shot.add_zero_shot(parser)
  probe.add_options(parser)
  add('--pp', help='preprocessing in place of that of the weights')
  add('--loss', help="default: a run's own, or softmax")
  batch = f'images per step; default: {_BATCH}, for a detector 8'
  add('--batch', type=cli.positive, help=batch)
  add('--out', metavar='DIR', help='for the tables')
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
