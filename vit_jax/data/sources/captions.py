"""Images on a disk whose captions stand in tables: JSON lines, CSV or TSV."""

import json
import os

from vit_jax.data.features import ImageFeature, TextFeature
from vit_jax.data.sources import shards, splits, tables
from vit_jax.data.sources.base import fingerprint
from vit_jax.data.sources.folder import Folder, sort_by_hash
from vit_jax.errors import UserError

_EXTENSIONS = ('.jsonl', '.csv', '.tsv')
# Names of a column, in the order in which they are looked for.
_NAMES = {
  'image': ('file_name', 'filepath', 'image', 'path', 'filename'),
  'text': ('text', 'caption', 'captions', 'title'),
}


class Captions(Folder):
  """`captions:FOLDER` or `captions:FILE`: a row with the path of an image and a caption.

  A path is relative to the folder of its table. In JSON lines a caption may be a list, and
  several rows of an image are several captions. A table belongs to the split whose name its
  own name, or its folder's, begins with: train.jsonl, val/metadata.csv. All others are the
  split 'train'. The order is that of `folder.Folder`.

  Options:
    columns: {'image' or 'text': name of its column}, for other names than usual.
  """

  SCHEME = 'captions'

  def __init__(self, target: str, split: str, *, columns: dict[str, str] | None = None):
    self.name = f'{self.SCHEME}:{target}'
    path = os.path.abspath(os.path.expanduser(target))
    self._root = path if os.path.isdir(path) else os.path.dirname(path)
    self._columns = columns or {}
    files = shards.find_files(self.name, target, _EXTENSIONS)
    split = splits.with_canonical_names(split)
    names = dict.fromkeys(name for name, *_ in splits.parse(split))
    rows, captions = {}, []
    for name in names:
      splits.check_name(name, files, self.name)
    for name in names:
      texts: dict[str, list[str]] = {}
      for path in files[name]:
        self._read_table(path, texts)
      numbered = [(image, i) for i, image in enumerate(texts, len(captions))]
      rows[name] = sort_by_hash(numbered)
      captions += texts.values()
    if not captions:
      raise UserError(f'{self.name}: no row with an image.')
    self.class_names = None
    self._select(rows, split)
    self._texts = [captions[i] for i in self.labels]
    self.labels = None
    self.features = {'image': ImageFeature(), 'text': TextFeature()}
    self.fingerprint = fingerprint((self.fingerprint, json.dumps(self._texts)))
    if not os.path.exists(first := self.name_of(0)):
      raise UserError(f'{self.name}: no file {first!r}, which one of its rows names.')

  def _annotate(self, index: int) -> dict:
    return {'text': self._texts[index]}

  def _read_table(self, path: str, texts: dict[str, list[str]]) -> None:
    """Adds the captions of a table, {path of an image below the root: captions}."""
    folder = os.path.relpath(os.path.dirname(path), self._root)
    columns = _read_lines(path) if path.endswith('.jsonl') else tables.read_csv(path)
    if not columns:
      return
    names = tables.find_columns(path, _NAMES, self._columns, [*columns], [*_NAMES])
    cells = zip(columns[names['image']], columns[names['text']], strict=True)
    for number, (image, cell) in enumerate(cells, 1):
      captions = [cell] if isinstance(cell, str) else cell or []
      if not image or not all(isinstance(text, str) for text in captions):
        raise UserError(
          f'{path}: row {number} has {image!r} and {cell!r}: expected a path and a caption.'
        )
      image = os.path.normpath(os.path.join(folder, image))
      texts.setdefault(image, []).extend(text for text in captions if text.strip())


def _read_lines(path: str) -> dict[str, list]:
  """Reads JSON lines as {key of the first line: its values}; {} if there are none."""
  try:
    with open(path, encoding='utf-8-sig') as file:
      rows = [dict(json.loads(line)) for line in file if line.strip()]
  except (OSError, ValueError, TypeError) as error:
    raise UserError(f'{path}: cannot read it: {error}.') from None
  return {key: [row.get(key) for row in rows] for key in (rows[0] if rows else ())}
