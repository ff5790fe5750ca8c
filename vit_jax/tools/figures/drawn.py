"""What a figure is before it is written: the drawing, its numbers, a remark."""

from typing import Any, NamedTuple


class Drawn(NamedTuple):
  """What each figure's function returns.

  Attributes:
    figure: of matplotlib.
    rows: of the table, its header first.
    notes: lines for the person who asked.
  """

  figure: Any
  rows: list[tuple]
  notes: tuple[str, ...] = ()


def grids(key: tuple[str, ...], named: list[tuple[tuple, Any]]) -> list[tuple]:
  """Returns the rows of a table of arrays: one for each row of each [h, w].

  Args:
    key: titles of the columns in front.
    named: (cells of these columns, array [h, w]); narrower arrays leave cells empty.
  """
  width = max(array.shape[1] for _, array in named)
  rows = [(*key, 'row', *range(width))]
  for cells, array in named:
    for i, values in enumerate(array):
      rows.append((*cells, i, *(f'{v:.7g}' for v in values)))
  return rows
