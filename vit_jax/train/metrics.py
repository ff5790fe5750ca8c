"""metrics.jsonl: the record of a run, with one row `{"step": n, name: number}` per line.

Rows depend on the run's state alone, so that a resumed run writes the same rows as an
uninterrupted one. Only the keys under `time/` are measurements.
"""

import json
import math
from pathlib import Path

from vit_jax import distributed, evaluators, files
from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.evaluators.base import match_metric

TIME = 'time/'


def write_json(path: Path, value) -> None:
  """Replaces a JSON file, in the first process only; may raise OSError."""
  if distributed.is_first():
    files.replace(path, json.dumps(value, indent=1) + '\n')


def larger_is_better(
  key: str, evals: dict, asked_by: str = 'config.checkpoint.best'
) -> bool:
  """Returns whether larger values of a metric such as 'test/top1' are better.

  Args:
    asked_by: the option that names the metric, for error messages.

  Raises:
    UserError: for an unknown source, or for a metric of which neither larger nor smaller
      values are better.
  """
  source, _, name = key.partition('/')
  where = f'source of the metric {asked_by}'
  metrics = evaluators.declarations(choose(where, source, [*evals, 'train']), evals)
  larger = match_metric(metrics, name).larger_is_better
  if larger is None:
    directed = [k for k, m in metrics.items() if m.larger_is_better is not None]
    raise UserError(
      f'{asked_by}={key!r}: a larger {name!r} is neither better nor worse. Use one of '
      f'{directed}.'
      f'{did_you_mean(name, directed)}'
    )
  return larger


def read_rows(path: Path) -> tuple[list[dict], int]:
  """Returns (rows, number of damaged lines); ([], 0) if there is no file.

  Damaged lines are left out. So is an unfinished last line, which a kill leaves behind, and
  it is not counted.
  """
  try:
    *lines, torn = path.read_bytes().split(b'\n')
  except FileNotFoundError:
    return [], 0
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}. Move it away.') from error
  rows, damaged = [], 0
  for number, text in enumerate([*lines, torn]):
    row = _parse(text)
    # A run writes steps in order and no row twice. Anything else is damage.
    last = rows[-1] if rows else None
    if row is None or (last and (row['step'] < last['step'] or row == last)):
      damaged += number < len(lines)
    else:
      rows.append(row)
  return rows, damaged


def _parse(line: bytes) -> dict | None:
  try:
    row = json.loads(line)
    step = row.pop('step')
    values = {k: math.nan if v is None else v for k, v in row.items()}
    whole = all(type(v) in (int, float) and not abs(v) > 1e308 for v in values.values())
    return {'step': step, **values} if whole and type(step) is int else None
  except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
    return None


def line(row: dict) -> bytes:
  """Encodes a row as a line of JSON, with null for NaN and infinities."""
  finite = {k: v if math.isfinite(v) else None for k, v in row.items()}
  return json.dumps(finite, allow_nan=False).encode() + b'\n'


def last_values(rows: list[dict]) -> dict[str, float]:
  """Returns the last value of every name in some rows."""
  values: dict[str, float] = {}
  for row in rows:
    values |= {k: v for k, v in row.items() if k != 'step'}
  return values
