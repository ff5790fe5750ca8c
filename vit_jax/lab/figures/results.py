"""The result of a run and the cost of its pre-training, from its folder."""

import dataclasses
import math
from pathlib import Path

from vit_jax import config as config_lib
from vit_jax import files, models
from vit_jax.errors import UserError, did_you_mean
from vit_jax.evaluators import declared
from vit_jax.tools.inspect import cost, flops
from vit_jax.train import metrics, status
from vit_jax.weights import runs


@dataclasses.dataclass(frozen=True)
class Result:
  """One run.

  Attributes:
    folder: of the run.
    model: 'vit:B/16', or for a ViT without a variant 'ViT 3×96/4', its blocks, width and
      patch size.
    fields: of the model, {name: value}.
    family: 'vit', 'bit', ...
    started: name of the weights that it started from, or ''.
    data: its config.data.source, as text.
    metric, value: the result that was measured last, shares in per cent.
    percent: whether it is a share.
    gflops: of one image, forward.
    num_examples: of the data that it was pre-trained on; None if unknown.
    exaflops: of the pre-training; None if unknown.
    finished: whether the run reached its end.
  """

  folder: str
  model: str
  fields: dict
  family: str
  started: str
  data: str
  metric: str
  value: float
  percent: bool
  gflops: float
  num_examples: int | None
  exaflops: float | None
  finished: bool


def read(folder: str, metric: str | None) -> Result:
  """Returns the result of a run.

  Args:
    folder: of the run.
    metric: 'test/top1'; None: config.checkpoint.best, or else the first share of which
      more is better.

  Raises:
    UserError: for a folder that is not a run's, or a run without that metric.
  """
  config = config_lib.read(folder)
  place = files.path(folder)
  known, _ = metrics.read_rows(place / 'metrics.jsonl')
  values = metrics.last_values(known)
  values = {k: v for k, v in values.items() if math.isfinite(v)}
  metric = _metric(folder, config, values, metric)
  percent = declared(metric, config['evals']).percent
  state = status.read(place) or {}
  section = dict(config['model'])
  family, fields = models.resolve(
    section.pop('name'), section.pop('variant', None), **section
  )
  fields = models.fields_of(models.build(family, **fields))
  trained = _pretraining(place, config)
  source = (config.get('weights') or {}).get('source')
  return Result(
    folder,
    _model(config['model'], family, fields),
    fields,
    family,
    Path(source).name if source else '',
    _text(config['data']['source']),
    metric,
    values[metric] * (100 if percent else 1),
    percent,
    _forward(config) / 1e9,
    trained and trained[0],
    trained and trained[1],
    state.get('state') == 'finished',
  )


def _metric(folder, config: dict, values: dict, metric: str | None) -> str:
  measured = [k for k in values if not k.startswith(('train/', 'time/'))]
  if metric:
    if metric not in values:
      raise UserError(
        f'{folder} has no number {metric!r}: one of {measured}.'
        f'{did_you_mean(metric, measured)}'
      )
    return metric
  best = config.get('checkpoint', {}).get('best')
  if best in values:
    return best
  for name in measured:
    kind = declared(name, config['evals'])
    if kind.percent and kind.larger_is_better:
      return name
  raise UserError(
    f'{folder} has no accuracy: {measured or "nothing evaluated"}; --metric NAME.'
  )


def _pretraining(folder, config: dict, depth: int = 9) -> tuple[int, float] | None:
  """Returns (examples in the data set, exaFLOPs) of the run in which training began.

  For a run that started from another run's weights that is the other run; None for one
  that started from a file of weights, whose cost is unknown.
  """
  source, wanted = (config.get('weights') or {}).get('source'), None
  while source:
    found = runs.find(source)
    if found is None or depth == 0:
      return None
    folder, wanted = found
    config, depth = config_lib.read(folder), depth - 1
    source = (config.get('weights') or {}).get('source')
  resolved = config['resolved']
  told = status.read(folder) or {}
  steps = told.get('step', resolved['total_steps'])
  if wanted == 'best':
    steps = told.get('best_step') or steps
  elif wanted:
    steps = int(wanted)
  seen = steps * config['data']['batch_size']
  return resolved['num_examples'], flops.exa_training(_forward(config), seen)


def _forward(config: dict) -> int:
  return cost.of(config['model'], config['resolved']['image_shape']).operations


def _model(section: dict, family: str, fields: dict) -> str:
  if variant := section.get('variant'):
    return f'{section["name"]}:{variant}'
  if family != 'vit':
    return section['name']
  patch = 'x'.join(str(n) for n in dict.fromkeys(fields['patch_size']))
  return f'ViT {fields["depth"]}×{fields["width"]}/{patch}'


def _text(source) -> str:
  """Returns config.data.source as one line, the parts of a mixture joined."""
  if isinstance(source, list):
    return ' + '.join(str(part['source']) for part in source)
  return str(source)
