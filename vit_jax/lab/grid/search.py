"""A grid of runs, the choice of its best cell, and that cell once more for the result."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_jax.lab.grid import cells, kept, rows, runs
from vit_jax.lab.grid.cells import Cell, Run
from vit_jax.lab.grid.runs import Outcome


class Pick(NamedTuple):
  """By which metric, its mean over seeds, the best cell is chosen."""

  metric: str
  larger_is_better: bool


class Search(NamedTuple):
  """What is to be done.

  Attributes:
    planned: the runs of the grid, see `cells.plan`.
    pick: None: no cell is chosen.
    again: the runs of a chosen cell, see `again`; None: there are none.
  """

  planned: list[Run]
  pick: Pick | None = None
  again: Callable[[Cell], list[Run]] | None = None


class Found(NamedTuple):
  """What came of it.

  Attributes:
    outcomes: of the grid's runs, and of those of the best cell.
    best: None: nothing was to be chosen, or runs are missing, or no cell has a result.
    missing: the number of the grid's runs that have not ended.
  """

  outcomes: list[Outcome]
  best: Cell | None
  missing: int


def again(
  config: dict, changes: Callable[[Cell], Mapping], seeds: Sequence[int], out: Path
) -> Callable[[Cell], list[Run]]:
  """Returns cell -> the runs `final-CELL-seedN` of it.

  Args:
    config, seeds, out: as of `cells.plan`.
    changes: cell -> what it changes in the config besides its own changes.

  Raises: as `cells.plan`, when it is called.
  """

  def planned(cell: Cell) -> list[Run]:
    all_changes = {**cell.changes, **changes(cell)}
    renamed = cell._replace(name=f'final-{cell.name}', changes=all_changes)
    return cells.plan(config, [renamed], seeds, out)

  return planned


def share(planned: Sequence[Run], number: int, of: int) -> list[Run]:
  """Returns the runs of one of several tasks, `number` from 0: every `of`-th."""
  return list(planned[number::of])


def run(
  search: Search,
  mine: Sequence[Run],
  command: str,
  spec: str,
  done: Callable[[Outcome], None],
  discard: bool = False,
  discard_again: bool = False,
) -> Found:
  """Trains the runs of a grid, and those of its best cell; what is finished is only read.

  Args:
    mine: those of the grid that this process trains; what others finished is read.
    command, spec, done: as of `runs.train`.
    discard: remove the checkpoints of the grid's runs that are finished.
    discard_again: likewise those of the best cell's runs.

  Raises: as `runs.train`.
  """
  ours = {run.folder for run in mine}
  theirs = [run for run in search.planned if run.folder not in ours]
  outcomes = _read(theirs, done)
  outcomes += runs.train(mine, command, spec, done, discard)
  known = {outcome.run.folder for outcome in outcomes}
  outcomes += _read([run for run in theirs if run.folder not in known], done)
  ended = [outcome for outcome in outcomes if not outcome.held]
  missing = len(search.planned) - len(ended)
  chosen = None
  if search.pick and not missing:
    chosen = best(search.planned, ended, search.pick)
  if chosen and search.again:
    outcomes += runs.train(search.again(chosen), command, spec, done, discard_again)
  return Found(outcomes, chosen, missing)


def _read(those: Sequence[Run], done) -> list[Outcome]:
  outcomes = []
  for one in those:
    if (found := kept.read(one)) is not None:
      outcomes.append(Outcome(one, found.row, found.error, 0.0))
      done(outcomes[-1])
  return outcomes


def best(
  planned: Sequence[Run], outcomes: Sequence[Outcome], pick: Pick
) -> Cell | None:
  """Returns the cell with the best mean of a metric; ties go to the first.

  A cell with a seed that has no such number, because it diverged for instance, is never
  the best. None: there is no other.
  """
  found = {outcome.run.folder: outcome.row or {} for outcome in outcomes}
  of_cell: dict[str, list[Run]] = {}
  for one in planned:
    of_cell.setdefault(one.cell.name, []).append(one)
  chosen, highest = None, None
  for each in of_cell.values():
    mean = rows.mean([found.get(one.folder, {}) for one in each], pick.metric)
    if mean is None or mean.number < len(each):
      continue
    value = mean.mean if pick.larger_is_better else -mean.mean
    if highest is None or value > highest:
      chosen, highest = each[0].cell, value
  return chosen
