"""Figures of runs beside the paper's results: compute, data, vtab, shape."""

import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from vit_jax import terminal
from vit_jax.errors import UserError
from vit_jax.lab import published
from vit_jax.lab.figures import groups, results
from vit_jax.lab.figures.results import Result
from vit_jax.tools.figures.drawn import Drawn

_PAPER = 'ViT paper'
_COLUMNS = ('source', 'name', 'x', 'accuracy', 'std', 'runs', 'metric')


def compute(args) -> Drawn:
  """Draws accuracy against the compute of pre-training (figure 5, Table 6)."""
  from vit_jax.explain import plots

  rows, kinds = [_COLUMNS], {}
  for row in published.TABLE_6:
    kinds.setdefault(row.kind, []).append(row)
    name = f'{row.name}, {row.epochs} epochs'
    for metric, value in (('average of 5', row.average), ('ImageNet', row.imagenet)):
      rows.append(
        (f'{_PAPER}, Table 6', name, row.exaflops, f'{value:.2f}', '', '', metric)
      )
  label = 'Pre-training compute (exaFLOPs)'
  panels = [
    plots.Panel(
      title,
      label,
      'Transfer accuracy (%)' if i == 0 else '',
      [
        plots.Series(
          kind, [r.exaflops for r in found], [getattr(r, key) for r in found]
        )
        for kind, found in kinds.items()
      ],
    )
    for i, (title, key) in enumerate(
      (('Average of 5 (paper)', 'average'), ('ImageNet (paper)', 'imagenet'))
    )
  ]
  known, notes = _known(_read(args), 'exaflops')
  panels += _panel(plots, known, 'Runs', label, lambda r: r.exaflops, _kind, rows)
  return Drawn(plots.panels(panels), rows, notes)


def data(args) -> Drawn:
  """Draws accuracy against the size of the pre-training data (figure 3, Table 5)."""
  from vit_jax.explain import plots

  rows, series = [_COLUMNS], []
  for name, values in published.TABLE_5.items():
    points = [(x, y) for x, y in zip(published.SETS.values(), values, strict=True) if y]
    series.append(plots.Series(name, *zip(*points, strict=True), joined=True))
    rows += [
      (f'{_PAPER}, Table 5', name, f'{x:.0f}', y, '', '', 'ImageNet') for x, y in points
    ]
  ticks = {x: f'{name}\n({x / 1e6:.3g}M)' for name, x in published.SETS.items()}
  label = 'Images to pre-train on'
  panels = [plots.Panel('ImageNet (paper)', label, 'Accuracy (%)', series, ticks)]
  known, notes = _known(_read(args), 'num_examples')
  examples = lambda r: r.num_examples
  panels += _panel(
    plots, known, 'Runs', label, examples, lambda r: r.model, rows, joined=True
  )
  return Drawn(plots.panels(panels), rows, notes)


def vtab(args) -> Drawn:
  """Draws VTAB-1k by groups of tasks (figure 2, Table 9)."""
  tasks = {name: group for name, group, _ in published.VTAB}
  found = {
    name: {task: [value] for task, value in zip(tasks, values, strict=True)}
    for name, values in published.TABLE_9.items()
  }
  for result in _read(args):
    task = _task(result)
    ours = found.setdefault(result.started or result.model, {})
    ours.setdefault(task, []).append(result.value)
  sources = dict.fromkeys(published.TABLE_9, f'{_PAPER}, Table 9')
  return groups.draw(tasks, 'VTAB (19 tasks)', found, sources)


_AXES = {
  'depth': 'Depth',
  'width': 'Width',
  'mlp_dim': 'MLP width',
  'patch_size': 'Patch size',
}


