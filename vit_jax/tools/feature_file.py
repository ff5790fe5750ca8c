"""Files of features: Parquet with one row per image or per patch.

The column `path` is the path of the image below its folder. Patches also have their row `y`
and column `x` in the grid of the image. Each layer is a column of D numbers. The patches of
an image are in the order of rows, so that [n, h, w, D] reshapes them to maps. The metadata
`vit_jax` of the schema is JSON that says how the features were computed, see `embed`. While
a file is written, it is a folder of parts.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from vit_jax import check, files
from vit_jax.check import Section, Size, nonempty
from vit_jax.errors import UserError
from vit_jax.tools import out_folder

SUFFIX = '.parquet'
_KEY = b'vit_jax'
# A file may decompress to at most this many times its size. `embed` compresses no features.
_TIMES = 20
# A part is written after this many seconds or bytes. A kill loses at most that much.
_SECONDS, _BYTES = 60, 32 << 20
# Features hardly compress. Paths and places repeat, so they get a dictionary.
_FORMAT = {'compression': 'none', 'use_dictionary': ['path', 'y', 'x']}
_FORMAT |= {'write_page_checksum': True}


def arrow() -> tuple:
  """Returns the modules `pyarrow` and `pyarrow.parquet`; raises UserError without pyarrow."""
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError:
    raise UserError("Parquet needs pyarrow: pip install 'vit_jax[features]'.") from None
  return pyarrow, pyarrow.parquet


@dataclasses.dataclass
class _Recipe:
  """What two files must share for their features to be comparable."""

  fingerprint: str  # of the parameters
  pp: str
  image_size: tuple[Size, Size]
  # {layer: shape of an image's row or map}
  layers: Annotated[dict[str, Annotated[list[Size], nonempty]], nonempty]
  dtype: str
  numbers: Literal['float16', 'float32']


@dataclasses.dataclass
class _Options:
  """Arguments of `weights.load`."""

  variant: str | None = None
  ema: bool | None = None
  weights: str | None = None


@dataclasses.dataclass
class _Record:
  """The metadata of a file, see `embed`."""

  recipe: Annotated[dict, Section(_Recipe)]
  source: str
  options: Annotated[dict, Section(_Options)]
  folder: str
  vit_jax: str
  bad_images: list | None = None


def _schema(record: dict):
  """Returns the columns and the metadata of a file."""
  pa, _ = arrow()
  layers = record['recipe']['layers']
  number = pa.from_numpy_dtype(np.dtype(record['recipe']['numbers']))
  fields = [('path', pa.string())]
  if any(len(shape) == 3 for shape in layers.values()):
    fields += [('y', pa.int16()), ('x', pa.int16())]
  fields += [(name, pa.list_(number, shape[-1])) for name, shape in layers.items()]
  return pa.schema(fields, {_KEY: json.dumps(record).encode()})


class File:
  """A file of features.

  Attributes:
    record: how the features were computed, see `embed`.
    not_finite: number of rows with NaN or infinity that `chunks` met.
  """

  def __init__(self, path):
    """Opens the file; raises UserError if it is missing, damaged or not by `vit_jax embed`."""
    pa, pq = arrow()
    if not Path(path).is_file():
      raise UserError(f'No such file: {path}.')
    self._reading = lambda: files.reading(path, pa.ArrowException)
    self.not_finite = 0
    with self._reading():
      self._file = pq.ParquetFile(path, page_checksum_verification=True)
      text = (self._file.schema_arrow.metadata or {}).get(_KEY, b'null')
      with check.prefix_errors(f'{path} was not written by vit_jax embed'):
        self.record = json.loads(text)
        check.bind('its metadata', self.record, _Record)
        if not self._file.schema_arrow.equals(_schema(self.record)):
          raise ValueError('its columns are not the layers of its metadata')
    widths = [shape[-1] for shape in self.record['recipe']['layers'].values()]
    number = np.dtype(self.record['recipe']['numbers']).itemsize
    rows = self._file.metadata.num_rows
    files.check_expansion(path, rows * sum(widths) * number, _TIMES)

  def paths(self) -> list[str]:
    """Returns the paths of the images, each once, in the order of their rows."""
    parts = (table['path'].unique().to_pylist() for table in self.tables(['path']))
    paths = [*dict.fromkeys(itertools.chain.from_iterable(parts))]
    shape = next(iter(self.record['recipe']['layers'].values()))
    with self._reading():
      rows, of_image = self._file.metadata.num_rows, math.prod(shape[:-1])
      if not rows or None in paths or rows != len(paths) * of_image:
        raise ValueError(f'{rows:,} rows of {len(paths):,} images')
    return paths

  def tables(self, columns: list[str] | None = None) -> Iterator:
    """Yields all rows as tables of pyarrow, one for each row group."""
    with self._reading():
      for i in range(self._file.num_row_groups):
        yield self._file.read_row_group(i, columns)

  def chunks(self, layer: str, rows: int) -> Iterator[np.ndarray]:
    """Yields the features of a layer in chunks float32 [rows, D]; the last may be shorter.

    Rows with NaN or infinity are NaN.
    """
    with self._reading():
      for batch in self._file.iter_batches(rows, columns=[layer]):
        column = batch.column(0)
        x = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
        x = x.astype(np.float32)
        odd = ~np.isfinite(x).all(1)
        x[odd] = np.nan
        self.not_finite += int(odd.sum())
        yield x


@contextlib.contextmanager
def writing(out: Path, record: dict) -> Iterator['Parts']:
  """Opens the parts of a file of features, and locks them for this process.

  Args:
    record: how the features are computed, see `embed`.

  Raises:
    UserError: if the parts are of another recipe, or if another process writes them.
  """
  folder = out.with_name(f'{out.name}.parts')
  out_folder.make(out.parent)
  # The file stays: a process could lock it while another one deletes it.
  with open(out.with_name(f'.{out.name}.lock'), 'w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise UserError(f'Another process writes {out}.') from None
    out_folder.make(folder)
    try:
      yield Parts(out, folder, record)
    finally:
      # An OSError means that the folder has parts, or that it was deleted.
      with contextlib.suppress(OSError):
        folder.rmdir()


class Parts:
  """Writes a file of features in parts that survive a kill.

  A part is a complete file of features in the folder FILE.parts; `join` makes one file of
  them. An earlier file of the same recipe is the first part.

  Attributes:
    done: paths of the images that the parts hold.
  """

  def __init__(self, out: Path, folder: Path, record: dict):
    self.done: set[str] = set()
    self._out, self._folder, self._record = out, folder, record
    self._waiting, self._bytes, self._since = [], 0, time.monotonic()
    parts = sorted(folder.glob(f'[0-9]*{SUFFIX}'))
    self._number = len(parts)
    pieces = [out, *parts] if out.exists() else parts
    self._pieces = [path for path in pieces if self._take(path)]

  def _take(self, path: Path) -> bool:
    """Adds the images of a part to `done`; returns False if they are all there already."""
    file = File(path)
    # Names are relative to the folder, so in another folder they are other images.
    facts = lambda record: {'folder': record.get('folder'), **record['recipe']}
    for key, new in facts(self._record).items():
      if (old := facts(file.record).get(key)) != new:
        raise UserError(
          f'{path} was written with {key} {old}, but {key} is now {new}: delete it, or name '
          'another file with --out.'
        )
    names = {*file.paths()}
    # A kill came after the parts were joined and before they were deleted.
    if names <= self.done:
      return False
    self.done |= names
    return True

  def add(self, paths: list[str], rows: dict[str, np.ndarray]) -> None:
    """Adds images and their rows. `rows` is {layer: [n, D] or maps [n, h, w, D]}."""
    if paths:
      self.done.update(paths)
      self._waiting.append(self._table(paths, rows))
      self._bytes += sum(x.nbytes for x in rows.values())
    if self._bytes >= _BYTES or time.monotonic() - self._since >= _SECONDS:
      self._write()

  def join(self, **more) -> None:
    """Writes the file, with `more` in its record, and deletes the parts."""
    self._write()
    _, pq = arrow()

    def write(target):
      with pq.ParquetWriter(target, _schema(self._record | more), **_FORMAT) as writer:
        for path in self._pieces:
          for table in File(path).tables():
            writer.write_table(table)

    if self._pieces != [self._out]:
      files.replace(self._out, write)
    shutil.rmtree(self._folder)

  def _write(self) -> None:
    pa, pq = arrow()
    if self._waiting:
      table = pa.concat_tables(self._waiting)
      path = self._folder / f'{self._number:06}{SUFFIX}'
      files.replace(path, lambda file: pq.write_table(table, file, **_FORMAT))
      self._pieces.append(path)
      self._number += 1
    self._waiting, self._bytes, self._since = [], 0, time.monotonic()

  def _table(self, paths, rows):
    pa, _ = arrow()
    columns = [np.array(paths, object)]
    n, *grid, _ = next(iter(rows.values())).shape
    if grid:
      places = np.indices(grid, np.int16).reshape(2, -1)
      columns = [columns[0].repeat(places.shape[1]), *np.tile(places, n)]
    columns = [pa.array(x) for x in columns]
    for x in rows.values():
      flat = pa.array(x.reshape(-1))
      columns.append(pa.FixedSizeListArray.from_arrays(flat, x.shape[-1]))
    return pa.Table.from_arrays(columns, schema=_schema(self._record))
