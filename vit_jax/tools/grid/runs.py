"""The runs of a grid, one after another in this process."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vit_jax.errors import DiskFull, Preempted, RunError, Stopped, UserError
from vit_jax.tools.grid import cells, rows
from vit_jax.tools.grid.cells import Run
from vit_jax.train import program
from vit_jax.train.preemption import StopSignal

LOGS = 'logs'  # a folder beside 'runs': what each run would have printed


class Outcome(NamedTuple):
  """What became of a run.

  Attributes:
    row: its numbers, see `rows.of_run`; None where it failed.
    error: why it failed, or None.
    seconds: that it took now; next to none where it had been finished before.
  """

  run: Run
  row: dict | None
  error: RunError | None
  seconds: float


def train(
  runs: Sequence[Run], command: str, spec: str, done: Callable[[Outcome], None]
) -> list[Outcome]:
  """Trains the runs of a grid as `vit_jax train` would; those finished are only read.

  A run that diverges, or that the device has no memory for, is left out, and so are
  those that start from it; the others go on.

  Args:
    runs: see `cells.plan`.
    command: the command line, recorded in every run.
    spec: 'NAME:ARGS' of the config, for what to try without its data.
    done: called after each run.

  Raises:
    UserError: where a folder holds a run of another config, or the data is wrong.
    Stopped: on SIGTERM or Ctrl-C, when the run is saved; the same call goes on.
    DiskFull: likewise.
  """
  outcomes, failed = [], set()
  with StopSignal() as stop:
    for number, run in enumerate(runs):
      if stop.should_stop():
        raise Preempted(
          f'Stopped after {number} of {len(runs)} runs. Rerun the same command to resume.'
        )
      start = time.perf_counter()
      row, error = None, None
      try:
        if lost := [
          name for name in cells.needs(run.cell) if (name, run.seed) in failed
        ]:
          raise RunError(f'{lost[0]}, from which it starts, failed.')
        row = _train(run, command, spec)
      except UserError:
        raise
      except (Stopped, DiskFull) as end:
        raise type(end)(f'{run.name}: {end}') from end
      except RunError as failure:
        error = failure
        failed.add((run.cell.name, run.seed))
      outcomes.append(Outcome(run, row, error, time.perf_counter() - start))
      done(outcomes[-1])
  return outcomes


def _train(run: Run, command: str, spec: str) -> dict:
  log = run.folder.parents[1] / LOGS / f'{run.name}.txt'
  log.parent.mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as stack:
    stack.enter_context(cells.named(run.name))
    file = stack.enter_context(open(log, 'a', encoding='utf-8'))
    stack.enter_context(contextlib.redirect_stdout(file))
    program.train(run.config, run.folder, command, spec)
  return rows.of_run(run)
