"""The folder that `--out` or another flag of a tool names, and the tables in it."""

import csv
import io
import os
import re
from collections.abc import Iterable
from pathlib import Path

from vit_jax import files
from vit_jax.errors import UserError


def check_folder(name: str, flag: str = '--out') -> Path:
  """Returns the absolute path of a folder; raises UserError if it cannot be written to.

  Tools call it before they start to work. `flag` names the folder in the error.
  """
  path = files.local_path(name, flag).absolute()
  there = next(p for p in (path, *path.parents) if p.exists())
  if not there.is_dir():
    raise UserError(f'{flag} {name}: {there} is a file.')
  if not os.access(there, os.W_OK | os.X_OK):
    raise UserError(f'{flag} {name}: {there} cannot be written to.')
  return path


def make(path: Path, flag: str = '--out') -> None:
  """Makes the folder; raises UserError if that fails."""
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    # `os.access` in `check_folder` does not detect every cause, for example in /proc.
    raise UserError(f'{flag} {path}: {error.strerror}.') from None


def write_csv(path: Path, rows: Iterable) -> None:
  """Writes rows of cells as CSV, atomically.

  Text that a spreadsheet would take for a formula gets an apostrophe in front.
  """
  formula = lambda x: isinstance(x, str) and re.match(r'[=+@\t\r]|-(?![\d.])', x)
  text = io.StringIO()
  cells = ([f"'{x}" if formula(x) else x for x in row] for row in rows)
  csv.writer(text, lineterminator='\n').writerows(cells)
  files.replace(path, text.getvalue())
