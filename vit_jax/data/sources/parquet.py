"""Parquet files of images, as data sets on the Hugging Face hub have them."""

import functools
import json

import numpy as np

from vit_jax.check import Count
from vit_jax.data import stalls
from vit_jax.data.sources import shards, tables
from vit_jax.errors import UserError

# Names of a column, in the order in which they are looked for.
_NAMES = {
  'image': ('image', 'img', 'jpg', 'image_bytes'),
  'text': ('text', 'caption', 'captions'),
  'label': ('label', 'labels', 'cls', 'fine_label'),
}
# Groups of rows that a file keeps in memory.
_GROUPS = 4


class Parquet(shards.Encoded):
  """`parquet:FOLDER`: a column of encoded images, and columns of captions and labels.

  The column of images holds bytes, or {'bytes', 'path'}; captions are a text or a list of
  texts; a label is an integer or a list of integers, whose names stand in the metadata of the
  hub. Parquet is read in groups of rows, which makes reading at random slow if they are large:
  `stream` then reads from front to back.

  Options:
    columns: {'image', 'text' or 'label': name of its column}, for other names than usual.
    stream, shuffle_buffer: see `records.RecordFiles`.
  """

  SCHEME, EXTENSION = 'parquet', '.parquet'

  def __init__(
    self,
    target: str,
    split: str,
    *,
    columns: dict[str, str] | None = None,
    stream: bool = False,
    shuffle_buffer: Count | None = None,
  ):
    self._columns = columns or {}
    super().__init__(target, split, stream=stream, shuffle_buffer=shuffle_buffer)
    file = open_file(self.pieces.parts[0].filename)
    rows = max(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups))
    if not self._buffer:
      self.remarks = '; '.join(
        filter(None, (self.remarks, f'read {rows:,} rows at a time'))
      )
    names = _class_names(file, self._names(file).get('label'))
    if 'label' in self.features and names:
      self.class_names, self.num_classes = names, len(names)

  def _names(self, file) -> dict[str, str]:
    """Returns {'image', 'text' or 'label': column} of those that a file has."""
    has = file.schema_arrow.names
    return tables.find_columns(self.name, _NAMES, self._columns, has, ('image',))

  def _labels(self, piece) -> list:
    file = open_file(piece.filename)
    name = self._names(file).get('label')
    if name is None:
      return [None] * piece.take
    column = file.read(columns=[name]).column(name)
    labels = column[piece.skip : piece.skip + piece.take].to_pylist()
    numbers = lambda x: x if isinstance(x, list) else [] if x is None else [x]
    if wrong := [y for x in labels for y in numbers(x) if not isinstance(y, int)]:
      raise UserError(f'{piece.filename}: the label {wrong[0]!r} is not an integer.')
    return labels

  def _count(self, path: str) -> int:
    return open_file(path).metadata.num_rows

  def _read_rows(self, path: str, rows: list[int]) -> list[dict]:
    file = open_file(path)
    names = self._names(file)
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    ends, out = np.cumsum(sizes), []
    for row in rows:
      group = int(np.searchsorted(ends, row, 'right'))
      table = _read_group(path, group, tuple(names.values()))
      at = row - int(ends[group]) + sizes[group]
      cells = {key: table.column(name)[at].as_py() for key, name in names.items()}
      if isinstance(image := cells['image'], dict):
        cells['image'] = image.get('bytes')
      out.append({**dict.fromkeys(_NAMES), **cells})
    return out


@functools.cache
def open_file(path: str):
  """Opens a Parquet file as a `pyarrow.parquet.ParquetFile`."""
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError:
    raise UserError("Parquet needs pyarrow: pip install 'vit_jax[features]'.") from None
  try:
    return parquet.ParquetFile(path)
  except (OSError, pyarrow.ArrowInvalid) as error:
    raise UserError(f'{path} is not a complete Parquet file: {error}.') from None


@functools.lru_cache(maxsize=_GROUPS)
def _read_group(path: str, group: int, columns: tuple[str, ...]):
  with stalls.reading(path):
    # Not `open_file`, whose file is not for several threads.
    from pyarrow import parquet

    return parquet.ParquetFile(path).read_row_group(group, columns=list(columns))


def _class_names(file, column: str | None) -> list[str] | None:
  """Returns the names of classes in the metadata of the hub."""
  metadata = (file.schema_arrow.metadata or {}).get(b'huggingface', b'{}')
  feature = json.loads(metadata).get('info', {}).get('features', {}).get(column, {})
  # That of lists describes their elements.
  return feature.get('feature', feature).get('names')
