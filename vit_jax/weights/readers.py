"""Files of weights to flat numpy arrays: .npz and safetensors, never a pickle.

What a header says of its array is held against the bytes that are there before memory is
taken for it.
"""

import json
import math
import struct
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError

# A deflated byte stands for at most this many (zlib's technical notes).
_DEFLATE_LIMIT = 1032
# What a file of weights is called; others are looked at, too.
SUFFIXES = ('.npz', '.safetensors')
_PICKLES = ('.bin', '.pt', '.pth', '.pkl', '.pickle', '.ckpt', '.tar')
_INDEX = '.safetensors.index.json'


class Raw(NamedTuple):
  """What a file holds, under its own names."""

  path: Path  # of the file; of the folder for a folder
  arrays: dict[str, np.ndarray]
  config: dict  # of config.json beside it, or embedded; {} where there is none


def read(path: str | Path) -> Raw:
  """Reads an .npz file, a .safetensors file, or a folder as on a model hub.

  A folder holds `model.safetensors` (or one other safetensors file, or parts with an
  index) and `config.json`. 16-bit floats stay what they are; bfloat16, which .npz
  stores as void, is given its type back.

  Raises:
    UserError: no such file, another type, a pickle, a truncated or lying file.
  """
  path = Path(path)
  if path.is_dir():
    return _folder(path)
  if not path.is_file():
    raise UserError(f'No such file or folder of weights: {path}.')
  with path.open('rb') as file:
    magic = file.read(8)
  if magic.startswith(b'PK\x03\x04') and path.suffix not in _PICKLES:
    return _npz(path)
  if path.suffix == '.safetensors':
    arrays, config = _safetensors(path)
    return Raw(path, arrays, config or _config_beside(path.parent))
  if magic.startswith(b'PK\x03\x04') or path.suffix in _PICKLES:
    raise UserError(
      f'{path} is a pickle, which can run code when it is loaded: convert it to '
      'safetensors where it comes from. Read are .npz and .safetensors.'
    )
  empty = ' It is empty.' if not magic else ''
  raise UserError(
    f'{path} is neither an .npz nor a .safetensors file.{empty} Read are those two, and '
    'folders with config.json and model.safetensors.'
  )


def _folder(folder: Path) -> Raw:
  found = sorted(folder.glob('*.safetensors'))
  index = sorted(folder.glob(f'*{_INDEX}'))
  model = folder / 'model.safetensors'
  if model in found:
    arrays, config = _safetensors(model)
  elif index:
    arrays, config = {}, {}
    for part in sorted(set(_json(index[0]).get('weight_map', {}).values())):
      if '/' in part or part.startswith('.'):
        raise UserError(f'{index[0]} points outside of its folder: {part!r}.')
      arrays |= _safetensors(folder / part)[0]
  elif len(found) == 1:
    arrays, config = _safetensors(found[0])
  else:
    raise UserError(
      f'{folder} holds no weights: expected model.safetensors and config.json, as in a '
      f'hub folder, or a run of vit_jax. Found {[p.name for p in found] or "neither"}.'
    )
  return Raw(folder, arrays, _config_beside(folder) or config)


def _config_beside(folder: Path) -> dict:
  """Returns config.json, and under 'preprocessor' transformers' other file."""
  path, other = folder / 'config.json', folder / 'preprocessor_config.json'
  config = _json(path) if path.is_file() else {}
  if other.is_file():
    config['preprocessor'] = _json(other)
  return config


def _json(path: Path) -> dict:
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise UserError(f'{path} is no JSON: {error}.') from None
  if not isinstance(value, dict):
    raise UserError(f'{path} holds no JSON object.')
  return value


def _safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict]:
  """Returns (arrays, config in the metadata); the library checks header and sizes."""
  from safetensors import SafetensorError, safe_open

  if not path.is_file():
    raise UserError(f'No such file of weights: {path}.')
  try:
    with safe_open(path, 'np') as file:
      arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
      config = json.loads((file.metadata() or {}).get('config', '{}'))
  except (SafetensorError, struct.error, OSError, ValueError) as error:
    raise UserError(f'{path} is damaged or no safetensors file: {error}.') from None
  return arrays, config


def _npz(path: Path) -> Raw:
  try:
    with zipfile.ZipFile(path) as archive:
      arrays = {}
      for info in archive.infolist():
        name = info.filename.removesuffix('.npy')
        arrays[name] = _npy(path, archive, info)
      config = json.loads(archive.comment or '{}')
  except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
    raise UserError(f'{path} is truncated or damaged: {error}.') from None
  except ValueError as error:
    if isinstance(error, UserError):
      raise
    raise UserError(f'{path} is damaged: {error}.') from None
  return Raw(path, arrays, config if isinstance(config, dict) else {})


def _npy(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
  where = f'{path}: array {info.filename!r}'
  if not info.filename.endswith('.npy'):
    raise UserError(f'{where} is no .npy member: this is a zip, but no .npz file.')
  limit = info.compress_size * (1 if info.compress_type == 0 else _DEFLATE_LIMIT)
  if info.compress_size > path.stat().st_size or info.file_size > limit:
    raise UserError(f'{where} claims more bytes than the file can hold.')
  with archive.open(info) as file:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
      raise UserError(f'{where} has .npy version {version}; 1.0 and 2.0 are read.')
    header = getattr(np.lib.format, f'read_array_header_{version[0]}_0')
    shape, fortran, dtype = header(file)
    if dtype.hasobject:
      raise UserError(
        f'{where} holds Python objects, which are pickled and can run code: refused. '
        'Save the weights as plain arrays.'
      )
    size = math.prod(shape) * dtype.itemsize
    if size != info.file_size - file.tell():
      raise UserError(
        f'{where}: its header says {shape} {dtype}, {size} bytes, but '
        f'{info.file_size - file.tell()} are there.'
      )
    array = np.empty(math.prod(shape), dtype)
    _fill(file, memoryview(array.view(np.uint8)), where)
  array = array.reshape(shape, order='F' if fortran else 'C')
  if dtype.kind == 'V' and dtype.itemsize == 2:
    from jax.numpy import bfloat16

    array = array.view(np.dtype(bfloat16))
  if array.dtype.kind in 'SUOMm' or (array.dtype.kind == 'V' and dtype.itemsize != 2):
    raise UserError(f'{where} has the type {dtype}, which is not numeric.')
  return array


def _fill(file, buffer: memoryview, where: str) -> None:
  done = 0
  while done < len(buffer):
    part = file.read(min(len(buffer) - done, 1 << 24))
    if not part:
      raise UserError(f'{where} is truncated.')
    buffer[done : done + len(part)] = part
    done += len(part)
  file.read(1)  # at the end the library checks the checksum
