"""What an ablation came to, written to its folder and told."""

from collections.abc import Sequence
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.tools import out_folder
from vit_jax.tools.ablate import draw, table
from vit_jax.tools.ablate.ablation import Ablation
from vit_jax.tools.grid import rows
from vit_jax.tools.grid.cells import Run
from vit_jax.tools.grid.runs import Outcome
from vit_jax.train import progress


class Results:
  """Collects the outcomes of an ablation's runs.

  Attributes:
    files: that were written, by their names.
  """

  def __init__(
    self,
    name: str,
    title: str,
    ablation: Ablation,
    spec: str,
    common: list[str],
    planned: Sequence[Run],
    metric: str | None,
    out: Path,
  ):
    """Takes what was planned.

    Args:
      spec: 'NAME:ARGS' of a config.
      common: what every cell changes in it, see `asked.common`.
      metric: which is drawn; None: see `table.metrics`.
    """
    self._name, self._title, self._ablation, self._spec = name, title, ablation, spec
    self._metric, self._out, self._common = metric, out, common
    self._order = list(dict.fromkeys(run.cell.name for run in planned))
    self._width = max(len(run.name) for run in planned)
    self._evals = {
      k: v for run in planned for k, v in run.config.get('evals', {}).items()
    }
    self._done: list[Outcome] = []
    self.files: dict[str, Path] = {}

  @property
  def failed(self) -> list[Outcome]:
    """The runs that failed."""
    return [x for x in self._done if x.error]

  @property
  def _finished(self) -> list[Outcome]:
    found = [x for x in self._done if x.row is not None]
    return sorted(found, key=lambda x: self._order.index(x.run.cell.name))

  def add(self, outcome: Outcome) -> str:
    """Takes a run, writes the tables with it, and returns its line."""
    self._done.append(outcome)
    if outcome.error:
      shown = f'failed: {outcome.error}'
    else:
      keys = table.metrics([outcome.row], self._evals, self._metric)[:2]
      shown = progress.shown({key: outcome.row[key] for key in keys}, self._evals)
    if self._finished:  # whatever comes next, these are there
      self._write_tables()
    return f'{outcome.run.name:<{self._width}}  {shown}  {outcome.seconds:.0f} s'

  def _write_tables(self) -> None:
    found = self._rows()
    path = self._path('results.csv')
    out_folder.write_csv(path, rows.table(found))
    self._path('table.md').write_text(self.text(), encoding='utf-8')

  def _rows(self) -> list[dict]:
    return [outcome.row for outcome in self._finished]

  def _metrics(self) -> list[str]:
    return table.metrics(self._rows(), self._evals, self._metric)

  def _path(self, name: str) -> Path:
    return self.files.setdefault(name, self._out / name)

  def text(self) -> str:
    """Returns the table as Markdown."""
    metrics = self._metrics()
    common = f', with {", ".join(self._common)}' if self._common else ''
    notes = [
      f'Each cell is {self._spec}{common}, and with changes of its own. ± is the standard '
      'deviation over seeds.'
    ]
    notes += [f'{x.run.name} failed and is left out: {x.error}' for x in self.failed]
    return table.markdown(
      f'{self._name}: {self._title}',
      table.summary(self._rows(), metrics),
      metrics,
      self._evals,
      (self._ablation.published_as, self._ablation.published),
      notes,
    )

  def draw(self) -> None:
    """Writes the figure; UserError without matplotlib."""
    try:
      from vit_jax.viz import plots
    except ImportError as error:
      raise UserError(
        f'no figure, without the package matplotlib ({error}): pip install '
        "'vit_jax[plots]'."
      ) from None
    function = getattr(draw, self._ablation.draw)
    drawn = function(self._finished, self._metrics(), self._evals)
    out_folder.write_csv(self._path(f'{self._name}.csv'), drawn.rows)
    plots.save(drawn.figure, self._path(f'{self._name}.png'))

  def record(self) -> dict:
    """Returns what --json prints."""
    records = table.summary(self._rows(), self._metrics())
    return {
      'ablation': self._name,
      'config': self._spec,
      'runs': self._rows(),
      'cells': [table.plain(record) for record in records],
      'failed': {x.run.name: str(x.error) for x in self.failed},
      'files': [str(path) for path in self.files.values()],
    }
