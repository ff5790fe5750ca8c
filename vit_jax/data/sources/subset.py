"""Makes a source of some of the classes of another source.

A split expression counts only the examples of these classes: 'train[:80]' is the first 80
of them in the order of the source, and 'train[:90%]' the first nine tenths of them.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np

from vit_jax.check import INT32, Range, prefix_errors
from vit_jax.data.sources import splits
from vit_jax.data.sources.base import Source, View, check_labels, fingerprint
from vit_jax.data.sources.folder import some
from vit_jax.errors import did_you_mean


def check_classes(where: str, classes: Sequence[int | str], section: dict) -> None:
  """Raises UserError for an impossible list of classes; a rule for `check`."""
  with prefix_errors(where):
    if not isinstance(section['source'], str):
      raise ValueError("a list of sources: give each part its own 'classes'")
    if not classes:
      raise ValueError('an empty list: name one class or more')


# The type of the parameter `classes` of everything that opens a source.
Classes = Annotated[list[Annotated[int, Range(0, INT32)] | str] | None, check_classes]


def build(
  open_split: Callable[[str], Source], split: str, classes: Sequence[int | str]
) -> 'Subset':
  """Returns the source of the examples of some classes.

  Args:
    open_split: opens the source of a split expression.
    split: a split expression that counts only the examples of these classes.
    classes: indices or names of classes, whose new indices are 0 to n - 1 in this order.
  """
  names = list(dict.fromkeys(name for name, _, _ in splits.parse(split)))
  source = open_split('+'.join(names))
  if source.labels is None:
    raise ValueError(
      f'{source.name}: classes={list(classes)!r} needs one label per image, known '
      "without reading images, as 'folder:PATH' and 'arrays:FILE.npz' have"
    )
  number = source.num_classes
  if number is None:
    number = int(source.labels.max(initial=-1)) + 1
  check_labels(source, number)
  old = [_index(source, number, value) for value in classes]
  if again := [value for i, value in enumerate(classes) if old[i] in old[:i]]:
    raise ValueError(f'{source.name}: classes={list(classes)!r} has {again[0]!r} twice')
  table = np.full(number, -1, np.int64)
  table[old] = np.arange(len(old))
  labels = table[source.labels]
  members, start = {}, 0
  for name in names:
    end = start + len(source if len(names) == 1 else open_split(name))
    members[name] = start + np.flatnonzero(labels[start:end] >= 0)
    start = end
  sizes = {name: len(rows) for name, rows in members.items()}
  chosen = splits.select(split, sizes, f'{source.name}, classes {list(classes)!r}')
  rows = np.concatenate([members[name][indices] for name, indices in chosen])
  return Subset(source, rows, labels[rows], old)


def _index(source: Source, number: int, value: int | str) -> int:
  """Returns the index that the source gives to a class."""
  names = source.class_names or []
  if isinstance(value, str):
    if names.count(value) == 1:
      return names.index(value)
    which = some([*map(repr, names)]) if names else 'without names: give an index'
    raise ValueError(
      f'{source.name} has no single class {value!r}: its {number} classes are {which}.'
      f'{did_you_mean(value, names)}'
    )
  if not 0 <= value < number:
    raise ValueError(
      f'{source.name} has no class {value}: its {number} classes are 0 to {number - 1}'
    )
  return value


class Subset(View):
  """Some of the examples of a source, with new labels."""

  def __init__(
    self, source: Source, rows: np.ndarray, labels: np.ndarray, classes: Sequence[int]
  ):
    """Selects examples.

    Args:
      rows: the source's indices of the examples, int64 [N].
      labels: the new labels of these examples, int [N].
      classes: the source's index of each class.
    """
    super().__init__(source)
    self._rows, self.labels = rows, labels
    self.num_classes = len(classes)
    if source.class_names is not None:
      self.class_names = [source.class_names[i] for i in classes]
    self.fingerprint = fingerprint((source.fingerprint, list(classes), rows.tobytes()))

  def __len__(self) -> int:
    return len(self._rows)

  def read(self, indices: np.ndarray) -> list[dict]:
    indices = np.asarray(indices)
    return [
      example if 'error' in example else {**example, 'label': int(label)}
      for example, label in zip(
        self.source.read(self._rows[indices]), self.labels[indices], strict=True
      )
    ]

  def name_of(self, index: int) -> str:
    return self.source.name_of(int(self._rows[index]))
