"""The table of a grid: a row for each cell, means over seeds."""

import dataclasses
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vit_jax.errors import UserError, choose
from vit_jax.evaluators import declared
from vit_jax.lab.grid import rows as grid_rows

_MAIN = (r'.+/top1', r'.+/.+_(5|10)shot(_sweep)?')


def metrics(rows: Sequence[dict], evals: dict, wanted: str | None) -> list[str]:
  """Returns the metrics of the table, the one that is drawn first.

  Those are top-1 and few-shot accuracies, or whatever shares there are.

  Args:
    evals: the config's section.
    wanted: the first; None: the first top-1.

  Raises:
    UserError: where no run has `wanted`.
  """
  known = dict.fromkeys(key for row in rows for key in row if '/' in key)
  shares = [
    key
    for key in known
    if (kind := declared(key, evals)).percent and kind.larger_is_better
  ]
  main = [k for pattern in _MAIN for k in shares if re.fullmatch(pattern, k)]
  main = main or shares or [key for key in known if not key.startswith('train/')]
  if wanted is not None:
    choose('metric', wanted, list(known))
    main = [wanted, *(key for key in main if key != wanted)]
  if not main:
    raise UserError(f'The runs measure nothing but {list(known)}: --metric NAME.')
  return main


def summary(rows: Sequence[dict], metrics: Sequence[str]) -> list[dict]:
  """Returns a record for each cell.

  Returns:
    cell, parameters, more_parameters than the first cell has, trained_parameters,
    step_temp_bytes, step_ms (of a training step, the median of the runs), gflops, seeds
    (their number), and {metric: `rows.Mean`} of those that are there.
  """
  found: dict[str, list[dict]] = {}
  for row in rows:
    found.setdefault(row['cell'], []).append(row)
  first = rows[0]['parameters']
  return [
    {
      'cell': cell,
      'parameters': each[0]['parameters'],
      'more_parameters': each[0]['parameters'] - first,
      'trained_parameters': each[0].get('trained_parameters'),
      'step_temp_bytes': each[0].get('step_temp_bytes'),
      'step_ms': statistics.median(1000 * x['seconds'] / x['steps'] for x in each),
      'gflops': each[0]['gflops'],
      'seeds': len(each),
      'metrics': {
        key: mean for key in metrics if (mean := grid_rows.mean(each, key)) is not None
      },
    }
    for cell, each in found.items()
  ]


def markdown(
  title: str, records: Sequence, columns: Mapping[str, Callable[[Any], str]], notes
) -> str:
  """Returns a table as Markdown, with a title above and lines of notes below.

  Args:
    columns: their titles -> what they say of a record; all but the first are aligned to
      the right.
  """
  lines = [f'# {title}', ''] if title else []
  lines += [_line(list(columns)), _line(['---', *['--:'] * (len(columns) - 1)])]
  lines += [_line([of(record) for of in columns.values()]) for record in records]
  return '\n'.join([*lines, '', *(f'{note}\n' for note in notes)])


def of_metrics(metrics: Sequence[str], evals: dict) -> dict[str, Callable[[dict], str]]:
  """Returns the columns of metrics, for `markdown`, of the records of `summary`."""

  def column(key: str, percent: bool):
    return lambda record: (
      record['metrics'][key].text(percent) if key in record['metrics'] else ''
    )

  kinds = {key: declared(key, evals).percent for key in metrics}
  return {
    f'{key}{" (%)" if percent else ""}': column(key, percent)
    for key, percent in kinds.items()
  }


def plain(record: dict) -> dict:
  """Returns a record of `summary` as JSON has it."""
  means = {key: dataclasses.asdict(mean) for key, mean in record['metrics'].items()}
  return {**record, 'metrics': means}


def _line(cells: Sequence[str]) -> str:
  return f'| {" | ".join(cells)} |'
