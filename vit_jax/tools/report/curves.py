"""The metrics of runs over their steps, reduced to the points that a screen can show."""

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from vit_jax import evaluators
from vit_jax.tools.report.folder import Run

POINTS = 1200  # Points of a curve at most: two for each pixel of its width
# Curves by the chart that they share: (title, pattern of names, log scale at first).
_CHARTS = (
  ('Loss', r'.*/loss', False),
  ('Accuracy', r'train/accuracy|.*/top[15]', False),
  ('Few-shot accuracy', r'.*\dshot(_sweep)?', False),
  ('Accuracy of probes', r'.*(_\d+nn|_top1)', False),
  ('Learning rate', r'train/lr', False),
  ('Images per second', r'time/images_per_s', False),
  ('Gradient norm', r'train/grad_norm', True),
)
_NOT_SHOWN = (
  r'step|time/seconds_left|.*/(examples|bad_images)|.*_(seed\d+|std|(log2_)?l2)'
)


def downsample(x: Sequence, y: Sequence, most: int = POINTS) -> tuple[list, list]:
  """Returns at most `most` points of a curve, the extremes of its stretches among them.

  The curve is cut into stretches with the same number of points. Of each stretch the
  lowest and the highest point remain, in their order, so that no peak is lost, and one
  that is not finite, as a gap. The first and the last point of the curve remain too.

  Args:
    x: [n], increasing. y: [n].
    most: 8 or more.
  """
  x, y = np.asarray(x), np.asarray(y, float)
  n = len(x)
  if n <= most:
    return x.tolist(), y.tolist()
  rows = {0, n - 1}
  edges = np.linspace(0, n, (most - 2) // 3 + 1).astype(int)
  for start, stop in itertools.pairwise(edges):
    part = y[start:stop]
    finite = np.isfinite(part)
    if not finite.all():
      rows.add(start + int(np.argmin(finite)))
    if finite.any():
      rows.add(start + int(np.argmin(np.where(finite, part, np.inf))))
      rows.add(start + int(np.argmax(np.where(finite, part, -np.inf))))
  rows = sorted(rows)
  return x[rows].tolist(), y[rows].tolist()


def of_rows(rows: list[dict]) -> dict[str, tuple[list, list]]:
  """Returns {name: (steps, values)} of the rows of metrics.jsonl."""
  found: dict[str, tuple[list, list]] = {}
  for row in rows:
    for name, value in row.items():
      if name != 'step':
        steps, values = found.setdefault(name, ([], []))
        steps.append(row['step'])
        values.append(value)
  return found


def charts(runs: list[Run]) -> list[dict]:
  """Returns the charts that page.js draws, with the curves of all runs.

  A chart is {'title', 'percent', 'log', 'curves'}, a curve {'run': its number, 'name',
  'x', 'y'}. Numbers that are not finite are None.
  """
  most = max(200, POINTS // math.ceil(len(runs) / 4))
  found: dict[str, dict] = {}
  for number, run in enumerate(runs):
    for name, (steps, values) in of_rows(run.rows).items():
      metric = evaluators.declared(name, run.evals)
      if re.fullmatch(_NOT_SHOWN, name) or metric.detail:
        continue
      percent = metric.percent or name == 'train/accuracy'
      title, log = _chart(name)
      if title == name and not any(values):  # a counter that stayed at 0
        continue
      x, y = downsample(steps, values, most)
      chart = {'title': title, 'percent': percent, 'log': log, 'curves': []}
      curve = {'run': number, 'name': name, 'x': x, 'y': [_short(v) for v in y]}
      found.setdefault(title, chart)['curves'].append(curve)
  order = [title for title, *_ in _CHARTS]
  place = lambda title: order.index(title) if title in order else len(order)
  return sorted(found.values(), key=lambda chart: place(chart['title']))


def _chart(name: str) -> tuple[str, bool]:
  for title, pattern, log in _CHARTS:
    if re.fullmatch(pattern, name):
      return title, log
  return name, False


def _short(value: float) -> float | None:
  return float(f'{value:.5g}') if math.isfinite(value) else None
