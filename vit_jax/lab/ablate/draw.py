"""How ablations are drawn."""

import argparse
from collections.abc import Sequence

from vit_jax.evaluators import declared
from vit_jax.lab.figures import runs as figures_of_runs
from vit_jax.lab.grid import rows as grid_rows
from vit_jax.lab.grid.runs import Outcome
from vit_jax.tools.figures.drawn import Drawn

_MOST = 3  # panels


def compared(done: Sequence[Outcome], metrics: Sequence[str], evals: dict) -> Drawn:
  """Draws the cells below each other, a panel for each metric."""
  from vit_jax.explain import plots

  cells: dict[str, list[dict]] = {}
  for outcome in done:
    cells.setdefault(outcome.run.cell.name, []).append(outcome.row)
  panels, table = {}, [('cell', 'metric', 'mean', 'std', 'seeds')]
  for metric in metrics:
    factor, label = _shown(metric, evals)
    means = [grid_rows.mean(rows, metric) for rows in cells.values()]
    for name, mean in zip(cells, means, strict=True):
      if mean is not None:
        table.append((name, label, *_numbers(mean, factor)))
    panels[label] = [
      (mean.mean * factor, (mean.std or 0) * factor) if mean else None for mean in means
    ]
  panels = dict(list(panels.items())[:_MOST])
  return Drawn(plots.compared(list(cells), panels), table)


def shape(done: Sequence[Outcome], metrics: Sequence[str], evals: dict) -> Drawn:
  """Draws accuracy against relative compute, as `vit_jax figures shape`."""
  folders = [str(outcome.run.folder) for outcome in done]
  args = argparse.Namespace(name='shape', runs=folders, metric=metrics[0])
  return figures_of_runs.shape(args)


def data_size(done: Sequence[Outcome], metrics: Sequence[str], evals: dict) -> Drawn:
  """Draws accuracy against the number of training images, a line for each model."""
  from vit_jax.explain import plots

  lines: dict[str, dict[int, list[dict]]] = {}
  for outcome in done:
    model = outcome.run.cell.name.partition('-')[0]
    sizes = lines.setdefault(model, {})
    sizes.setdefault(outcome.row['examples'], []).append(outcome.row)
  panels, table = (
    [],
    [('model', 'gflops', 'examples', 'metric', 'mean', 'std', 'seeds')],
  )
  for metric in metrics[:_MOST]:
    factor, label = _shown(metric, evals)
    series = []
    for model, sizes in lines.items():
      points = [(x, grid_rows.mean(rows, metric)) for x, rows in sorted(sizes.items())]
      points = [(x, mean) for x, mean in points if mean]
      gflops = next(iter(sizes.values()))[0]['gflops']
      table += [
        (model, f'{gflops:.4g}', x, label, *_numbers(mean, factor))
        for x, mean in points
      ]
      series.append(
        plots.Series(
          f'{"ViT" if model == "vit" else "ResNet"}, {gflops:.3g} GFLOPs',
          [x for x, _ in points],
          [mean.mean * factor for _, mean in points],
          [(mean.std or 0) * factor for _, mean in points],
          joined=True,
        )
      )
    panels.append(plots.Panel('', 'Images to pre-train on', label, series))
  return Drawn(plots.panels(panels), table)


def _shown(metric: str, evals: dict) -> tuple[float, str]:
  return (100, f'{metric} (%)') if declared(metric, evals).percent else (1, metric)


def _numbers(mean: grid_rows.Mean, factor: float) -> tuple:
  std = '' if mean.std is None else f'{mean.std * factor:.2f}'
  return f'{mean.mean * factor:.2f}', std, mean.number
