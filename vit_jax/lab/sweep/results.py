"""The results of a sweep, written to its folder and printed."""

from collections.abc import Sequence
from pathlib import Path

from vit_jax.lab.grid import results, rows, table
from vit_jax.lab.grid.cells import Cell
from vit_jax.lab.grid.search import Found, best
from vit_jax.lab.sweep.asked import Asked


class Results(results.Results):
  """The outcomes of a sweep's runs, and of those of its best cell."""

  def __init__(self, title: str, spec: str, asked: Asked, out: Path):
    """Takes what was planned.

    Args:
      title: of the table.
      spec: what every cell is: 'NAME:ARGS' of the config.
    """
    search = asked.search
    super().__init__(search.planned, search.pick and search.pick.metric, out)
    self._title, self._spec, self._asked, self._search = title, spec, asked, search
    self._evals = asked.evals
    self._cells = {run.cell.name: run.cell for run in search.planned}

  def _metrics(self, found: Sequence[dict]) -> list[str]:
    if any(row['cell'] in self._cells for row in found):
      return super()._metrics(found)
    metric = self._metric if any(self._metric in row for row in found) else None
    return table.metrics(found, self._evals, metric)

  def _parts(self) -> tuple[list[dict], list[dict]]:
    """Returns the rows of the grid, and those of its best cell run again."""
    found = self._rows()
    return (
      [row for row in found if row['cell'] in self._cells],
      [row for row in found if row['cell'] not in self._cells],
    )

  @property
  def _missing(self) -> int:
    ended = {x.run.folder for x in self._done if not x.held}
    return sum(run.folder not in ended for run in self._search.planned)

  @property
  def _best(self) -> Cell | None:
    pick = self._search.pick
    return pick and best(self._search.planned, self._done, pick)

  def text(self) -> str:
    """Returns the tables as Markdown."""
    grid, again = self._parts()
    common = f', with {", ".join(self._asked.common)}' if self._asked.common else ''
    notes = [
      f'Each cell is {self._spec}{common}. ± is the standard deviation over seeds.'
    ]
    chosen = self._best
    if self._search.pick:
      kind = 'largest' if self._search.pick.larger_is_better else 'smallest'
      so_far = ' so far' if self._missing else ''
      notes.append(
        f'Best{so_far} is the {kind} mean of {self._metric}; ties go to the first, and a '
        'cell of which a run has no result is not chosen.'
      )
    if self._missing:
      notes.append(f'Missing: {self._missing} of {len(self._search.planned)} runs.')
    marks = {chosen.name: 'best'} if chosen else {}
    columns = {'cell': lambda x: x['cell']}
    if keys := self._asked.keys:
      columns = {key: lambda x, key=key: self._value(x['cell'], key) for key in keys}
    text = self._table(self._title, grid, columns, [*notes, *self._left_out()], marks)
    if not again:
      return text
    what = f'The best cell again, with {", ".join(self._asked.final)}'
    columns = {'cell': lambda x: x['cell'].removeprefix('final-')}
    return f'{text}\n## {what}\n\n{self._table("", again, columns, [], {})}'

  def _value(self, cell: str, key: str) -> str:
    return str(self._cells[cell].changes[key])

  def _table(self, title, found, columns, notes, marks) -> str:
    metrics = self._metrics(found) if found else []
    records = table.summary(found, metrics) if found else []
    if len({record['parameters'] for record in records}) > 1:
      columns['parameters'] = lambda x: f'{x["parameters"]:,}'
      columns['GFLOPs'] = lambda x: f'{x["gflops"]:.4g}'
    trained = {record['trained_parameters'] for record in records}
    if len(trained) > 1 and None not in trained:
      columns['trained'] = lambda x: f'{x["trained_parameters"]:,}'
    columns |= table.of_metrics(metrics, self._evals)
    columns['seeds'] = lambda x: str(x['seeds'])
    if marks:
      columns[''] = lambda x: marks.get(x['cell'], '')
    return table.markdown(title, records, columns, notes)

  def record(self, found: Found) -> dict:
    """Returns what --json prints."""
    grid, again = self._parts()
    held = [x.run.name for x in self._done if x.held]
    return {
      'config': self._spec,
      'runs': self._rows(),
      'cells': self._records(grid),
      'best': self._best_record(found.best, grid),
      'final': next(iter(self._records(again)), None),
      'failed': {x.run.name: str(x.error) for x in self.failed if not x.held},
      'held': held,
      'missing': found.missing,
      'files': [str(path) for path in self.files.values()],
    }

  def _records(self, found: list[dict]) -> list[dict]:
    if not found:
      return []
    records = table.summary(found, self._metrics(found))
    return [table.plain(record) for record in records]

  def _best_record(self, cell: Cell | None, grid: list[dict]) -> dict | None:
    if cell is None:
      return None
    mean = rows.mean([row for row in grid if row['cell'] == cell.name], self._metric)
    return {
      'cell': cell.name,
      'changes': dict(cell.changes),
      self._metric: mean.mean,
    }
