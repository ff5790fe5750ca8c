"""The runs of a grid, one after another in this process."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from vit_jax.errors import (
  DiskFull,
  Diverged,
  InUse,
  Preempted,
  RunError,
  Stopped,
  UserError,
)
from vit_jax.lab.grid import cells, kept, rows
from vit_jax.lab.grid.cells import Run
from vit_jax.train import program
from vit_jax.train.process import StopSignal

LOGS = 'logs'  # a folder beside 'runs': what each run would have printed


class Outcome(NamedTuple):
  """What became of a run.

  Attributes:
    row: its numbers, see `rows.of_run`; None where it has none.
    error: why it has none, or None.
    seconds: that it took now; next to none where it had been finished before.
  """

  run: Run
  row: dict | None
  error: RunError | None
  seconds: float

  @property
  def held(self) -> bool:
    """Whether another process is running it."""
    return isinstance(self.error, InUse)


def train(
  runs: Sequence[Run],
  command: str,
  spec: str,
  done: Callable[[Outcome], None],
  discard: bool = False,
) -> list[Outcome]:
  """Trains the runs of a grid as `vit_jax train` would; those finished are only read.

  A run that diverges, or that the device has no memory for, is left out, and so are
  those that start from it; the others go on. A run that another process holds is put
  off, and left out if it is still held when nothing else is to do: several processes can
  share a grid.

  Args:
    runs: see `cells.plan`.
    command: the command line, recorded in every run.
    spec: 'NAME:ARGS' of the config, for what to try without its data.
    done: called once for each run.
    discard: remove the checkpoints of runs that are finished.

  Returns: an outcome for each run, in the order in which they ended.

  Raises:
    UserError: where a folder holds a run of another config, or the data is wrong.
    DataError: the data is not there.
    Stopped: on SIGTERM or Ctrl-C, when the run is saved; the same call goes on.
    DiskFull: likewise.
  """
  outcomes: list[Outcome] = []
  waiting = list(runs)
  with StopSignal() as stop:
    while waiting:
      held = []
      for run in waiting:
        if stop.should_stop():
          raise Preempted(
            f'Stopped after {len(outcomes)} of {len(runs)} runs. Rerun the same command '
            'to resume.'
          )
        outcome = _outcome(run, [*outcomes, *held], command, spec, discard)
        if outcome.held:
          held.append(outcome)
          continue
        outcomes.append(outcome)
        done(outcome)
      if len(held) == len(waiting):
        outcomes += held
        for outcome in held:
          done(outcome)
        break
      waiting = [outcome.run for outcome in held]
  return outcomes


def _outcome(
  run: Run, before: Sequence[Outcome], command: str, spec: str, discard: bool
) -> Outcome:
  start = time.perf_counter()
  row, error = None, None
  try:
    needed = [(name, run.seed) for name in cells.needs(run.cell)]
    for other in before:
      if other.error and (other.run.cell.name, other.run.seed) in needed:
        kind = InUse if other.held else RunError
        raise kind(
          f'{other.run.cell.name}, from which it starts, failed: {other.error}'
        )
    row, error = kept.read(run) or (_train(run, command, spec), None)
    if discard:
      kept.discard(run)
  except InUse as holder:
    error = holder
  except UserError:
    raise
  except (Stopped, DiskFull) as end:
    raise type(end)(f'{run.name}: {end}') from end
  except RunError as failure:
    error = failure
    if isinstance(failure, Diverged) and run.folder.exists():  # it would do so again
      kept.write(run, error=failure)
  return Outcome(run, row, error, time.perf_counter() - start)


def _train(run: Run, command: str, spec: str) -> dict:
  log = run.folder.parents[1] / LOGS / f'{run.name}.txt'
  log.parent.mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as stack:
    stack.enter_context(cells.named(run.name))
    file = stack.enter_context(open(log, 'a', encoding='utf-8'))
    stack.enter_context(contextlib.redirect_stdout(file))
    program.train(run.config, run.folder, command, spec)
  jax.clear_caches()  # else the traces of hundreds of runs would stay in memory
  row = rows.of_run(run)
  kept.write(run, row=row)
  return row


def exit_code(outcomes: Sequence[Outcome]) -> int:
  """Returns the exit code of a grid: of its first failure, or that of `errors.Stopped`.

  The latter where other processes hold runs: the same command, later, reads them.
  """
  for outcome in outcomes:
    if outcome.error and not outcome.held:
      return outcome.error.exit_code
  return Stopped.exit_code if any(outcome.held for outcome in outcomes) else 0
