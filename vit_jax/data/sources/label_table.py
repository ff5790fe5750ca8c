"""Images on a disk whose labels stand in a table: a row for each image, in CSV or Parquet."""

import os
import re

import numpy as np

from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import parquet, splits, tables
from vit_jax.data.sources.base import fingerprint
from vit_jax.data.sources.folder import Folder, sort_by_hash
from vit_jax.errors import UserError

# Names of the column with the labels of an image. Without it, each class has a column.
_LABELS = ('label', 'labels')
# The cells of such a column.
_BINARY = {'0': 0, '1': 1, '0.0': 0, '1.0': 1, 'False': 0, 'True': 1}


class LabelTable(Folder):
  """FILE.csv or FILE.parquet: a row for each image, with its path and its labels.

  The first column is the path. Labels stand in the column 'label' or 'labels', as a list of
  Parquet or with '|' or ';' between them, or each class has a column of 0 and 1 for itself. An
  image may have several labels, or none; if every image of the file has one, this is ordinary
  classification. Rows of the same image are merged. A column 'split' says which images are
  for training; otherwise all are the split 'train', in the order of `folder.Folder`.

  Args:
    target: FILE.
    split: a split expression, see `splits`.
    root: the folder of the images, if it is not that of the file; relative to it.
    separator: the text between labels, in place of '|' and ';'.
  """

  SCHEME, RECIPE, PLACE = 'labels', 'finetune:data=labels:FILE.csv', 'rows'

  def __init__(
    self, target: str, split: str, *, root: str = '', separator: str | None = None
  ):
    path = os.path.abspath(os.path.expanduser(target))
    self.name = f'{self.SCHEME}:{target}'
    self._root = os.path.join(os.path.dirname(path), root)
    between = re.escape(separator) if separator else r'[|;]'
    if path.endswith('.parquet'):
      columns = parquet.open_file(path).read().to_pydict()
    else:
      columns = tables.read_csv(path)
    names = next(iter(columns.values()), [])
    if not names:
      raise UserError(f'{self.name}: expected a header and a row for each image.')
    self.class_names, labels = self._labels(columns, between)
    self.num_classes = len(self.class_names)
    places = columns.get('split', ['train'] * len(names))
    # Rows of the same image.
    rows, table = {}, np.zeros((len(names), self.num_classes), bool)
    for name, place, own in zip(names, places, labels, strict=True):
      key = splits.canonical(place), name
      table[rows.setdefault(key, len(rows)), own] = True
    members = {}
    for (place, name), row in rows.items():
      members.setdefault(place, []).append((name, row))
    split = splits.with_canonical_names(split)
    for part, *_ in splits.parse(split):
      self._check_split(part, members)
    self._select({part: sort_by_hash(x) for part, x in members.items()}, split)
    several = (table[: len(rows)].sum(1) != 1).any()
    self.features = {'image': ImageFeature(), 'label': LabelFeature(bool(several))}
    hot = table[self.labels]
    self.labels, self.multi_hot = (None, hot) if several else (hot.argmax(1), None)
    self.fingerprint = fingerprint((self.fingerprint, self.class_names, hot.tobytes()))
    if not os.path.exists(first := self.name_of(0)):
      raise UserError(
        f'{self.name}: no file {first!r}: set source_options.root to the folder of the images.'
      )

  def _labels(self, columns: dict, between: str) -> tuple[list[str], list[list[int]]]:
    """Returns the names of the classes, and the classes of each row."""
    _, *names = columns
    if column := next((name for name in names if name in _LABELS), None):
      # In Parquet a cell may be a list.
      lists = (
        re.split(between, x) if isinstance(x, str) else x or () for x in columns[column]
      )
      cells = [[str(x).strip() for x in cell if str(x).strip()] for cell in lists]
      classes = sorted({label for labels in cells for label in labels})
      number = {name: i for i, name in enumerate(classes)}
      return classes, [[number[label] for label in labels] for labels in cells]
    classes = [name for name in names if name != 'split']
    if not classes:
      raise UserError(f'{self.name}: no column of labels beside {[*columns]}.')
    for name in classes:
      if wrong := {*map(str, columns[name])} - _BINARY.keys():
        raise UserError(
          f'{self.name}: column {name!r} has {min(wrong)!r}: expected 0 or 1, or a column '
          f'{" or ".join(map(repr, _LABELS))}.'
        )
    rows = zip(*(columns[name] for name in classes), strict=True)
    return classes, [[i for i, x in enumerate(row) if _BINARY[str(x)]] for row in rows]

  def _annotate(self, index: int) -> dict:
    if self.labels is None:
      return {'label': np.flatnonzero(self.multi_hot[index])}
    return super()._annotate(index)
