"""Tables in files: how CSV is read, and which column holds what."""

import csv
from collections.abc import Sequence

from vit_jax.errors import UserError, choose


def read_csv(path: str) -> dict[str, list[str]]:
  """Reads a file of CSV or TSV as {column: its cells}; {} if it is empty."""
  try:
    with open(path, newline='', encoding='utf-8-sig') as file:
      # Some write tabs into a .csv.
      delimiter = '\t' if '\t' in file.readline() else ','
      file.seek(0)
      reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
      header, *rows = [row for row in reader if row] or [[]]
  except (OSError, ValueError, csv.Error) as error:
    raise UserError(f'{path}: cannot read it: {error}.') from None
  if wrong := next((row for row in rows if len(row) != len(header)), None):
    raise UserError(
      f'{path}: {delimiter.join(wrong)!r} has {len(wrong)} cells, but the header '
      f'{len(header)}.'
    )
  if len({*header}) < len(header):
    raise UserError(f'{path}: a column stands twice in the header {header}.')
  return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def find_columns(
  where: str, usual: dict, chosen: dict[str, str], has: list[str], needs: Sequence[str]
) -> dict[str, str]:
  """Returns {'image', 'text' or 'label': column} of those that a table has.

  Args:
    where: the name of the table for messages.
    usual: {key: names of its column, in the order in which they are looked for}.
    chosen: {key: name of its column}, the option `columns` of a source.
    needs: keys that must have a column.
  """
  out = {}
  for key in chosen:
    choose('key of source_options.columns', key, [*usual])
  for key, names in usual.items():
    if key in chosen:
      out[key] = choose(f'column {key}={chosen[key]!r}', chosen[key], has)
    elif name := next((name for name in names if name in has), None):
      out[key] = name
    elif key in needs:
      raise UserError(
        f"{where}: which of its columns {has} is the {key}? Set source_options={{'columns': "
        f"{{{key!r}: 'NAME'}}}}."
      )
  return out
