"""The head of a run's page: the main results, their cost, and how to read them."""

import datetime
import itertools
import math
import statistics

import numpy as np

from vit_jax import evaluators
from vit_jax.tools.report import numbers
from vit_jax.tools.report.folder import Run
from vit_jax.train.metrics import TIME, last_values

_SIZES = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads')


def deciding(run: Run) -> list[tuple[str, str, str, str]]:
  """Returns the main metric of each evaluation: (name, value, interval or spread, when).

  The metric that chooses the best checkpoint comes first, with its value at that step.
  """
  texts = numbers.results(run)
  best, at = run.config.get('checkpoint', {}).get('best'), run.status.get('best_step')
  names, when = [best] if best in texts else [], dict.fromkeys(texts, 'measured last')
  if names and at is not None:
    rows = [row for row in run.rows if row['step'] <= at]
    texts[best] = numbers.results(run._replace(rows=rows)).get(best, '')
    when[best] = f'at step {at:,}, the best'
  # Put evaluations that store predictions first: they measure the task itself, while others
  # measure the quality of features.
  for source in sorted(run.evals, key=lambda name: name not in run.predictions):
    own = (name for name in texts if name.startswith(f'{source}/'))
    larger = lambda name: evaluators.find_metric(name, run.evals).larger_is_better
    names += list(filter(larger, own))[:1]
  names = [*dict.fromkeys(names)][:4]
  return [(name, *texts[name].partition(' ')[::2], when[name]) for name in names]


def facts(run: Run) -> dict[str, str]:
  """Returns {name: text} about the state of a run, and its time, memory and cost."""
  last, out = run.starts[-1] if run.starts else {}, {'state': _state(run)}
  clock = [row[f'{TIME}seconds'] for row in run.rows if f'{TIME}seconds' in row]
  # The clock starts anew whenever a run is resumed, so add up its last values.
  total = sum(a for a, b in itertools.pairwise([*clock, 0]) if b < a)
  if (step := run.status.get('best_step')) is not None:
    out['best step'] = f'{step:,}'
  if total:
    out['wall time'] = str(datetime.timedelta(seconds=round(total)))
  if speeds := [x for row in run.rows if (x := row.get(f'{TIME}images_per_s'))]:
    out['images per second'] = f'{statistics.median(speeds):,.0f}'
  if size := last.get('step_temp_bytes'):
    out['memory of a step'] = f'{size / 2**20:,.0f} MiB a device, beside the state'
  if total and last:
    hours = total * last['devices'] / 3600
    out['cost'] = f'{hours:.2g} device hours ({last["device"]})'
  return out


def _state(run: Run) -> str:
  """Describes the state of a run: 'finished, 561 steps', or how far it is."""
  status, total = run.status, run.config['resolved'].get('total_steps')
  if not status:
    return 'status.json cannot be read'
  of = f' of {total:,}' if total and status['step'] != total else ''
  early = f', stopped early: {why}' if (why := status.get('stopped_early')) else ''
  return f'{status["state"]}, {status["step"]:,}{of} steps{early}'


def sentences(run: Run) -> list[str]:
  """Returns sentences about the model, the data, the tuning and the training loss of a run."""
  model, tune = run.config['model'], dict(run.config.get('tune') or {})
  shape = ' × '.join(map(str, run.config['resolved'].get('image_shape', ())))
  name = ' '.join(filter(None, (model.get('name'), model.get('variant'))))
  # The fields that differ from the variant's.
  changed = [f'{k} {model[k]}' for k in _SIZES if model.get('variant') and k in model]
  name += f' with {", ".join(changed)}' if changed else ''
  lines = [f'{name} on {run.config["data"].get("source")}, images {shape}.']
  if parent := (run.config.get('weights') or {}).get('source'):
    lines.append(f'It starts from {parent}.')
  if (method := tune.pop('method', 'full')) != 'full':
    text = f'Tuned by {", ".join([method, *(f"{k} {v}" for k, v in tune.items())])}'
    if run.starts:
      count = run.starts[-1]['parameters']
      text += f': {count["trained"]:,} of {sum(count["parts"].values()):,} parameters'
    lines.append(f'{text}.')
  values, reasons = last_values(run.rows), describe_softening(run)
  train = values.get('train/loss', -math.inf)
  lower = [name for k in run.evals if values.get(name := f'{k}/loss', math.inf) < train]
  if reasons and lower:
    lines.append(
      f'The training loss, {train:.3g}, is above {lower[0]}, {values[lower[0]]:.3g}: '
      f'training softens the targets by {reasons}, the evaluation does not.'
    )
  return lines


def describe_softening(run: Run) -> str:
  """Describes how targets are smoothed and mixed: 'label smoothing 0.1 and mixup 0.2'."""
  task, keys = run.config.get('task') or {}, ('label_smoothing', 'mixup', 'cutmix')
  parts = (f'{key.replace("_", " ")} {task[key]:g}' for key in keys if task.get(key))
  return ' and '.join(parts)


def compare_runs(runs: list[Run]) -> list[tuple[str, ...]]:
  """Compares the last results of runs in rows (name, a text per run); ★ marks the best.

  An accuracy that is not the best has its difference from the best in points, with 1.96
  standard errors, if both runs have predictions for the same images.
  """
  parts = [[f(run) for run in runs] for f in (numbers.results, facts)]
  table, rows = [a | b for a, b in zip(*parts, strict=True)], []
  for name in dict.fromkeys(name for part in parts for texts in part for name in texts):
    larger = evaluators.find_metric(name, runs[0].evals).larger_is_better
    values = [last_values(run.rows).get(name, math.nan) for run in runs]
    cells = [texts.get(name, '') for texts in table]
    # Training losses are not compared, because the targets may differ.
    if larger is not None and np.isfinite(values).sum() > 1 and 'train/' not in name:
      best = np.nanargmax(values) if larger else np.nanargmin(values)
      for i, run in enumerate(runs):
        gap = '' if i == best else difference(run, runs[best], name)
        cells[i] += ' ★' if values[i] == values[best] else gap
    rows.append((name, *cells))
  return rows


def difference(run: Run, other: Run, name: str) -> str:
  """Formats the difference of two accuracies, paired by image: ', -1.39 ± 1.21'.

  '' if the runs have no predictions for the same images. Half an image is added to each of
  the two ways to disagree. Otherwise, models that agree on every image would differ by 0 with
  certainty.
  """
  source, _, metric = name.partition('/')
  columns = {'top1': 1, 'top5': 5}.get(metric)
  one, two = (each.predictions.get(source, {}) for each in (run, other))
  same = lambda key: key in one and key in two and np.array_equal(one[key], two[key])
  if columns is None or not (same('index') and same('label')):
    return ''
  one, two = (x['right'][:, :columns].any(1) for x in (one, two))
  gain, loss, n = (one & ~two).sum(), (two & ~one).sum(), len(one)
  error = math.sqrt(((gain + loss + 1) / n - ((gain - loss) / n) ** 2) / n)
  return f', {100 * (gain - loss) / n:+.2f} ± {196 * error:.2f}'
