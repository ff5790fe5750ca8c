"""The results of a grid's runs: collected, written and printed."""

import abc
from collections.abc import Sequence
from pathlib import Path

from vit_jax.lab.grid import rows, table
from vit_jax.lab.grid.cells import Run
from vit_jax.lab.grid.runs import Outcome
from vit_jax.tools import out_folder
from vit_jax.train import progress


class Results(abc.ABC):
  """Collects the outcomes of a grid's runs, and writes the tables after each.

  Subclasses define the table, see `text`.

  Attributes:
    files: that were written, by their names.
  """

  def __init__(self, planned: Sequence[Run], metric: str | None, out: Path):
    """Takes what was planned.

    Args:
      metric: which comes first; None: see `table.metrics`.
      out: the folder of the tables.
    """
    self._metric, self._out = metric, out
    names = dict.fromkeys(run.cell.name for run in planned)
    self._order = {name: number for number, name in enumerate(names)}
    self._width = max(len(run.name) for run in planned)
    self._evals = {
      k: v for run in planned for k, v in run.config.get('evals', {}).items()
    }
    self._done: list[Outcome] = []
    self.files: dict[str, Path] = {}

  @property
  def failed(self) -> list[Outcome]:
    """The runs that ended without a result, or that another process holds."""
    return [x for x in self._done if x.error]

  @property
  def _finished(self) -> list[Outcome]:
    found = [x for x in self._done if x.row is not None]
    return sorted(
      found, key=lambda x: self._order.get(x.run.cell.name, len(self._order))
    )

  def add(self, outcome: Outcome) -> str:
    """Takes a run, writes the tables with it, and returns its line."""
    self._done.append(outcome)
    if outcome.held:
      shown = 'skipped: another process is running it'
    elif outcome.error:
      shown = f'failed: {outcome.error}'
    else:
      keys = self._metrics([outcome.row])[:2]
      shown = progress.shown({key: outcome.row[key] for key in keys}, self._evals)
    if self._finished:  # whatever comes next, these are there
      self.write_tables()
    return f'{outcome.run.name:<{self._width}}  {shown}  {outcome.seconds:.0f} s'

  def write_tables(self) -> None:
    """Writes results.csv, a row for each run, and table.md."""
    out_folder.write_csv(self._path('results.csv'), rows.table(self._rows()))
    out_folder.write_text(self._path('table.md'), self.text())

  @abc.abstractmethod
  def text(self) -> str:
    """Returns the table as Markdown."""

  def _left_out(self) -> list[str]:
    """Returns the notes about runs that ended without a result."""
    lost = [x for x in self.failed if not x.held]
    return [f'{x.run.name} failed and is left out: {x.error}' for x in lost]

  def _rows(self) -> list[dict]:
    return [outcome.row for outcome in self._finished]

  def _metrics(self, found: Sequence[dict]) -> list[str]:
    return table.metrics(found, self._evals, self._metric)

  def _path(self, name: str) -> Path:
    return self.files.setdefault(name, self._out / name)
