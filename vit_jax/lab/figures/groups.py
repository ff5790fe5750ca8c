"""The figure of a benchmark by groups of tasks (ViT paper, figure 2)."""

import statistics
from collections.abc import Mapping, Sequence

from vit_jax.lab import scores
from vit_jax.tools.figures.drawn import Drawn

COLUMNS = ('source', 'name', 'task', 'group', 'accuracy', 'std', 'runs')


def draw(
  tasks: Mapping[str, str],
  whole: str,
  found: Mapping[str, Mapping[str, Sequence[float]]],
  sources: Mapping[str, str],
) -> Drawn:
  """Draws a panel for each group, with a bar for each of those compared.

  Args:
    tasks: {task: its group}.
    whole: title of the mean of all tasks.
    found: {name: {task: results of its runs, per cent}}.
    sources: {name: where its results are from}; others are of runs.
  """
  from vit_jax.explain import plots

  nan = float('nan')
  groups = scores.groups_of(tasks, whole)
  rows, notes, values, stds = [COLUMNS], (), {}, {}
  for name, of_tasks in found.items():
    source = sources.get(name, 'runs')
    for task in (t for t in tasks if of_tasks.get(t)):
      rows.append((source, name, task, tasks[task], *summary(of_tasks[task])))
    means = scores.of_groups(groups, of_tasks)
    for group in groups:
      if group in means:
        mean, std = means[group]
        shown = '' if std is None else f'{std:.2f}'
        rows.append((source, name, 'mean', group, f'{mean:.2f}', shown, ''))
      else:
        missing = ', '.join(t for t in groups[group] if not of_tasks.get(t))
        notes += (f'{name}: no bar for {group}, as results are missing: {missing}.',)
    values[name] = [means[g].mean if g in means else nan for g in groups]
    stds[name] = [
      means[g].std if g in means and means[g].std is not None else nan for g in groups
    ]
  return Drawn(plots.bars(tuple(groups), values, stds), rows, notes)


def summary(values: Sequence[float]) -> tuple:
  """Returns (mean, standard deviation or '', number of runs) as cells of a table."""
  std = f'{statistics.stdev(values):.2f}' if len(values) > 1 else ''
  return f'{statistics.mean(values):.2f}', std, len(values)
