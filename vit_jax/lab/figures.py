"""Draws runs next to published results: accuracy against compute, or against data.

`vit_jax figures compute|data RUN ...` calls it, with the arguments `runs` and `metric`.
"""

import json
import math
from collections.abc import Callable
from typing import NamedTuple

from vit_jax import config as config_lib
from vit_jax import files, terminal
from vit_jax.errors import UserError, choose
from vit_jax.evaluators import find_metric
from vit_jax.lab import published, table
from vit_jax.tools.figures import Drawing
from vit_jax.tools.inspect.model import cost
from vit_jax.train import flops, metrics, status
from vit_jax.weights import runs as run_weights

_COLUMNS = ('source', 'name', 'x', 'accuracy', 'std', 'runs', 'metric')


class Result(NamedTuple):
  """The result of a run."""

  folder: str
  name: str  # model:variant, and the weights that it started from
  recipe: str  # the config without the seed
  seed: int
  metric: str
  value: float  # in per cent if it is a share
  num_examples: int | None  # examples of its pre-training; None: unknown
  exaflops: float | None  # cost of its pre-training; None: unknown


def read(folder: str, metric: str | None = None) -> Result:
  """Reads the result of a run.

  Args:
    metric: a name such as 'test/top1'. None: config.checkpoint.best if the run has it,
      otherwise the first accuracy.
  """
  config, place = config_lib.read(folder), files.path(folder)
  rows, _ = metrics.read_rows(place / 'metrics.jsonl')
  values = {k: v for k, v in metrics.last_values(rows).items() if math.isfinite(v)}
  kinds = {key: find_metric(key, config['evals']) for key in values}
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
  recipe = {k: v for k, v in config.items() if k != 'seed'}
  num_examples, exaflops = _pretraining(place, config) or (None, None)
  return Result(
    folder=folder,
    name=f'{name} from {source}' if source else name,
    recipe=json.dumps(recipe, sort_keys=True),
    seed=config.get('seed', 0),
    metric=metric,
    value=value * (100 if kinds[metric].percent else 1),
    num_examples=num_examples,
    exaflops=exaflops,
  )


def _pretraining(folder, config: dict) -> tuple[int, float] | None:
  """Returns (examples, exaFLOPs) of a chain's first run; None if it starts from a file."""
  # A longer chain of runs must be a circle.
  step, depth = None, 9
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


def compute(args) -> Drawing:
  """Draws accuracy against the compute of pre-training (figure 5, Table 6)."""
  from vit_jax.explain import plots

  rows, panels, label = [_COLUMNS], [], 'Pre-training compute (exaFLOPs)'
  for title, key in (('Average of 5', 'average'), ('ImageNet', 'imagenet')):
    series: dict[str, plots.Series] = {}
    for r in published.TABLE_6:
      y, name = getattr(r, key), f'{r.name}, {r.epochs} epochs'
      one = series.setdefault(r.kind, plots.Series(r.kind, [], []))
      one.x.append(r.exaflops)
      one.y.append(y)
      rows.append(('ViT paper, Table 6', name, r.exaflops, f'{y:.2f}', '', '', title))
    series = list(series.values())
    panels.append(plots.Panel(f'{title} (paper)', label, 'Accuracy (%)', series))
  return _add_runs(args, panels, rows, label, lambda run: run.exaflops)


def data(args) -> Drawing:
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
  return _add_runs(args, panels, rows, label, lambda run: run.num_examples)


def _add_runs(args, panels: list, rows: list, label: str, x: Callable) -> Drawing:
  """Adds a panel with the runs. Runs that differ only in the seed become one point."""
  from vit_jax.explain import plots

  runs = [read(folder, args.metric) for folder in args.runs]
  if len(names := sorted({run.metric for run in runs})) > 1:
    raise UserError(f'The runs report {names}: choose one with --metric NAME.')
  notes, named = [], {}
  for run in runs:
    if x(run) is None:
      notes.append(
        f'{run.folder} is left out: the pre-training of {run.name} is unknown.'
      )
      continue
    seeds = named.setdefault(run.name, {}).setdefault((x(run), run.recipe), {})
    if run.seed in seeds:
      notes.append(f'{run.folder} is left out: another run has its config and seed.')
    seeds.setdefault(run.seed, run.value)
  if notes and not named:
    raise UserError(notes[0])
  series = []
  for name, points in named.items():
    means = [
      (at, table.Mean.compute([*y.values()])) for (at, _), y in sorted(points.items())
    ]
    xs, ys, stds = zip(*((at, m.mean, m.std or 0.0) for at, m in means), strict=True)
    series.append(plots.Series(name, xs, ys, stds, joined=True))
    for at, m in means:
      rows.append(('runs', name, f'{at:.6g}', *m.texts(), m.number, runs[0].metric))
  if series:
    panels.append(plots.Panel('Runs', label, runs[0].metric, series))
  return Drawing(plots.panels(panels), rows, tuple(notes))
