"""`vit_jax evaluate` of a detector: COCO's twelve numbers, by the evaluator 'coco'."""

from pathlib import Path

from vit_jax import cli
from vit_jax.detection.tools import coco_ap
from vit_jax.errors import UserError
from vit_jax.tools import evaluate, out_folder, source

FILES = ('summary.json', 'per_class.csv', 'detections.json')
_BATCH = 8  # images per step, each of a million pixels


def run(args, loaded, own: str | None, section: dict) -> int:
  """Prints the numbers; writes what `--out` asks for."""
  import jax

  for name in ('loss', 'labels', 'class_map', 'among'):
    if getattr(args, name):
      raise UserError(
        f'--{name} is for classes of images; {args.source} is a detector, whose boxes are '
        'compared by the names of their classes.'
      )
  out = args.out and out_folder.check(args.out)
  data = section['data']
  bad_log = {'bad_log': out / 'bad_images.jsonl'} if out else {}
  evaluator, predict, variables = opened(args, loaded, data | bad_log)
  if out:
    out_folder.make(out)
  with jax.set_mesh(evaluator.mesh):
    values = evaluator.run(predict, variables)
  numbers = evaluator.measured.numbers()
  counts = {k: int(values[k]) for k in ('examples', 'bad_images') if k in values}
  record = {'source': args.source, 'step': loaded.step, 'evaluation': own}
  record |= {'data': data['source'], 'split': data['split'], **numbers, **counts}
  if out:
    _write(out, record, evaluator)
  if args.json:
    cli.print_json(record)
    return 0
  if loaded.step is not None:
    print(f'{"step":12} {loaded.step:,}')
  if own:
    print(
      f"{'data':12} {data['source']}, {data['split']}: the run's evaluation {own!r}"
    )
  for name, n in counts.items():
    print(f'{name:12} {n:,}')
  print('\n'.join(coco_ap.lines(numbers)))
  if out:
    print(f'written to {out}: {", ".join(FILES)}')
  return 0


def opened(args, loaded, data: dict) -> tuple:
  """Returns (the evaluator `coco` for a detector, its `predict`, variables on the devices).

  Args:
    args: `batch`, `pp`, `resolution` and `source` of the command line.
    loaded: `weights.Loaded`.
    data: section `data` of an evaluation; by default `pp` is that of the weights.
  """
  import jax

  from vit_jax import models, sharding
  from vit_jax.data.ops import registry
  from vit_jax.detection.evaluators import coco
  from vit_jax.detection.tasks import detect
  from vit_jax.evaluators import class_match

  models.check_outputs(loaded.model, 'boxes', args.source)
  mesh = sharding.make_mesh()
  divisor = sharding.batch_divisor(mesh)
  data = {'pp': loaded.pp, **data}
  data['batch_size'] = args.batch or -(-_BATCH // divisor) * divisor
  if args.pp or args.resolution:  # instead of the run's own
    data['pp'] = args.pp or loaded.pp
  if not any({'boxes', 'label'} & {*op.maps} for op in registry.parse(data['pp'])):
    # A batch needs the same number of objects in every image; the truth is the source's.
    data['pp'] += '|pad_to(boxes=1, label=1)'
  names = loaded.class_names or evaluate.names_of_run(args.source)
  classes = class_match.Classes(names, loaded.model.num_classes)
  with jax.set_mesh(mesh):
    evaluator = coco.Coco(mesh, lambda: None, classes, data=data)
    source.check_images(loaded, evaluator.batches)
    variables = jax.device_put(loaded.variables, sharding.replicated(mesh))

  def predict(variables, batch):
    outputs, _ = loaded.model.apply(variables, **detect.arguments(batch))
    return outputs

  return evaluator, predict, variables


def _write(out: Path, record: dict, evaluator) -> None:
  from vit_jax.detection.coco import files
  from vit_jax.train import metrics

  truth, detections = evaluator.compared
  rows = [('class', 'name', 'objects', *coco_ap.OF_CLASS)]
  for k, name in enumerate(truth.class_names):
    numbers = evaluator.measured.of_category(k)
    cells = [f'{numbers[n]:.6f}' if numbers[n] >= 0 else '' for n in coco_ap.OF_CLASS]
    number = int(((truth.category == k) & ~truth.crowd).sum())
    rows.append((truth.category_ids[k], name, number, *cells))
  out_folder.write_csv(out / 'per_class.csv', rows)
  metrics.write_json(out / 'detections.json', files.rows(truth, detections))
  metrics.write_json(out / 'summary.json', record)
