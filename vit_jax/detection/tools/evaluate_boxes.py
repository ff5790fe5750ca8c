"""`vit_jax evaluate` for detectors: COCO's twelve numbers, by the evaluator `coco`."""

import functools
import sys
from pathlib import Path

import numpy as np

from vit_jax import cli
from vit_jax.errors import UserError, printable
from vit_jax.tools import evaluate, out_folder

FILES = ('summary.json', 'per_class.csv', 'detections.json', 'predictions.npz')
_BATCH = 8  # images per step, each of a million pixels


def run(args, loaded, own: str | None, section: dict) -> int:
  """Evaluates a detector, prints the numbers, and writes FILES into `--out`."""
  import jax

  from vit_jax import sharding
  from vit_jax.detection.tasks import detect
  from vit_jax.evaluators.base import Metric

  why = (
    f'is for classes of images; {args.source} is a detector: names match its classes'
  )
  cli.refuse(args, ('loss', 'labels', 'class_map', 'among'), why)

  def predict(variables, batch):
    outputs, _ = loaded.model.apply(variables, **detect.arguments(batch))
    return outputs

  out, data = args.out and out_folder.check_folder(args.out), section['data']
  mesh = sharding.make_mesh()
  with jax.set_mesh(mesh):
    evaluator, note = _evaluator(args, loaded, section, out, mesh)
    if out:
      out_folder.make(out)
    variables = jax.device_put(loaded.variables, sharding.replicated_sharding(mesh))
    values = evaluator.run(predict, variables)
  values |= {k: int(values[k]) for k in ('examples', 'bad_images') if k in values}
  record = {'source': args.source, 'step': loaded.step, 'evaluation': own}
  record |= {'data': data['source'], 'split': data['split']}
  if out:
    _write(out, record | values, evaluator)
  shown = {'(mask_)?(ap|ar).*': Metric(percent=True)}
  predictions = evaluator.predictions
  if args.json and note:
    print(note, file=sys.stderr)
  return evaluate.finish(args, out, record, values, shown, predictions, FILES, note)


def _evaluator(args, loaded, section: dict, out: Path | None, mesh):
  """Builds the evaluator `coco`: (evaluator, note to print).

  Uses the weights' `pp` by default. With `--data`, masks are compared if both the model and
  the data have them.
  """
  from vit_jax import sharding
  from vit_jax.data.ops import registry
  from vit_jax.detection.evaluators import coco
  from vit_jax.evaluators import class_match

  divisor = sharding.batch_divisor(mesh)
  data = {'pp': loaded.pp, **section['data']}
  data['batch_size'] = args.batch or -(-_BATCH // divisor) * divisor
  if args.pp or args.resolution:  # These options replace the run's pipeline.
    data['pp'] = args.pp or loaded.pp
  if not any({'boxes', 'label'} & {*op.maps} for op in registry.parse(data['pp'])):
    # A batch needs the same number of objects in every image. One suffices, because the
    # truth comes from the source.
    data['pp'] += '|pad_to(boxes=1, label=1)'
  if out:
    data['bad_log'] = out / 'bad_images.jsonl'
  names = loaded.class_names or evaluate.names_of_run(args.source)
  classes = class_match.Classes(names, loaded.model.num_classes)
  build = functools.partial(coco.Coco, mesh, lambda: None, classes, data=data)
  masks = section.get(
    'masks', bool(args.data and getattr(loaded.model.untuned, 'masks', False))
  )
  note = ''
  try:
    evaluator = build(masks=masks)
  except UserError as error:
    if not masks or not args.data:
      raise
    evaluator = build()
    note = printable(f'Masks are not compared: {error}')
  loaded.check_shape(evaluator.batches.spec['image'].shape[1:], data['pp'])
  return evaluator, note


def _write(out: Path, record: dict, evaluator) -> None:
  from vit_jax.detection.coco import average_precision, files
  from vit_jax.train import metrics

  truth, detections = evaluator.compared
  prefixes = [{'bbox': '', 'segm': 'mask_'}[kind] for kind in evaluator.measured]
  names = [prefix + name for prefix in prefixes for name in average_precision.OF_CLASS]
  rows = [('class', 'name', 'objects', *names)]
  tables = [table for _, table, _ in evaluator.measured.values()]
  for k, numbers in enumerate(np.concatenate(tables, 1)):
    cells = [f'{x:.6f}' if x >= 0 else '' for x in numbers]
    number = int(((truth.category == k) & ~truth.crowd).sum())
    rows.append((truth.category_ids[k], truth.class_names[k], number, *cells))
  out_folder.write_csv(out / 'per_class.csv', rows)
  metrics.write_json(out / 'detections.json', files.results(truth, detections))
  metrics.write_json(out / 'summary.json', record)
