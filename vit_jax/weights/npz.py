"""NumPy's .npz files to arrays, without trusting their headers.

Such a file is a zip of .npy members. The sizes in its directory and headers are compared
with the bytes that are there before memory is allocated.
"""

import io
import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import config_json

# A deflated byte decompresses to at most this many (zlib's technical notes).
_DEFLATE_LIMIT = 1032
# A file may decompress to this many bytes, or to this many times its size. Weights hardly
# compress: what shrinks a hundredfold is zeros, or was made to fill the memory.
_ALWAYS, _TIMES = 256 << 20, 20
_HEADER = 10_000  # bytes of an .npy header; those of plain arrays have about 100
_KINDS = 'biuf'  # of numbers; besides bfloat16, which .npy has as two bytes
_MOST_AXES = 16
# What Python's zip reader raises for files that are damaged or not what they say; a
# RuntimeError where they are encrypted, or of a kind that it has not.
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError)
_DAMAGED += (RuntimeError, ValueError, OverflowError)
# What numpy's parser of headers raises besides.
_NO_HEADER = (ValueError, SyntaxError, TypeError, tokenize.TokenError)
_NO_HEADER += (RecursionError, MemoryError)


def read(path: Path) -> tuple[dict[str, np.ndarray], dict]:
  """Returns ({name: array}, the config in the zip's comment, {} if it has none).

  Raises:
    UserError: for a file that is damaged, contradicts its own sizes or holds objects.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      _check_directory(path, archive)
      arrays = {}
      for info in archive.infolist():
        name = info.filename.removesuffix('.npy')
        if name in arrays:
          raise UserError(f'{path} holds two arrays called {name!r}.')
        arrays[name] = _member(path, archive, info)
      comment = archive.comment
  except UserError:
    raise
  except _DAMAGED as error:
    raise UserError(f'{path} is truncated or damaged: {error}.') from None
  return arrays, _config(path, comment)


def check_whole(path: Path) -> None:
  """Raises UserError unless the zip's directory is there and agrees with the file."""
  try:
    with zipfile.ZipFile(path) as archive:
      _check_directory(path, archive)
  except UserError:
    raise
  except _DAMAGED as error:
    raise UserError(f'it is truncated or damaged: {error}') from None


def _check_directory(path: Path, archive: zipfile.ZipFile) -> None:
  size, total = path.stat().st_size, 0
  for info in archive.infolist():
    where = f'{path}: array {info.filename!r}'
    if not info.filename.endswith('.npy'):
      raise UserError(
        f'{where} is not a .npy member: this is a zip, but not an .npz file.'
      )
    if info.flag_bits & 1:
      raise UserError(f'{where} is encrypted.')
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
      raise UserError(f'{where} is compressed in a way that .npz files are not.')
    limit = info.compress_size * (_DEFLATE_LIMIT if info.compress_type else 1)
    if info.compress_size > size or info.file_size > limit:
      raise UserError(f'{where} claims more bytes than the file can hold.')
    total += info.file_size
  if total > max(_ALWAYS, _TIMES * size):
    raise UserError(
      f'{path} claims to decompress to {total:,} bytes, {total // size} times its size: '
      'a damaged file, or one made to fill the memory.'
    )


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
  where = f'{path}: array {info.filename!r}'
  with archive.open(info) as file:
    shape, fortran, dtype = _header(file, where)
    there = info.file_size - file.tell()
    size = math.prod(shape) * dtype.itemsize
    if size != there:
      raise UserError(
        f'{where}: its header says {shape} {dtype}, {size} bytes, but {there} are there.'
      )
    array = np.empty(math.prod(shape), dtype)
    _fill(file, memoryview(array.view(np.uint8)), where)
  array = array.reshape(shape, order='F' if fortran else 'C')
  if dtype.kind == 'V':
    from jax.numpy import bfloat16

    array = array.view(np.dtype(bfloat16))
  return array


def _header(file, where: str) -> tuple[tuple[int, ...], bool, np.dtype]:
  """Returns (shape, Fortran order, dtype) of an .npy header, all checked."""
  magic = file.read(8)
  version = tuple(magic[6:])
  if magic[:6] != b'\x93NUMPY' or version not in ((1, 0), (2, 0)):
    raise UserError(
      f'{where} is not a .npy of version 1.0 or 2.0: it begins with {magic!r}.'
    )
  length = file.read(2 if version == (1, 0) else 4)
  number = int.from_bytes(length, 'little')
  if number > _HEADER:
    raise UserError(
      f'{where}: its header of {number:,} bytes is not that of a plain array.'
    )
  text = file.read(number)
  strange = f'{where}: its header is not that of an array: {text[:60]!r}.'
  # Numpy parses it as Python, which deep nesting would exhaust.
  if max(map(text.count, b'([{')) > _MOST_AXES:
    raise UserError(strange)
  parse = getattr(np.lib.format, f'read_array_header_{version[0]}_0')
  try:
    shape, fortran, dtype = parse(io.BytesIO(length + text))
  except _NO_HEADER:
    raise UserError(strange) from None
  if len(shape) > _MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
    raise UserError(strange)
  if dtype.hasobject:
    raise UserError(
      f'{where} holds Python objects, which are pickled and can run code: refused. Save '
      'the weights as plain arrays.'
    )
  plain = dtype.kind == 'V' and dtype.itemsize == 2 and dtype.fields is None
  if dtype.subdtype or not (dtype.kind in _KINDS or plain):
    raise UserError(f'{where} has the type {dtype}, which is not numeric.')
  return shape, fortran, dtype


def _fill(file, buffer: memoryview, where: str) -> None:
  done = 0
  while done < len(buffer):
    part = file.read(min(len(buffer) - done, 1 << 24))
    if not part:
      raise UserError(f'{where} is truncated.')
    buffer[done : done + len(part)] = part
    done += len(part)
  file.read(1)  # zipfile compares the checksum once it reads past the end


def _config(path: Path, comment: bytes) -> dict:
  if not comment.startswith(b'{'):
    return {}  # no comment, or one of another program
  return config_json.parse(comment, f"{path}: the zip's comment")
