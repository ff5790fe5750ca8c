"""A figure before it is written: the drawing, the numbers in it, remarks."""

from typing import Any, NamedTuple


class Drawn(NamedTuple):
  """The result of a figure's function.

  Attributes:
    figure: of matplotlib.
    rows: of the table, the header first.
    notes: lines to print.
  """

  figure: Any
  rows: list[tuple]
  notes: tuple[str, ...] = ()


def grids(key: tuple[str, ...], named: list[tuple[tuple, Any]]) -> list[tuple]:
  """Returns a table of arrays [h, w]: a header, then one row for each row of each array.

  Args:
    key: titles of the columns in front.
    named: (cells of these columns, array [h, w]); arrays may differ in size.
  """
  width = max(array.shape[1] for _, array in named)
  rows = [(*key, 'row', *range(width))]
  for cells, array in named:
    for i, values in enumerate(array):
      rows.append((*cells, i, *(f'{v:.7g}' for v in values)))
  return rows
