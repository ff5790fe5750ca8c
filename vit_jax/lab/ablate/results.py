"""The results of an ablation, written to its folder and printed."""

from collections.abc import Sequence
from pathlib import Path

from vit_jax.lab.ablate import draw
from vit_jax.lab.ablate.ablation import Ablation
from vit_jax.lab.grid import results, table
from vit_jax.lab.grid.cells import Run
from vit_jax.tools import out_folder
from vit_jax.tools.figures.drawn import load_plots


class Results(results.Results):
  """The outcomes of an ablation's runs."""

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
    super().__init__(planned, metric, out)
    self._name, self._title, self._ablation, self._spec = name, title, ablation, spec
    self._common = common

  def text(self) -> str:
    """Returns the table as Markdown."""
    metrics = self._metrics(self._rows())
    common = f', with {", ".join(self._common)}' if self._common else ''
    notes = [
      f'Each cell is {self._spec}{common}, and with changes of its own. ± is the standard '
      'deviation over seeds.'
    ]
    records = table.summary(self._rows(), metrics)
    more = lambda x: f'{x["more_parameters"]:+,}' if x['more_parameters'] else '0'
    columns = {
      'cell': lambda x: x['cell'],
      'parameters': lambda x: f'{x["parameters"]:,}',
    }
    if any(_trains_a_part(x) for x in records):
      columns |= {
        'trained': lambda x: f'{x["trained_parameters"]:,}',
        'ms a step': lambda x: f'{x["step_ms"]:.1f}',
        'temporaries, MiB': lambda x: f'{x["step_temp_bytes"] / 2**20:.2f}',
      }
    else:
      columns[f'more than {records[0]["cell"]}'] = more
    columns |= {
      'GFLOPs': lambda x: f'{x["gflops"]:.4g}',
      **table.of_metrics(metrics, self._evals),
      'seeds': lambda x: str(x['seeds']),
    }
    if published := self._ablation.published:
      columns[self._ablation.published_as] = lambda x: published.get(x['cell'], '')
    title = f'{self._name}: {self._title}'
    return table.markdown(title, records, columns, [*notes, *self._left_out()])

  def draw(self) -> None:
    """Writes the figure; UserError without matplotlib."""
    plots = load_plots()
    function = getattr(draw, self._ablation.draw)
    drawn = function(self._finished, self._metrics(self._rows()), self._evals)
    out_folder.write_csv(self._path(f'{self._name}.csv'), drawn.rows)
    plots.save(drawn.figure, self._path(f'{self._name}.png'))

  def record(self) -> dict:
    """Returns what --json prints."""
    records = table.summary(self._rows(), self._metrics(self._rows()))
    return {
      'ablation': self._name,
      'config': self._spec,
      'runs': self._rows(),
      'cells': [table.plain(record) for record in records],
      'failed': {x.run.name: str(x.error) for x in self.failed},
      'files': [str(path) for path in self.files.values()],
    }


def _trains_a_part(record: dict) -> bool:
  known = record['trained_parameters'], record['step_temp_bytes']
  return None not in known and known[0] < record['parameters']
