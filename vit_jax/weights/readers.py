"""Files of weights to flat numpy arrays: .npz and safetensors, never a pickle."""

import json
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from vit_jax import files
from vit_jax.errors import UserError, one_line

# Suffixes of files of weights; a file of another name is recognised by its content.
SUFFIXES = ('.npz', '.safetensors')
_PICKLES = ('.bin', '.pt', '.pth', '.pkl', '.pickle', '.ckpt', '.tar')
_INDEX = '.safetensors.index.json'
# Weights hardly compress: a file decompresses to so many times its size, at most.
_TIMES = 20


class Raw(NamedTuple):
  """The content of a file, under its own names."""

  arrays: dict[str, np.ndarray]
  config: dict  # config.json beside it, or the embedded config; {} for none


def read(path: str | Path) -> Raw:
  """Reads an .npz file, a .safetensors file, or a folder as on a hub, or raises UserError.

  A folder holds safetensors, whole or in parts with an index, and a config; or one .npz.
  """
  path = Path(path)
  raw = _folder(path) if path.is_dir() else _file(path)
  for name, x in raw.arrays.items():
    if not x.size or (x.dtype.kind not in 'biufc' and x.dtype != jnp.bfloat16):
      what = f'has the type {x.dtype}, which is not numeric' if x.size else 'is empty'
      raise UserError(f'{path}: array {name!r} {what}.')
  return raw


def _reading(what):
  return files.reading(what, SafetensorError)


def check_whole(path: Path) -> None:
  """Raises UserError for a file without the end of a zip or of a safetensors file."""
  if not zipfile.is_zipfile(path):
    what = 'it is not a whole .npz, and as safetensors it'
    with _reading(what), safe_open(path, 'np'):
      pass


def _file(path: Path) -> Raw:
  if path.suffix in _PICKLES:
    raise UserError(f'{path} is a pickle, which can run code: use safetensors.')
  if not path.is_file():
    raise UserError(f'No such file or folder of weights: {path}.')
  with _reading(path), path.open('rb') as file:
    magic = file.read(8)
  if magic.startswith(b'PK\x03\x04'):
    return Raw(*_npz(path))
  if path.suffix == '.safetensors':
    arrays, config = _safetensors(path)
    return Raw(arrays, config or _config_beside(path.parent))
  begins = f'begins with {magic!r}' if magic else 'is empty'
  raise UserError(f'{path} is neither .npz nor .safetensors: it {begins}.')


def _folder(folder: Path) -> Raw:
  parts = sorted(folder.glob('*.safetensors'))
  index = sorted(folder.glob(f'*{_INDEX}'))
  numpy = sorted(folder.glob('*.npz'))
  config = _config_beside(folder)
  if (model := folder / 'model.safetensors') in parts:
    parts = [model]
  elif index:
    parts = [folder / part for part in _parts(index[0])]
  if index or len(parts) == 1:
    arrays, embedded = {}, {}
    for file in parts:
      more, embedded = _safetensors(file)
      if twice := arrays.keys() & more.keys():
        raise UserError(f'{file} holds {min(twice)!r}, as another part does.')
      arrays |= more
  elif not parts and len(numpy) == 1:
    arrays, embedded = _npz(numpy[0])
  else:
    raise UserError(f'{folder} is no run and lacks model.safetensors and config.json.')
  return Raw(arrays, config or embedded)


def _parts(index: Path) -> list[str]:
  """Returns the names of the files that an index spreads the arrays over."""
  where = read_json(index).get('weight_map')
  if not (isinstance(where, dict) and all(isinstance(p, str) for p in where.values())):
    raise UserError(f'{index} has no weight_map of file names.')
  for part in where.values():
    if not re.fullmatch(r'[^/\\\0]{1,240}\.safetensors', part):
      raise UserError(f'{index} names {part[:80]!r}, not a file of its folder.')
  return sorted(set(where.values()))


def _npz(path: Path) -> tuple[dict[str, np.ndarray], dict]:
  """Returns (arrays, the config in the zip's comment, {} if it has none)."""
  arrays, comment = files.read_npz(path, _TIMES)
  for name, x in arrays.items():  # numpy writes bfloat16 as void
    arrays[name] = x.view(jnp.bfloat16) if x.dtype == np.dtype('V2') else x
  is_config = comment.startswith(b'{')  # another program's comment is none
  return arrays, _parse(comment, f"{path}: the zip's comment") if is_config else {}


def _safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict]:
  """Returns (arrays, config in the metadata); the library checks header and sizes."""
  if not path.is_file():
    raise UserError(f'No such file of weights: {path}.')
  with _reading(path), safe_open(path, 'np') as file:
    arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = (file.metadata() or {}).get('config')
  return arrays, _parse(config, f"{path}: 'config' in its metadata") if config else {}


def _config_beside(folder: Path) -> dict:
  """Returns config.json, and under 'preprocessor' transformers' other file."""
  path, other = folder / 'config.json', folder / 'preprocessor_config.json'
  config = read_json(path) if path.is_file() else {}
  if other.is_file():
    config['preprocessor'] = read_json(other)
  return config


def read_json(path: Path) -> dict:
  """Returns the JSON object in a file; UserError if it is not one."""
  with _reading(path):
    return _parse(path.read_bytes(), str(path))


def _parse(text: str | bytes, where: str) -> dict:
  try:
    value = json.loads(text)
  except (RecursionError, ValueError) as error:
    raise UserError(f'{where} is not JSON: {one_line(error)}.') from None
  if not isinstance(value, dict):
    raise UserError(f'{where} is not a JSON object.')
  return value
