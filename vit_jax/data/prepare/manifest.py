"""A list of files and their labels: CSV, TSV or JSON lines."""

import csv
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.data.prepare.entries import clean
from vit_jax.errors import UserError

ENDINGS = ('.csv', '.tsv', '.jsonl', '.ndjson')
# First cells that make a CSV's first row its header.
_PATH_COLUMNS = ('path', 'file', 'file_name', 'filename', 'image', 'image_path')
_LABEL_COLUMNS = ('label', 'labels', 'class', 'classes', 'class_name')
_SPLIT_COLUMN = 'split'
_SPLIT = re.compile(r'(?!all$)[A-Za-z]\w*')


class Row(NamedTuple):
  """What a list of labels says about one image."""

  path: str  # as written
  labels: tuple[str, ...]
  split: str | None


def is_manifest_name(path: str) -> bool:
  """Whether a file's name is that of a list of labels."""
  return path.lower().endswith(ENDINGS)


def read(path: str) -> tuple[dict[str, Row], bool]:
  """Returns ({clean path: row}, whether images may have any number of labels).

  CSV and TSV: path,label[,label...], with or without a header; a header may name a
  column 'split'. JSON lines: {"path": ..., "label": ...} or {"path": ..., "labels":
  [...]}, and "split" if wanted. Several labels are allowed if a row has several, or
  "labels" is used.

  Raises:
    UserError: naming the line.
  """
  try:
    with open(path, encoding='utf-8-sig', newline='') as file:
      lines = list((_json if _is_json(path) else _csv)(file, path))
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}.') from None
  except UnicodeDecodeError as error:
    raise UserError(f'{path} is not UTF-8 text ({error}).') from None
  rows: dict[str, Row] = {}
  multi_label = any(several or len(row.labels) > 1 for _, row, several in lines)
  first: dict[str, int] = {}
  for line, row, _ in lines:
    key = clean(row.path)
    if key in rows:
      raise UserError(
        f'{path}, line {line}: {row.path!r} is in line {first[key]} already. '
        'Several labels of an image go into one row: path,label,label.'
      )
    if not row.labels and not multi_label:
      raise UserError(f'{path}, line {line}: {row.path!r} has no label.')
    rows[key], first[key] = row, line
  if not rows:
    raise UserError(f'{path} has no rows. Needed is path,label on each line.')
  if len({row.split is None for row in rows.values()}) > 1:
    bad = next(row for row in rows.values() if row.split is None)
    raise UserError(f'{path}: {bad.path!r} has no split, but other rows have one.')
  return rows, multi_label


def _is_json(path: str) -> bool:
  return path.lower().endswith(('.jsonl', '.ndjson'))


def _csv(file, where: str) -> Iterator[tuple[int, Row, bool]]:
  reader = csv.reader(file, delimiter='\t' if where.lower().endswith('.tsv') else ',')
  split_at, before = None, 0
  try:
    for cells in reader:
      line, before = before + 1, reader.line_num
      cells = [cell.strip() for cell in cells]
      if not any(cells):
        continue
      if line == 1 and cells[0].lower() in _PATH_COLUMNS:
        names = [cell.lower() for cell in cells]
        split_at = names.index(_SPLIT_COLUMN) if _SPLIT_COLUMN in names else None
        unknown = set(names[1:]) - {*_LABEL_COLUMNS, _SPLIT_COLUMN, ''}
        if unknown:
          raise UserError(
            f'{where}: the column {sorted(unknown)[0]!r} is unknown. Needed is a first '
            f"column '{names[0]}', then 'label', more of them for more labels, and "
            "'split' if wanted."
          )
        continue
      split = (
        cells.pop(split_at) if split_at is not None and split_at < len(cells) else ''
      )
      yield line, _row(cells[0], cells[1:], split, f'{where}, line {line}'), False
  except csv.Error as error:
    raise UserError(f'{where}, line {reader.line_num}: {error}.') from None


def _json(file, where: str) -> Iterator[tuple[int, Row, bool]]:
  for line, text in enumerate(file, 1):
    if not text.strip():
      continue
    here = f'{where}, line {line}'
    try:
      record = json.loads(text)
    except ValueError as error:
      raise UserError(f'{here} is not JSON: {error}.') from None
    if not isinstance(record, dict) or not isinstance(record.get('path'), str):
      raise UserError(f'{here}: expected {{"path": "a.jpg", "label": "cat"}}.')
    if unknown := set(record) - {'path', 'label', 'labels', 'split'}:
      raise UserError(
        f'{here}: {sorted(unknown)[0]!r} is unknown. Allowed are path, label or labels, '
        'split.'
      )
    labels = record.get('labels', [record['label']] if 'label' in record else [])
    right = isinstance(labels, list) and all(type(x) in (str, int) for x in labels)
    if not right or ('label' in record and 'labels' in record):
      raise UserError(f'{here}: label is a text or integer, labels a list of them.')
    several = 'labels' in record
    yield line, _row(record['path'], labels, record.get('split'), here), several


def _row(path: str, labels: list, split, where: str) -> Row:
  labels = [str(label).strip() for label in labels]
  for label in labels:
    if '\n' in label or '\r' in label:
      raise UserError(f'{where}: the label {label!r} has a line break.')
  if not path:
    raise UserError(f'{where} has no path.')
  # Without repeated and empty ones, as tables have for rows with fewer labels.
  kept = tuple(dict.fromkeys(label for label in labels if label))
  if split and not _SPLIT.fullmatch(str(split)):
    raise UserError(f"{where}: {split!r} is not a name of a split, such as 'train'.")
  return Row(path, kept, split or None)
