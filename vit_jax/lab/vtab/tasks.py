"""The tasks, one after another; one whose data is missing does not keep the others."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from vit_jax.errors import DataError, DiskFull, RunError, Stopped
from vit_jax.lab.grid import search as searches
from vit_jax.lab.grid.search import Found
from vit_jax.lab.sweep.asked import Asked
from vit_jax.lab.sweep.results import Results as RunResults
from vit_jax.lab.vtab.asked import REPORTED
from vit_jax.lab.vtab.protocols import PROTOCOLS
from vit_jax.lab.vtab.results import Ended, Results


def runs_of(asked: Asked) -> int:
  """Returns the number of runs of a task, those of the cell that is chosen included."""
  return len(asked.search.planned) + _reported(asked)


def _reported(asked: Asked) -> int:
  search = asked.search
  return len(search.again(search.planned[0].cell)) if search.again else 0


def described(asked: Asked) -> str:
  """Returns the runs of a task, in words."""
  number = len(asked.search.planned)
  if not asked.search.again:
    return f'{number} run{"s" * (number > 1)}'
  return f'{number} runs to choose by, then {_reported(asked)}'


def run(
  args: argparse.Namespace,
  planned: Mapping[str, Asked],
  out: Path,
  command: str,
  say: Callable[[str], None],
) -> Results:
  """Trains on the tasks and writes their tables; what is finished is only read.

  A task whose data is missing is left out. One that other processes are at is looked at
  again in the end.

  Args:
    planned: {name: what is to be done}.
    out: the folder of all tasks.
    command: the command line, recorded in every run.
    say: prints a line.

  Raises: as `grid.runs.train`, but for DataError.
  """
  benchmark = args.benchmark
  notes = [f'Protocol {args.protocol}: {PROTOCOLS[args.protocol].title}.']
  if args.set:
    notes.append(f'With {", ".join(args.set)}.')
  if args.resolution:
    notes.append(f'At {args.resolution} x {args.resolution} pixels.')
  title = Path(args.source).name
  results = Results(benchmark, title, notes, planned, out)

  def do(name: str) -> None:
    task = benchmark.tasks[name]
    say(f'\n== {task.title}, {described(planned[name])}')
    spec = f'{args.source} on {task.source} by the protocol {args.protocol}'
    of_runs = RunResults(task.title, spec, planned[name], out / name)
    done = lambda outcome: say(of_runs.add(outcome))
    search = planned[name].search
    try:
      found = searches.run(
        search,
        search.planned,
        command,
        '',
        done,
        # What was run to choose is of no use afterwards.
        discard=bool(search.again) or args.discard,
        discard_again=args.discard,
      )
    except DataError as named:  # of the task, whichever run met it
      error = named.__cause__ or named
      say(f'left out: {error}')
      results.add(name, Ended(error=error))
      return
    except (Stopped, DiskFull) as end:
      raise type(end)(f'{name}, {end}') from end
    if of_runs.files:
      of_runs.write_tables()
    results.add(name, _ended(planned[name], found))

  for name in planned:
    do(name)
  for name in [name for name, ended in results.ended.items() if ended.waits]:
    do(name)
  return results


def _ended(asked: Asked, found: Found) -> Ended:
  rows = [outcome.row for outcome in found.outcomes if outcome.row]
  accuracies = [100 * row[REPORTED] for row in rows if REPORTED in row]
  best = found.best.name if found.best else ''
  if held := sum(outcome.held for outcome in found.outcomes):
    error = Stopped(
      f'Other processes are at {held} of its runs: rerun the same command.'
    )
    return Ended(accuracies, best, error, waits=True)
  reported = [x for x in found.outcomes if not asked.search.again or _is_final(x)]
  failed = [outcome for outcome in reported if outcome.error]
  if asked.search.again and found.best is None:
    first = next(outcome.error for outcome in found.outcomes if outcome.error)
    error = type(first)(f'No combination has a result: {first}')
  elif failed:
    first = failed[0]
    error = RunError(
      f'{len(failed)} of its runs failed: {first.run.name}: {first.error}'
    )
    error.exit_code = first.error.exit_code
  else:
    error = None
  return Ended(accuracies, best, error)


def _is_final(outcome) -> bool:
  return outcome.run.name.startswith('final-')
