"""Figures of runs beside published results: accuracy against compute, and against data.

`vit_jax figures compute|data RUN ...`, with the arguments `runs`, folders, and `metric`.
"""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from vit_jax import config as config_lib
from vit_jax import files, terminal
from vit_jax.errors import UserError, choose
from vit_jax.evaluators import declared
from vit_jax.lab import published, table
from vit_jax.tools.figures.drawn import Drawn
from vit_jax.tools.inspect import flops
from vit_jax.tools.inspect.model import cost
from vit_jax.train import metrics, status
from vit_jax.weights import runs as run_weights

_COLUMNS = ('source', 'name', 'x', 'accuracy', 'std', 'runs', 'metric')


class Result(NamedTuple):
  """The result of a run and the cost of its pre-training.

  Attributes:
    name: 'vit:B/16', or 'vit' without a variant, and the weights that it started from.
    value: the last value of `metric`, shares in per cent.
    num_examples, exaflops: of the pre-training; None if unknown.
  """

  folder: str
  name: str
  metric: str
  value: float
  num_examples: int | None
  exaflops: float | None


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
  kinds = {key: declared(key, config['evals']) for key in values}
  if not metric:
    shares = (k for k, kind in kinds.items() if kind.percent and kind.larger_is_better)
    best = config.get('checkpoint', {}).get('best')
    metric = best if best in values else next(shares, 'an accuracy')
  value = choose(f'metric of {folder}', metric, values)
  if (status.read(place) or {}).get('state') != 'finished':
    terminal.say(f'warning: {folder} has not reached its end.')
  name, variant = config['model']['name'], config['model'].get('variant')
  source = (config.get('weights') or {}).get('source')
  name = f'{name}:{variant}' if variant else name
  return Result(
    folder,
    f'{name} from {source}' if source else name,
    metric,
    value * (100 if kinds[metric].percent else 1),
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
  forward = cost(config['model'], resolved['image_shape']).operations
  images = steps * config['data']['batch_size']
  return resolved['num_examples'], flops.exa_training(forward, images)


def compute(args) -> Drawn:
  """Draws accuracy against the compute of pre-training (figure 5, Table 6)."""
  from vit_jax.explain import plots

  rows, kinds, panels = [_COLUMNS], {}, []
  label = 'Pre-training compute (exaFLOPs)'
  for row in published.TABLE_6:
    kinds.setdefault(row.kind, []).append(row)
  for title, key in (('Average of 5', 'average'), ('ImageNet', 'imagenet')):
    series = []
    for kind, group in kinds.items():
      x, y = [r.exaflops for r in group], [getattr(r, key) for r in group]
      series.append(plots.Series(kind, x, y))
      rows += [
        ('ViT paper, Table 6', f'{r.name}, {r.epochs} epochs', r.exaflops)
        + (f'{value:.2f}', '', '', title)
        for r, value in zip(group, y, strict=True)
      ]
    panels.append(plots.Panel(f'{title} (paper)', label, 'Accuracy (%)', series))
  return _with_runs(args, panels, rows, label, lambda run: run.exaflops)


def data(args) -> Drawn:
  """Draws accuracy against the size of the pre-training data (figure 3, Table 5)."""
  from vit_jax.explain import plots

  rows, series, label = [_COLUMNS], [], 'Images to pre-train on'
  for name, values in published.TABLE_5.items():
    points = [(x, y) for x, y in zip(published.SETS.values(), values, strict=True) if y]
    series.append(plots.Series(name, *zip(*points, strict=True), joined=True))
    rows += [
      ('ViT paper, Table 5', name, f'{x:.0f}', y, '', '', 'ImageNet') for x, y in points
    ]
  ticks = {x: f'{name}\n({x / 1e6:.3g}M)' for name, x in published.SETS.items()}
  panels = [plots.Panel('ImageNet (paper)', label, 'Accuracy (%)', series, ticks)]
  return _with_runs(args, panels, rows, label, lambda run: run.num_examples)


def _with_runs(args, panels: list, rows: list, label: str, x: Callable) -> Drawn:
  """Adds the panel of the runs; those that differ by the seed alone are one point."""
  from vit_jax.explain import plots

  runs = [read(folder, args.metric) for folder in args.runs]
  if len(names := sorted({run.metric for run in runs})) > 1:
    raise UserError(f'The runs report {names}: choose one, --metric NAME.')
  notes = tuple(
    f'{run.folder} is left out: the pre-training of {run.name} is unknown.'
    for run in runs
    if x(run) is None
  )
  if notes and len(notes) == len(runs):
    raise UserError(notes[0])
  named: dict[str, dict[float, list[float]]] = {}
  for run in runs:
    if x(run) is not None:
      named.setdefault(run.name, {}).setdefault(x(run), []).append(run.value)
  series = []
  for name, points in named.items():
    points = dict(sorted(points.items()))
    stds = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in points.values()]
    means = [statistics.fmean(v) for v in points.values()]
    series.append(plots.Series(name, list(points), means, stds, joined=True))
    rows += [
      ('runs', name, f'{at:.6g}', *table.texts(v), runs[0].metric)
      for at, v in points.items()
    ]
  if series:
    panels.append(plots.Panel('Runs', label, runs[0].metric, series))
  return Drawn(plots.panels(panels), rows, notes)
