"""How reliable results are: confidence intervals, and runs that differ by the seed."""

import json
import math
import statistics

from vit_jax import evaluators
from vit_jax.tools.report.folder import Run
from vit_jax.train.metrics import TIME, last_values

# Sections in which runs of the same experiment may differ.
_NEUTRAL = ('seed', 'log', 'resume_allow', 'resolved', 'checkpoint')


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
  """Returns the confidence interval of a share of n examples, 95 % by default.

  The score interval of Wilson 1927 (doi 10.1080/01621459.1927.10502953).
  """
  if n < 1 or not math.isfinite(share):
    return 0.0, 1.0
  middle = (share + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / n / 2) ** 2)
  return max(0.0, middle - half), min(1.0, middle + half)


def results(run: Run) -> dict[str, tuple[str, str]]:
  """Returns {name: (value, spread)} of what a run measured last, as texts.

  The spread is the standard deviation over the seeds of a few-shot evaluation, or the
  `wilson` interval of an accuracy whose number of examples is known; otherwise ''.
  """
  values = last_values(run.rows)
  found = {}
  for name, value in values.items():
    metric = evaluators.declared(name, run.evals)
    if name.startswith((TIME, 'train/')) or metric.detail:
      continue
    spread, n = '', values.get(f'{name.rpartition("/")[0]}/examples')
    if metric.std and name + metric.std in values:
      spread = f'± {metric.text(values[name + metric.std])} over seeds'
    elif metric.percent and n:
      low, high = wilson(value, int(n))
      spread = f'{low:.1%} to {high:.1%}'
    found[name] = metric.text(value), spread
  if 'train/loss' in values:
    found['train/loss'] = f'{values["train/loss"]:.4g}', ''
  return found


def repeats(runs: list[Run]) -> list[list[Run]]:
  """Returns the groups of two or more runs whose configs differ by the seed alone."""
  groups: dict[str, list[Run]] = {}
  for run in runs:
    config = {k: v for k, v in run.config.items() if k not in _NEUTRAL}
    groups.setdefault(json.dumps(config, sort_keys=True), []).append(run)
  return [group for group in groups.values() if len(group) > 1]


def over_seeds(group: list[Run]) -> dict[str, str]:
  """Returns {name: 'mean ± sample standard deviation'} of what every run measured."""
  values = [last_values(run.rows) for run in group]
  found = {}
  for name in results(group[0]):
    if all(name in v for v in values):
      metric = evaluators.declared(name, group[0].evals)
      numbers = [v[name] for v in values]
      mean, std = statistics.fmean(numbers), _std(numbers)
      found[name] = f'{metric.text(mean)} ± {metric.text(std)}'
  return found


def _std(numbers: list[float]) -> float:
  if not all(map(math.isfinite, numbers)):
    return math.nan
  return statistics.stdev(numbers)


def differences(runs: list[Run]) -> dict[str, list[str]]:
  """Returns {key of the config: its value in each run, as text} of keys that differ."""
  flats = [_flat(run.config) for run in runs]
  keys = dict.fromkeys(key for flat in flats for key in flat)
  absent = '—'
  rows = {key: [flat.get(key, absent) for flat in flats] for key in keys}
  return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _flat(value, prefix: str = '') -> dict[str, str]:
  found = {}
  for key, item in value.items():
    if prefix == '' and key in ('resolved', 'resume_allow'):
      continue
    if isinstance(item, dict):
      found |= _flat(item, f'{prefix}{key}.')
    else:
      found[prefix + key] = item if isinstance(item, str) else json.dumps(item)
  return found
