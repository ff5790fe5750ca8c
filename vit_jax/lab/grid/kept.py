"""The result of a grid's run, kept in its folder so that the run need not be opened again."""

import contextlib
import hashlib
import json
import shutil
from typing import NamedTuple

from vit_jax import files
from vit_jax.errors import Diverged, InUse, UserError
from vit_jax.lab.grid.cells import Run
from vit_jax.train.workdir import lock

FILE = 'result.json'


class Kept(NamedTuple):
  """The end of a run: its row, see `rows.of_run`, or else why it diverged."""

  row: dict | None
  error: Diverged | None


def write(run: Run, row: dict | None = None, error: Diverged | None = None) -> None:
  """Keeps the row of a finished run, or the error of one that diverged."""
  values = {'asked': _asked(run), 'metrics': _metrics(run), 'row': row}
  values['diverged'] = None if error is None else str(error)
  files.replace(run.folder / FILE, (json.dumps(values, indent=1) + '\n').encode())


def read(run: Run) -> Kept | None:
  """Returns how a run ended; None if it is not known to have ended.

  That is also so where the folder has been trained in since, or with another config: then
  the run itself says what is left to do, or what is wrong.

  Raises:
    UserError: for a run of another config, whose checkpoints `discard` removed.
  """
  found = _read(run)
  if found is None or found['metrics'] != _metrics(run):
    return None
  if found['asked'] != _asked(run):
    if not (run.folder / 'checkpoints').exists():  # it would be overwritten
      raise UserError(
        f'{run.folder} holds a run of another config, without its checkpoints. Use '
        'another --out, or remove that folder.'
      )
    return None
  error = found['diverged']
  return Kept(found['row'], None if error is None else Diverged(error))


def discard(run: Run) -> None:
  """Removes the checkpoints of a run that has ended; its numbers stay.

  Not while another process holds the run and may be reading them: that one removes them.
  """
  checkpoints = run.folder / 'checkpoints'
  if checkpoints.exists():
    with contextlib.suppress(InUse), lock(run.folder):
      shutil.rmtree(checkpoints, ignore_errors=True)


def _read(run: Run) -> dict | None:
  try:
    found = json.loads((run.folder / FILE).read_bytes())
    known = {'asked', 'metrics', 'row', 'diverged'}.issubset(found)
  except (OSError, ValueError, RecursionError, TypeError):
    return None
  return found if known else None


def _asked(run: Run) -> str:
  return _digest(json.dumps(run.config, sort_keys=True).encode())


def _metrics(run: Run) -> str | None:
  try:
    return _digest((run.folder / 'metrics.jsonl').read_bytes())
  except OSError:
    return None


def _digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()
