"""Reads the arrays and the config of a file of weights: .npz, safetensors or a pickle.

PyTorch's files are pickles, and so are detectron2's, of NumPy arrays: see `pickles`.
"""

import dataclasses
import functools
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from vit_jax import files
from vit_jax.errors import UserError, one_line
from vit_jax.weights import pickles

# Suffixes of files of weights; a file with another suffix is recognised by its content.
PICKLES = ('.bin', '.pt', '.pth', '.pyth', '.pkl', '.pickle', '.ckpt', '.tar')
SUFFIXES = ('.npz', '.safetensors', *PICKLES)
# Keys under which training code saves the parameters beside other data. If there is a teacher
# with a student, or an encoder with a predictor, the published model is the teacher or the
# encoder.
_WRAPPERS = ('state_dict', 'model', 'model_state', 'teacher', 'module', 'encoder')
# Wrappers inside wrappers, at most.
_DEPTH = 8
# A file may decompress to at most this many times its size, because weights compress little.
_TIMES = 20


@dataclasses.dataclass(frozen=True)
class _Stored:
  """An array in a file, which is read each time it is converted to NumPy."""

  shape: tuple[int, ...]
  dtype: np.dtype
  load: Callable[[], np.ndarray]

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  def __len__(self) -> int:
    return self.shape[0]

  def __iter__(self) -> Iterator['_Stored']:
    """Yields the rows. Converting the first of them reads the array, once for all rows."""
    read_all = functools.cache(self.load)
    for i in range(len(self)):
      row = functools.partial(_take_row, read_all, i)
      yield _Stored(self.shape[1:], self.dtype, row)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    return np.asarray(self.load(), dtype)


def _take_row(read_all: Callable[[], np.ndarray], i: int) -> np.ndarray:
  return read_all()[i]


class Raw(NamedTuple):
  """The content of a file, under its own names."""

  arrays: dict[str, np.ndarray | _Stored]
  config: dict  # config.json beside the file, or the embedded config, or {}


def read(path: str | Path) -> Raw:
  """Reads a file of weights or a hub folder, or raises UserError.

  A folder holds safetensors and a config, or one .npz, or PyTorch's files. Safetensors and
  PyTorch's files may be split into parts.
  """
  path = Path(path)
  raw = _read_folder(path) if path.is_dir() else _read_file(path)
  for name, x in raw.arrays.items():
    if not x.size or (x.dtype.kind not in 'biufc' and x.dtype != jnp.bfloat16):
      what = f'has the type {x.dtype}, which is not numeric' if x.size else 'is empty'
      raise UserError(f'{path}: array {name!r} {what}.')
  return raw


def drop_nulls(value):
  """Removes keys whose value is null from a JSON value. Null stands for the default."""
  if not isinstance(value, dict):
    return value
  return {k: drop_nulls(v) for k, v in value.items() if v is not None}


def _explain_damage(what):
  return files.reading(what, SafetensorError)


def check_whole(path: Path) -> None:
  """Raises UserError for an .npz or safetensors file whose end is missing."""
  with _explain_damage('it is not a whole .npz, and as safetensors it'):
    if path.suffix not in PICKLES and not zipfile.is_zipfile(path):
      with safe_open(path, 'np'):
        pass


def _read_file(path: Path) -> Raw:
  if not path.is_file():
    raise UserError(f'No such file or folder of weights: {path}.')
  if path.suffix in PICKLES:
    return Raw(_read_pickle(path), _read_config(path.parent))
  with _explain_damage(path), path.open('rb') as file:
    magic = file.read(8)
  if magic.startswith(b'PK\x03\x04'):
    return Raw(*_read_npz(path))
  if path.suffix == '.safetensors':
    arrays, config = _read_safetensors(path)
    return Raw(arrays, config or _read_config(path.parent))
  begins = f'begins with {magic!r}' if magic else 'is empty'
  raise UserError(f'{path} is neither .npz nor .safetensors: it {begins}.')


def _read_folder(folder: Path) -> Raw:
  find = lambda pattern: sorted(folder.glob(pattern))
  parts, numpy, config = find('*.safetensors'), find('*.npz'), _read_config(folder)
  index = find('*.safetensors.index.json')
  if not (parts or index or numpy):
    parts = [file for file in find('*') if file.suffix in PICKLES]
    index = find('*.bin.index.json')
  for name in ('model.safetensors', 'pytorch_model.bin'):
    if folder / name in parts:
      parts, index = [folder / name], []
  if index:
    parts = [folder / part for part in _read_index(index[0])]
  if not (index or len(parts) == 1 or (not parts and len(numpy) == 1)):
    raise UserError(
      f'{folder} is not a run, and has no model.safetensors with a config.json.'
    )
  arrays, embedded = {}, {}
  for file in parts or numpy:
    more, embedded = _read_file(file)
    if twice := arrays.keys() & more.keys():
      raise UserError(f'{file} holds {min(twice)!r}, which another part holds too.')
    arrays |= more
  return Raw(arrays, config or embedded)


def _read_index(index: Path) -> list[str]:
  """Returns the names of the files in an index of parts."""
  where = read_json(index).get('weight_map')
  if not (isinstance(where, dict) and all(isinstance(p, str) for p in where.values())):
    raise UserError(f'{index} has no weight_map of file names.')
  for part in where.values():
    if not re.fullmatch(r'[^/\\\0]{1,240}\.(safetensors|bin)', part):
      raise UserError(f'{index} names {part[:80]!r}, not a file of its folder.')
  return sorted(set(where.values()))


