"""`vit_jax figures` draws a model's attention, filters and positions, and results of runs.

The modules of this folder draw the figures. This one holds the code that they share.
"""

from typing import Any, NamedTuple


class Drawing(NamedTuple):
  """A figure before it is written.

  Attributes:
    figure: a figure of matplotlib.
    rows: the rows of its table, the header first.
    notes: lines to print.
  """

  figure: Any
  rows: list[tuple]
  notes: tuple[str, ...] = ()


def grids(key: tuple[str, ...], named: list[tuple[tuple, Any]]) -> list[tuple]:
  """Returns a table of arrays [h, w]: a header, then one row for each row of each array.

  Args:
    key: titles of the first columns.
    named: (cells of the first columns, array [h, w]); arrays may differ in size.
  """
  width = max(array.shape[1] for _, array in named)
  rows = [(*key, 'row', *range(width))]
  for cells, array in named:
    for i, values in enumerate(array):
      rows.append((*cells, i, *(f'{v:.7g}' for v in values)))
  return rows
