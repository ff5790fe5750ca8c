"""Label sets from a JSON file, in place of a data set's own labels (as ReaL).

"Are we done with ImageNet?" (arXiv 2006.07159) relabels the validation images with a
set of right classes each, some sets empty; its file is a list of 50,000 lists.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax.check import check
from vit_jax.errors import UserError

# ILSVRC2012_val_00000001.JPEG is the first list of the ReaL file.
_NUMBERED = re.compile(r'.*_(\d{8})\.\w+')


class LabelSets:
  """The label sets of the examples of one split."""

  def __init__(
    self,
    path: str,
    num_classes: int,
    name_of: Callable[[int], str],
    in_order: bool = True,
  ):
    """Reads the file.

    Args:
      path: JSON, either a list of lists of class indices, or {file name: list}. A list
        is looked up by the number in names such as ILSVRC2012_val_00000001.JPEG, where
        they have one (counted from 1), and by the example's index otherwise, if that is
        `in_order`. Names are looked up whole, then without their folders.
      name_of: example index -> name.
      in_order: whether examples have the order in which they were collected. Those of
        folders and of TFDS are shuffled.

    Raises:
      UserError: if the file is missing or has another form.
    """
    try:
      self._sets = json.loads(Path(path).expanduser().read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
      raise UserError(f'labels: cannot read {path!r}: {error}') from None
    kind = dict[str, list[int]] if isinstance(self._sets, dict) else list[list[int]]
    check(f'labels: {path!r}', self._sets, kind)
    rows = self._sets.values() if isinstance(self._sets, dict) else self._sets
    wrong = [k for row in rows for k in row if not 0 <= k < num_classes]
    if wrong:
      raise UserError(
        f'labels: {path!r} has class {wrong[0]}, but num_classes={num_classes} allows 0 to '
        f'{num_classes - 1}.'
      )
    self.path, self.num_classes, self._name_of = path, num_classes, name_of
    self._in_order = in_order

  def multi_hot(self, indices: np.ndarray) -> np.ndarray:
    """Returns float32 [b, K] for example indices [b]; UserError for one not listed."""
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
          f'labels: {self.path!r} is a list, in the order of the files ILSVRC2012_val_'
          f'00000001.JPEG, ..., which is not that of the examples here: {name} has no '
          'number. Evaluate on a folder of those files; TFDS has the data set '
          'imagenet2012_real.'
        )
      position = int(number[1]) - 1 if number else index
      if 0 <= position < len(self._sets):
        return self._sets[position]
    raise UserError(
      f'labels: {self.path!r}, with {len(self._sets)} entries, has none for {name}. '
      'Is it for another data set or split?'
    )