def _read_npz(path: Path) -> tuple[dict[str, np.ndarray | _Stored], dict]:
  """Returns (arrays, config). The config is the zip's comment, or {} if there is none.

  Arrays of floats are read only when they are used.
  """
  members, comment = files.open_npz(path, _TIMES)
  arrays = {}
  for name, (shape, dtype, load) in members.items():
    if dtype == np.dtype('V2'):  # NumPy stores bfloat16 as void: view it as bfloat16.
      dtype, load = np.dtype(jnp.bfloat16), functools.partial(_view_as_bfloat16, load)
    arrays[name] = _defer(shape, dtype, load)
  is_config = comment.startswith(b'{')  # Other programs may write other comments.
  return arrays, _parse_json(comment, f"{path}: the zip's comment") if is_config else {}


def _defer(shape, dtype, load: Callable[[], np.ndarray]) -> np.ndarray | _Stored:
  """Returns an array. If it has floats, it is read only when it is used."""
  is_float = dtype.kind == 'f' or dtype == jnp.bfloat16
  return _Stored(shape, dtype, load) if is_float else load()


def _view_as_bfloat16(load: Callable[[], np.ndarray]) -> np.ndarray:
  return load().view(jnp.bfloat16)


# Arrays of these types in a safetensors file are read only when they are used.
_FLOATS = {
  'F64': np.float64,
  'F32': np.float32,
  'F16': np.float16,
  'BF16': jnp.bfloat16,
}


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray | _Stored], dict]:
  """Returns (arrays, config in the metadata). The library checks header and sizes."""
  arrays = {}
  with _explain_damage(path):
    # The file stays open, because the arrays are read later.
    file = safe_open(path, 'np').__enter__()
    for name in file.keys():  # noqa: SIM118
      part = file.get_slice(name)
      if dtype := _FLOATS.get(part.get_dtype()):
        load = functools.partial(_load, path, file.get_tensor, name)
        arrays[name] = _Stored(tuple(part.get_shape()), np.dtype(dtype), load)
      else:
        arrays[name] = file.get_tensor(name)
    config = (file.metadata() or {}).get('config')
  where = f"{path}: 'config' in its metadata"
  return arrays, _parse_json(config, where) if config else {}


def _load(path: Path, read: Callable[..., np.ndarray], *args) -> np.ndarray:
  with _explain_damage(path):
    return read(*args)


def _read_pickle(path: Path) -> dict[str, np.ndarray | _Stored]:
  """Returns the model's arrays in a pickle, without the optimizer's state and the like."""
  with files.reading(path, Exception):  # A damaged pickle may raise any error.
    if zipfile.is_zipfile(path):
      _check_archive(path)
    saved = _unwrap(pickles.read(path))
  arrays = {}
  if isinstance(saved, Mapping):
    arrays = {str(k): x for k, x in saved.items() if isinstance(x, pickles.Array)}
    for name, x in saved.items():
      # PyTorch's functions for sparse, nested and other tensors, none of which are called.
      if (kind := type(x).__name__).startswith('_rebuild'):
        raise UserError(f'{path}: array {name!r} is no dense tensor ({kind}).')
  if not arrays:
    raise UserError(
      f'{path} holds an object of type {type(saved).__name__}, expected arrays by name: '
      'save `model.state_dict()`.'
    )
  # A tensor may repeat a few numbers of the file.
  total = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays.values())
  files.check_expansion(path, total, _TIMES)
  cut = len('module.') * all(name.startswith('module.') for name in arrays)
  return {
    name[cut:]: _defer(x.shape, x.dtype, functools.partial(_load, path, x.load))
    for name, x in arrays.items()
  }


def _check_archive(path: Path) -> None:
  """Raises UserError for a zip file that is no checkpoint of PyTorch."""
  with zipfile.ZipFile(path) as archive:
    members = archive.infolist()
  files.check_expansion(path, sum(x.file_size for x in members), _TIMES)
  if any(x.filename.endswith('/constants.pkl') for x in members):
    raise UserError(
      f'{path} is a TorchScript archive, which is a program. Save its arrays under the '
      f"same name in another folder: torch.save(torch.jit.load({path.name!r}, 'cpu')."
      f"state_dict(), 'FOLDER/{path.name}')."
    )


def _unwrap(saved):
  """Finds the mapping of names to arrays in an object that training code saved."""
  inside = lambda x: (x[k] for k in _WRAPPERS if isinstance(x.get(k), Mapping))
  # An object may hold itself.
  for _ in range(_DEPTH):
    if isinstance(saved, Mapping):
      saved = next(inside(saved), saved)
  return saved


# JSON files beside the arrays -> the keys of the config that get their content.
_BESIDE = {
  'preprocessor_config.json': 'preprocessor',  # transformers
  'open_clip_config.json': 'open_clip',
}


def _read_config(folder: Path) -> dict:
  """Returns config.json, with other libraries' files under the keys in _BESIDE."""
  path = folder / 'config.json'
  config = read_json(path) if path.is_file() else {}
  others = {key: folder / name for name, key in _BESIDE.items()}
  return config | {k: read_json(file) for k, file in others.items() if file.is_file()}


def read_json(path: Path) -> dict:
  """Returns the JSON object in a file; raises UserError for other content."""
  with _explain_damage(path):
    return _parse_json(path.read_bytes(), str(path))


def _parse_json(text: str | bytes, where: str) -> dict:
  try:
    value = json.loads(text)
  except (RecursionError, ValueError) as error:
    raise UserError(f'{where} is not JSON: {one_line(error)}.') from None
  if not isinstance(value, dict):
    raise UserError(f'{where} is not a JSON object.')
  return value
