"""The numbers on a run's page: results, curves and calibration."""

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from vit_jax import evaluators, optim
from vit_jax.evaluators.base import interval
from vit_jax.evaluators.class_scores import class_scores
from vit_jax.optim import schedules
from vit_jax.tools.report.folder import Run
from vit_jax.train.metrics import TIME, last_values

# Maximum number of points in a curve: two for each pixel of its width.
POINTS = 1200
# The most rows of the table of classes.
_CLASSES = 50
# (title, regex of names) of the charts on the page of one run. All numbers whose names match
# are curves of that chart.
_CHARTS = (
  ('Loss', r'.*/loss'),
  ('Parts of the loss', r'train/loss_\w+'),
  ('Positive regions per image', r'train/positives'),
  ('Accuracy', r'train/accuracy|.*/top[15]'),
  ('Few-shot accuracy', r'.*\dshot(_sweep)?'),
  ('Accuracy of probes', r'.*(_\d+nn|_top1)'),
  ('Average precision', r'.*/ap(50|75)?'),
  ('Pixels', r'.*/(mean_iou|pixel_accuracy)'),
  ('Learning rate', r'train/lr'),
  ('Images per second', r'time/images_per_s'),
  ('Gradient norm', r'train/grad_norm'),
)
_NOT_SHOWN = r'step|time/seconds|.*/(examples|bad_\w+)|.*_(seed\d+|std|(log2_)?l2)'