def shape(args) -> Drawn:
  """Draws the scaling of a ViT's depth, width, MLP width and patch size (figure 8)."""
  from vit_jax.explain import plots

  known = _read(args)
  if not known:
    raise UserError(
      'shape needs runs: the paper draws figure 8 (around 8 layers, width 1024, MLP width '
      '2048, patches of 32) but does not print its numbers. Give the folders of runs that '
      'differ in depth, width, mlp_dim or patch_size.'
    )
  for result in known:
    if result.family != 'vit' or result.fields['stem_blocks'] is not None:
      raise UserError(
        f'shape is for ViTs; {result.folder} is a run of {result.model}, which compute draws.'
      )
  sizes = [tuple(r.fields[axis] for axis in _AXES) for r in known]
  differing = lambda a, b: [
    axis for axis, m, n in zip(_AXES, a, b, strict=True) if m != n
  ]
  # The lines meet in the run that the most others differ from in one field only.
  single = [sum(len(differing(a, b)) == 1 for b in sizes) for a in sizes]
  base = single.index(max(single))
  lines: dict[str, list[Result]] = {}
  for result, size in zip(known, sizes, strict=True):
    axes = differing(sizes[base], size)
    if axes:
      name = _AXES[axes[0]] if len(axes) == 1 else 'Several' if len(axes) < 4 else 'All'
      lines.setdefault(name, []).append(result)
  alike = [r for r, size in zip(known, sizes, strict=True) if size == sizes[base]]
  rows, series = [_COLUMNS], []
  relative = lambda r: r.gflops / known[base].gflops
  for name, found in (lines or {'Base': []}).items():
    points = _points([*alike, *found], relative)
    series.append(_series(plots, name, points, joined=True))
    rows += _rows(name, points, alike[0].metric)
  at = dict(zip(_AXES, sizes[base], strict=True))
  note = f'The lines meet in {known[base].folder}: ' + ', '.join(
    f'{axis} {"x".join(map(str, n)) if isinstance(n, tuple) else n}'
    for axis, n in at.items()
  )
  panel = plots.Panel('', 'Relative compute', _ylabel(known), series)
  return Drawn(plots.panels([panel]), rows, (note + '.',))


def _read(args) -> list[Result]:
  found = [results.read(folder, args.metric) for folder in args.runs]
  for result in found:
    if not result.finished:
      terminal.say(f'warning: {result.folder} has not reached its end.')
  if len(names := sorted({r.metric for r in found})) > 1 and args.name != 'vtab':
    raise UserError(
      f'The runs report different metrics, {names}: choose one, --metric NAME.'
    )
  return found


def _known(results: list[Result], what: str) -> tuple[list[Result], tuple[str, ...]]:
  """Returns (the runs whose pre-training is known, a note about each of the others)."""
  lost = [r for r in results if getattr(r, what) is None]
  if lost and len(lost) == len(results):
    raise UserError(
      f'{lost[0].folder} started from {lost[0].started!r}, which is not a run: what its '
      'pre-training took is unknown, so there is nothing to draw.'
    )
  notes = [
    f'{r.folder} is left out: it started from {r.started!r}, which is not a run, so what '
    'its pre-training took is unknown.'
    for r in lost
  ]
  return [r for r in results if r not in lost], tuple(notes)


def _panel(plots, results, title, xlabel, x, label, rows, joined=False) -> list:
  """Returns [a panel of runs], or [] without runs; adds its numbers to `rows`."""
  series = []
  for name in dict.fromkeys(map(label, results)):
    found = [r for r in results if label(r) == name]
    points = _points(found, x)
    series.append(_series(plots, name, points, joined))
    rows += _rows(name, points, found[0].metric)
  if not series:
    return []
  return [plots.Panel(title, xlabel, _ylabel(results), series)]


def _points(results: Iterable[Result], x: Callable) -> list[tuple[float, str, list]]:
  """Returns [(x, model, values)] by x; runs that differ by the seed are one point."""
  found: dict[tuple, list] = {}
  for r in results:
    alike = x(r), r.model, r.data, r.started
    found.setdefault(alike, []).append(r.value)
  return sorted((x, model, values) for (x, model, *_), values in found.items())


def _series(plots, name: str, points, joined: bool):
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
  return [
    (
      'runs',
      f'{name}: {model}' if name != model else model,
      f'{x:.6g}',
      *groups.summary(v),
      metric,
    )
    for x, model, v in points
  ]


def _ylabel(results: list[Result]) -> str:
  return f'{results[0].metric}{" (%)" if results[0].percent else ""}'


def _kind(result: Result) -> str:
  if result.family != 'vit':
    return {'bit': 'ResNet (BiT)'}.get(result.family, result.family)
  hybrid = result.fields['stem_blocks'] is not None
  return 'Hybrid' if hybrid else 'Transformer (ViT)'


def _task(result: Result) -> str:
  """Returns the VTAB task of a run, by its folder's name or its data."""
  for text in (Path(result.folder).name, result.data):
    found = [
      name for name, _, regex in published.VTAB if re.search(regex, text.lower())
    ]
    if len(found) == 1:
      return found[0]
  raise UserError(
    f'{result.folder}: neither its name nor its data, {result.data}, names one VTAB '
    f'task: {[name for name, *_ in published.VTAB]}. Name the folder after the task, '
    'such as clevr-count.'
  )
