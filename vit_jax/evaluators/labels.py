"""Label sets from a JSON file, which replace the labels of a data set (as ReaL does).

"Are we done with ImageNet?" (arXiv 2006.07159) gives each validation image a set of right
classes, which may be empty. Its file is a list of 50,000 lists.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax.check import check
from vit_jax.errors import UserError

# The number of an image: the labels of ILSVRC2012_val_00000001.JPEG come first in ReaL's
# file.
_NUMBERED = re.compile(r'.*_(\d{8})\.\w+')


class LabelSets:
  """The label sets of the examples of one split.

  Args:
    path: a JSON file, either a list of lists of class indices or {file name: list}. In a list,
      an example's position is the number in its name, counted from 1, as in
      ILSVRC2012_val_00000001.JPEG, or its index if its name has no number. In a dict, an
      example is found by its whole name or by its name without folders.
    name_of: a function that returns the name of the example with an index.
    in_order: whether the examples are in their original order, so that the index counts.
      The examples of folders and of TFDS are shuffled.
  """

  def __init__(
    self,
    path: str,
    num_classes: int,
    name_of: Callable[[int], str],
    in_order: bool = True,
  ):
    try:
      self._sets = json.loads(Path(path).expanduser().read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
      raise UserError(f'labels: cannot read {path!r}: {error}') from None
    named = isinstance(self._sets, dict)
    kind = dict[str, list[int]] if named else list[list[int]]
    check(f'labels: {path!r}', self._sets, kind)
    for k in (k for row in (self._sets.values() if named else self._sets) for k in row):
      if not 0 <= k < num_classes:
        raise UserError(f'labels: {path!r} has class {k}, but {num_classes=}.')
    self.path, self.num_classes = path, num_classes
    self._name_of, self._in_order = name_of, in_order

  def multi_hot(self, indices: np.ndarray) -> np.ndarray:
    """Returns the labels of the examples with these indices [b], multi-hot float32 [b, K]."""
    rows = np.zeros((len(indices), self.num_classes), np.float32)
    for row, index in zip(rows, indices, strict=True):
      row[self._find(int(index))] = 1
    return rows

  def _find(self, index: int) -> list[int]:
    name = self._name_of(index)
    if isinstance(self._sets, dict):
      for key in (name, Path(name).name):
        if key in self._sets:
          return self._sets[key]
    else:
      number = _NUMBERED.fullmatch(name)
      if not number and not self._in_order:
        raise UserError(
          f'labels: {self.path!r} is a list by file numbers, and {name} has none; TFDS '
          'has the data set imagenet2012_real.'
        )
      position = int(number[1]) - 1 if number else index
      if 0 <= position < len(self._sets):
        return self._sets[position]
    raise UserError(f'labels: {self.path!r} has no entry for {name}.')