def downsample(x: Sequence, y: Sequence, most: int = POINTS) -> tuple[list, list]:
  """Reduces a curve to about `most` points: the lowest and the highest of each stretch."""
  x, y = np.asarray(x), np.asarray(y, float)
  if len(x) <= most:
    return x.tolist(), y.tolist()
  rows = {0, len(x) - 1}
  finite = np.isfinite(y)
  low, high = np.where(finite, y, np.inf), np.where(finite, y, -np.inf)
  for part in np.array_split(np.arange(len(x)), most // 2 - 1):
    rows |= {part[low[part].argmin()], part[high[part].argmax()]}
  rows = sorted(rows)
  return x[rows].tolist(), y[rows].tolist()


def charts(runs: list[Run]) -> list[dict]:
  """Returns the charts that page.js draws, with the curves of all runs.

  A chart is {'title', 'x': name of the axis, 'percent', 'log', 'zero': whether the y axis
  begins at 0, 'curves'}. A curve is {'run': number of the run, 'name', 'x', 'y'}. Numbers
  that are not finite are None. With several runs, each metric has its own chart. A number
  that was measured at one step only has no curve.
  """
  most = max(200, POINTS // math.ceil(len(runs) / 4))
  shared: dict[str, dict] = {}
  order = [title for title, _ in _CHARTS]
  shared_by_runs = order[order.index('Learning rate') :]
  for number, run in enumerate(runs):
    for name in dict.fromkeys(name for row in run.rows for name in row):
      metric = evaluators.find_metric(name, run.evals)
      points = [(row['step'], row[name]) for row in run.rows if name in row]
      group = next((t for t, pattern in _CHARTS if re.fullmatch(pattern, name)), name)
      # Leave out a number that stayed at 0, such as a counter of bad steps.
      counter = group == name and not any(y for _, y in points)
      if counter or re.fullmatch(_NOT_SHOWN, name) or metric.detail or len(points) < 2:
        continue
      if name == 'train/lr':
        points = schedule(run.config) or points
      x, y = downsample(*zip(*points, strict=True), most)
      y = [float(f'{v:.5g}') if math.isfinite(v) else None for v in y]
      percent = metric.percent or name == 'train/accuracy'
      place = order.index(group) if group in order else len(order)
      title = group if len(runs) == 1 or group in shared_by_runs else name
      log, zero = group == 'Gradient norm', group == 'Images per second'
      chart = dict(
        title=title, place=place, x='step', percent=percent, log=log, zero=zero
      )
      curve = {'run': number, 'name': name, 'x': x, 'y': y}
      shared.setdefault(title, {**chart, 'curves': []})['curves'].append(curve)
  return sorted(shared.values(), key=lambda chart: chart['place'])


def schedule(config: dict) -> list[tuple[int, float]]:
  """Returns [(step, learning rate), ...] of a whole run, by its config; [] without `optim`."""
  section, total = config.get('optim'), config['resolved'].get('total_steps')
  if not section or not total:
    return []
  options = section.get('schedule') or {}
  rate = optim.make_schedule(section['lr'], total, **options)
  warmup = schedules.warmup_steps(options.get('warmup', 0), total)
  corners = warmup, total - 1 - options.get('cooldown', 0)
  steps = np.unique([*np.linspace(0, total - 1, 400).astype(int), *corners])
  return list(zip((steps + 1).tolist(), np.asarray(rate(steps)).tolist(), strict=True))


def results(run: Run) -> dict[str, str]:
  """Returns the last numbers of a run as {name: text}.

  A few-shot accuracy has its standard deviation over the seeds, and a share of images its
  95 % interval.
  """
  values, texts = last_values(run.rows), {}
  for name, value in values.items():
    metric = evaluators.find_metric(name, run.evals)
    if name.startswith((TIME, 'train/')) or metric.detail:
      continue
    texts[name] = metric.format_with_std(values, name)
    count = values.get(f'{name.rpartition("/")[0]}/examples')
    if metric.of_images and count and 0 <= value <= 1:
      low, high = interval(value, count)
      texts[name] += f' ({low:.1%} to {high:.1%})'
  if 'train/loss' in values:
    texts['train/loss'] = f'{values["train/loss"]:.4g}'
  return texts


def class_rows(label: Sequence, predicted: Sequence, name_of) -> list[tuple]:
  """Returns the rows (class, examples, precision, recall, F1) of the page, as text.

  Examples without one label (-1) are left out. Of many classes the page has those with the
  lowest F1.
  """
  pairs = [pair for pair in zip(label, predicted, strict=True) if pair[0] >= 0]
  examples, answers = Counter(k for k, _ in pairs), Counter(k for _, k in pairs)
  right = Counter(k for k, answer in pairs if k == answer)
  classes = sorted(examples | answers)
  counts = ([count[k] for k in classes] for count in (right, examples, answers))
  scores = class_scores(*counts)
  text = lambda x: '–' if np.isnan(x) else f'{x:.1%}'
  rows = []
  for i in sorted(np.argsort(scores['f1'], kind='stable')[:_CLASSES]):
    k, shares = classes[i], [text(x[i]) for x in scores.values()]
    rows.append((name_of(k), f'{examples[k]:,}', *shares))
  return rows


def calibrate(confidence, right, bins: int = 15) -> dict | None:
  """Measures the calibration of predictions; returns None if no confidence is finite.

  Args:
    confidence: float [n] in [0, 1]; values that are not finite are left out.
    right: bool [n].

  Returns:
    ece: the expected calibration error, the mean of |accuracy - confidence| over bins,
      weighted by their numbers of examples (Guo et al. 2017, arXiv 1706.04599, equation 3;
      15 bins as there).
    confidence, accuracy: the means over all examples.
    rows: (low, high, examples, confidence, accuracy) of each bin that has examples. A bin
      has the confidences in (low, high].
  """
  confidence, right = np.asarray(confidence, float), np.asarray(right, float)
  finite = np.isfinite(confidence)
  confidence, right = confidence[finite], right[finite]
  if not len(confidence):
    return None
  where = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
  rows = []
  for i in np.unique(where).tolist():
    inside = where == i
    means = float(confidence[inside].mean()), float(right[inside].mean())
    rows.append((i / bins, (i + 1) / bins, int(inside.sum()), *means))
  return {
    'ece': sum(n * abs(c - a) for *_, n, c, a in rows) / len(confidence),
    'confidence': float(confidence.mean()),
    'accuracy': float(right.mean()),
    'rows': rows,
  }


def reliability(rows: list[tuple]) -> dict:
  """Returns the chart of accuracy by confidence, from the rows of a calibration."""
  *_, confidence, accuracy = zip(*rows, strict=True)
  perfect = {'run': 0, 'name': 'perfect calibration', 'x': [0, 1], 'y': [0, 1]}
  curve = {'run': 0, 'name': 'accuracy', 'x': confidence, 'y': accuracy}
  chart = {'title': 'Accuracy by confidence', 'x': 'confidence', 'percent': True}
  return {**chart, 'curves': [curve, perfect]}
