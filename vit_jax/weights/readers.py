"""Files of weights to flat numpy arrays: .npz and safetensors, never a pickle.

What a header says of its array is compared with the bytes that are there before memory is
allocated for it.
"""

import re
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import config_json, npz

# Of files of weights; a file of another name is recognised by its content.
SUFFIXES = ('.npz', '.safetensors')
_DTYPES = ('F64', 'F32', 'F16', 'BF16', 'I64', 'I32', 'I16', 'I8', 'U8', 'BOOL')
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
  index) and `config.json`; or one .npz. 16-bit floats stay what they are; bfloat16, which
  .npz stores as void, is given its type back.

  Raises:
    UserError: for a file that is not there, of another type, a pickle, truncated, or
      whose header contradicts its content.
  """
  path = Path(path)
  raw = _folder(path) if path.is_dir() else _file(path)
  empty = [name for name, x in raw.arrays.items() if not x.size]
  if empty:
    raise UserError(f'{path}: array {empty[0]!r} is empty.')
  return raw._replace(config=config_json.check(raw.config, str(path)))


def check_whole(path: Path) -> None:
  """Raises UserError unless a file's size and ends are those of a whole one.

  The arrays are not read: the directory of an .npz, or the header of a safetensors file,
  is compared with the file's size.
  """
  with path.open('rb') as file:
    magic = file.read(8)
  if magic.startswith(b'PK\x03\x04'):
    npz.check_whole(path)
    return
  from safetensors import SafetensorError, safe_open

  try:
    with safe_open(path, 'np'):
      return
  except (SafetensorError, OSError, ValueError) as error:
    begins = 'it is empty' if not magic else f'it begins with {magic!r}'
    raise UserError(
      f'it is neither a whole .npz nor a whole safetensors file: {begins}, {error}'
    ) from None


def _file(path: Path) -> Raw:
  if not path.is_file():
    raise UserError(f'No such file or folder of weights: {path}.')
  try:
    with path.open('rb') as file:
      magic = file.read(8)
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}.') from None
  if magic.startswith(b'PK\x03\x04') and path.suffix not in _PICKLES:
    return Raw(path, *npz.read(path))
  if path.suffix == '.safetensors':
    arrays, config = _safetensors(path)
    return Raw(path, arrays, config or _config_beside(path.parent))
  if magic.startswith(b'PK\x03\x04') or path.suffix in _PICKLES:
    raise UserError(
      f'{path} is a pickle, which can run code when it is loaded: convert it to '
      'safetensors where it comes from. Files of .npz and .safetensors are read.'
    )
  empty = ' It is empty.' if not magic else ''
  raise UserError(
    f'{path} is neither an .npz nor a .safetensors file.{empty} Those two are read, and '
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
    for part in _parts(index[0]):
      more = _safetensors(folder / part)[0]
      if twice := arrays.keys() & more.keys():
        raise UserError(f'{folder}: {part} holds {min(twice)!r}, as another part does.')
      arrays |= more
  elif len(found) == 1:
    arrays, config = _safetensors(found[0])
  elif not found and len(numpy := sorted(folder.glob('*.npz'))) == 1:
    arrays, config = npz.read(numpy[0])
  else:
    raise UserError(
      f'{folder} holds no weights: expected model.safetensors and config.json, as in a '
      f'hub folder, or a run of vit_jax. Found {[p.name for p in found] or "neither"}.'
    )
  return Raw(folder, arrays, _config_beside(folder) or config)


def _parts(index: Path) -> list[str]:
  """Returns the names of the files that an index spreads the arrays over."""
  where = config_json.read(index).get('weight_map')
  if not (isinstance(where, dict) and all(isinstance(p, str) for p in where.values())):
    raise UserError(f'{index} has no weight_map of file names.')
  for part in where.values():
    if not re.fullmatch(r'[^/\\\0]{1,240}\.safetensors', part):
      raise UserError(f'{index} names {part[:80]!r}, not a file of its folder.')
  return sorted(set(where.values()))


def _config_beside(folder: Path) -> dict:
  """Returns config.json, and under 'preprocessor' transformers' other file."""
  path, other = folder / 'config.json', folder / 'preprocessor_config.json'
  config = config_json.read(path) if path.is_file() else {}
  if other.is_file():
    config['preprocessor'] = config_json.read(other)
  return config


def _safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict]:
  """Returns (arrays, config in the metadata); the library checks header and sizes."""
  from safetensors import SafetensorError, safe_open

  if not path.is_file():
    raise UserError(f'No such file of weights: {path}.')
  try:
    with safe_open(path, 'np') as file:
      arrays = {name: _tensor(path, file, name) for name in file.keys()}  # noqa: SIM118
      config = (file.metadata() or {}).get('config')
  except UserError:
    raise
  except (SafetensorError, struct.error, OSError, ValueError) as error:
    raise UserError(f'{path} is damaged or not a safetensors file: {error}.') from None
  where = f"{path}: 'config' in its metadata"
  return arrays, config_json.parse(config, where) if config else {}


def _tensor(path: Path, file, name: str) -> np.ndarray:
  kind = file.get_slice(name).get_dtype()
  if kind not in _DTYPES:
    raise UserError(
      f'{path}: array {name!r} has the type {kind}; expected one of {", ".join(_DTYPES)}.'
    )
  return file.get_tensor(name)
