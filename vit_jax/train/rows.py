"""The rows of metrics.jsonl, read: `{"step": n, name: number}`, one to a line."""

import json
import math
from pathlib import Path

from vit_jax.errors import UserError


def read_checked(path: Path) -> tuple[list[dict], int]:
  """Returns (rows, number of damaged lines, which are left out); ([], 0) without a file.

  A torn last line, which a kill leaves behind, is left out and not counted.

  Raises:
    UserError: if the file cannot be read.
  """
  try:
    *lines, torn = path.read_bytes().split(b'\n')
  except FileNotFoundError:
    return [], 0
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}. Move it away.') from error
  rows = [_row(line) for line in lines]
  if (last := _row(torn)) is not None:
    rows.append(last)
  known: list[dict] = []
  for row in rows:
    # A run writes steps in order and no row twice: anything else is damage.
    if row is not None and not _follows(row, known):
      row = None
    if row is not None:
      known.append(row)
  return known, len(rows) - len(known)


def _follows(row: dict, known: list[dict]) -> bool:
  for before in reversed(known):
    if before['step'] != row['step']:
      return before['step'] < row['step']
    if before == row:
      return False
  return True


def last_values(rows: list[dict]) -> dict[str, float]:
  """Returns the last value of every name in rows."""
  values: dict[str, float] = {}
  for row in rows:
    values |= {k: v for k, v in row.items() if k != 'step'}
  return values


def line(row: dict) -> str:
  """Returns a row as it is written."""
  # JSON knows no NaN: it is written as null, and so are infinities.
  finite = {k: v if math.isfinite(v) else None for k, v in row.items()}
  return json.dumps(finite, allow_nan=False) + '\n'


def _row(text: bytes) -> dict | None:
  try:
    row = json.loads(text)
    if type(row['step']) is not int:
      return None
    step = {'step': row.pop('step')}
    return step | {k: math.nan if v is None else _number(v) for k, v in row.items()}
  except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
    return None


def _number(value) -> int | float:
  if type(value) not in (int, float) or abs(value) > 1e308:
    raise TypeError(value)
  return value
