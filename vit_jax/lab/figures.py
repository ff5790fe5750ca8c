"""Figures of runs beside published results: compute and data.

Each function takes `runs`, folders of runs, and `metric`, and returns a `Drawn`; the
command is `vit_jax figures NAME RUN ...`.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from vit_jax import config as config_lib
from vit_jax import files, models, terminal
from vit_jax.errors import UserError, choose
from vit_jax.evaluators import declared
from vit_jax.explain import plots
from vit_jax.lab import published, table
from vit_jax.tools.figures.drawn import Drawn
from vit_jax.tools.inspect import cost, flops
from vit_jax.train import metrics, status
from vit_jax.weights import runs as run_weights

_COLUMNS = ('source', 'name', 'x', 'accuracy', 'std', 'runs', 'metric')


class Result(NamedTuple):
  """The result of a run and the cost of its pre-training.

  Attributes:
    model: 'vit:B/16', or 'ViT 3×96/4' (blocks, width, patch size) without a variant.
    kind: 'Transformer (ViT)', 'Hybrid', 'ResNet (BiT)' or a family.
    started: name of the weights that it started from, or ''.
    data: config.data.source as text.
    value: the last value of `metric`, shares in per cent.
    num_examples, exaflops: of the pre-training; None if unknown.
  """

  folder: str
  model: str
  kind: str
  started: str
  data: str
  metric: str
  value: float
  percent: bool
  num_examples: int | None
  exaflops: float | None

  @property
  def label(self) -> str:
    """The label of an axis of values."""
    return f'{self.metric}{" (%)" if self.percent else ""}'


def read(folder: str, metric: str | None = None) -> Result:
  """Returns the result of a run.

  Args:
    metric: such as 'test/top1'; None: config.checkpoint.best, or the first accuracy.

  Raises:
    UserError: for a folder that is no run's, or a run without that metric.
  """
  config, place = config_lib.read(folder), files.path(folder)
  rows, _ = metrics.read_rows(place / 'metrics.jsonl')
  values = {k: v for k, v in metrics.last_values(rows).items() if math.isfinite(v)}
  values = {k: v for k, v in values.items() if not k.startswith(('train/', 'time/'))}
  kinds = {key: declared(key, config['evals']) for key in values}
  if not metric:
    shares = (k for k, kind in kinds.items() if kind.percent and kind.larger_is_better)
    best = config.get('checkpoint', {}).get('best')
    metric = best if best in values else next(shares, 'an accuracy')
  value = choose(f'metric of {folder}', metric, values)
  if (status.read(place) or {}).get('state') != 'finished':
    terminal.say(f'warning: {folder} has not reached its end.')
  section = dict(config['model'])
  family, fields = models.resolve(
    section.pop('name'), section.pop('variant', None), **section
  )
  fields = models.fields_of(models.build(family, **fields))
  kind = {'vit': 'Transformer (ViT)', 'bit': 'ResNet (BiT)'}.get(family, family)
  model, variant = config['model']['name'], config['model'].get('variant')
  if family == 'vit' and not variant:
    sides = 'x'.join(str(n) for n in dict.fromkeys(fields['patch_size']))
    model = f'ViT {fields["depth"]}×{fields["width"]}/{sides}'
  source, data = (config.get('weights') or {}).get('source'), config['data']['source']
  parts = [part['source'] for part in data] if isinstance(data, list) else [data]
  return Result(
    folder,
    f'{model}:{variant}' if variant else model,
    'Hybrid' if fields.get('stem_blocks') is not None else kind,
    Path(source).name if source else '',
    ' + '.join(map(str, parts)),
    metric,
    value * (100 if kinds[metric].percent else 1),
    kinds[metric].percent,
    *(_pretraining(place, config) or (None, None)),
  )


def _pretraining(folder, config: dict, depth: int = 9) -> tuple[int, float] | None:
  """Returns (examples in the data set, exaFLOPs) of the run in which training began.

  A run may start from another's weights. None for one that started from a file.
  """
  step = None
  while source := (config.get('weights') or {}).get('source'):
    run = run_weights.find(source)
    if run is None or depth == 0:
      return None
    (folder, step), depth = run, depth - 1
    config = config_lib.read(folder)
  resolved, state = config['resolved'], status.read(folder) or {}
  steps = state.get('step', resolved['total_steps'])
  if step:
    steps = (state.get('best_step') or steps) if step == 'best' else int(step)
  images = steps * config['data']['batch_size']
  return resolved['num_examples'], flops.exa_training(_forward(config), images)


def _forward(config: dict) -> int:
  return cost.of(config['model'], config['resolved']['image_shape']).operations


def compute(args) -> Drawn:
  """Draws accuracy against the compute of pre-training (figure 5, Table 6)."""
  rows, kinds, panels = [_COLUMNS], {}, []
  label = 'Pre-training compute (exaFLOPs)'
  for row in published.TABLE_6:
    kinds.setdefault(row.kind, []).append(row)
  for title, key in (('Average of 5', 'average'), ('ImageNet', 'imagenet')):
    series = []
    for kind, group in kinds.items():
      x, y = [r.exaflops for r in group], [getattr(r, key) for r in group]
      series.append(plots.Series(kind, x, y))
      names = [f'{r.name}, {r.epochs} epochs' for r in group]
      rows += [
        ('ViT paper, Table 6', *point, '', '', title)
        for point in zip(names, x, map('{:.2f}'.format, y), strict=True)
      ]
    ylabel = '' if panels else 'Transfer accuracy (%)'
    panels.append(plots.Panel(f'{title} (paper)', label, ylabel, series))
  known, notes = _known(_read(args), 'exaflops')
  panels += _panel(known, label, lambda r: r.exaflops, lambda r: r.kind, rows)
  return Drawn(plots.panels(panels), rows, notes)


def data(args) -> Drawn:
  """Draws accuracy against the size of the pre-training data (figure 3, Table 5)."""
  rows, series, label = [_COLUMNS], [], 'Images to pre-train on'
  for name, values in published.TABLE_5.items():
    points = [(x, y) for x, y in zip(published.SETS.values(), values, strict=True) if y]
    series.append(plots.Series(name, *zip(*points, strict=True), joined=True))
    rows += [
      ('ViT paper, Table 5', name, f'{x:.0f}', y, '', '', 'ImageNet') for x, y in points
    ]
  ticks = {x: f'{name}\n({x / 1e6:.3g}M)' for name, x in published.SETS.items()}
  panels = [plots.Panel('ImageNet (paper)', label, 'Accuracy (%)', series, ticks)]
  known, notes = _known(_read(args), 'num_examples')
  x = lambda r: r.num_examples
  panels += _panel(known, label, x, lambda r: r.model, rows, joined=True)
  return Drawn(plots.panels(panels), rows, notes)


def _read(args) -> list[Result]:
  results = [read(folder, args.metric) for folder in args.runs]
  if len(names := sorted({r.metric for r in results})) > 1:
    raise UserError(f'The runs report {names}: choose one, --metric NAME.')
  return results


def _known(results: list[Result], field: str) -> tuple[list[Result], tuple[str, ...]]:
  """Returns (the runs whose pre-training is known, a note about each of the others)."""
  notes = tuple(
    f'{r.folder} is left out: it started from {r.started!r}, which is no run, so the cost '
    'of its pre-training is unknown.'
    for r in results
    if getattr(r, field) is None
  )
  if notes and len(notes) == len(results):
    raise UserError(notes[0])
  return [r for r in results if getattr(r, field) is not None], notes


def _panel(results, xlabel, x, label, rows, joined=False) -> list:
  """Returns [the panel of the runs], or [] without runs; adds its numbers to `rows`."""
  series = []
  for name in dict.fromkeys(map(label, results)):
    points = _points([r for r in results if label(r) == name], x)
    series.append(_series(name, points, joined))
    rows += _rows(name, points, results[0].metric)
  return [plots.Panel('Runs', xlabel, results[0].label, series)] if series else []


def _points(results: Iterable[Result], x: Callable) -> list[tuple[float, str, list]]:
  """Returns [(x, model, values)] by x; runs that differ by the seed are one point."""
  points: dict[tuple, list] = {}
  for r in results:
    points.setdefault((x(r), r.model, r.data, r.started), []).append(r.value)
  return sorted((x, model, values) for (x, model, *_), values in points.items())


def _series(name: str, points, joined: bool):
  stds = [statistics.stdev(v) if len(v) > 1 else 0.0 for _, _, v in points]
  return plots.Series(
    name,
    [x for x, _, _ in points],
    [statistics.mean(v) for _, _, v in points],
    stds if any(stds) else None,
    None if joined or len(points) > 8 else [model for _, model, _ in points],
    joined,
  )


def _rows(name: str, points, metric: str) -> list[tuple]:
  title = lambda model: model if model == name else f'{name}: {model}'
  return [
    ('runs', title(model), f'{x:.6g}', *table.texts(v), metric)
    for x, model, v in points
  ]
