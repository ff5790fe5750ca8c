"""Reads the arrays and the config of a file of weights: .npz, safetensors or a pickle.

PyTorch's files are pickles. `torch.load(weights_only=True)` reads them without running their
code, so torch must be installed. detectron2's .pkl files are pickles of NumPy arrays. An
unpickler that can make nothing else reads them.
"""

import argparse
import dataclasses
import functools
import json
import math
import pickle
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

# Suffixes of files of weights; a file with another suffix is recognised by its content.
PICKLES = ('.bin', '.pt', '.pth', '.pyth', '.pkl', '.pickle', '.ckpt', '.tar')
SUFFIXES = ('.npz', '.safetensors', *PICKLES)
# Keys under which training code saves the parameters beside other data. If there is a teacher
# with a student, or an encoder with a predictor, the published model is the teacher or the
# encoder.
_WRAPPERS = ('state_dict', 'model', 'model_state', 'teacher', 'module', 'encoder')
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
  if path.suffix not in PICKLES and not zipfile.is_zipfile(path):
    what = 'it is not a whole .npz, and as safetensors it'
    with _explain_damage(what), safe_open(path, 'np'):
      pass


def _read_file(path: Path) -> Raw:
  if not path.is_file():
    raise UserError(f'No such file or folder of weights: {path}.')
  if path.suffix in PICKLES:
    return Raw(_read_torch(path), _read_config(path.parent))
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


def _read_npz(path: Path) -> tuple[dict[str, np.ndarray], dict]:
  """Returns (arrays, config). The config is the zip's comment, or {} if there is none."""
  arrays, comment = files.read_npz(path, _TIMES)
  for name, x in arrays.items():  # NumPy stores bfloat16 as void: view it as bfloat16.
    arrays[name] = x.view(jnp.bfloat16) if x.dtype == np.dtype('V2') else x
  is_config = comment.startswith(b'{')  # Other programs may write other comments.
  return arrays, _parse_json(comment, f"{path}: the zip's comment") if is_config else {}


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
        load = functools.partial(_load_tensor, path, file, name)
        arrays[name] = _Stored(tuple(part.get_shape()), np.dtype(dtype), load)
      else:
        arrays[name] = file.get_tensor(name)
    config = (file.metadata() or {}).get('config')
  where = f"{path}: 'config' in its metadata"
  return arrays, _parse_json(config, where) if config else {}


def _load_tensor(path: Path, file, name: str) -> np.ndarray:
  with _explain_damage(path):
    return file.get_tensor(name)


class _OfNumPy(pickle.Unpickler):
  """An unpickler that makes arrays, numbers, texts and containers, and calls nothing else."""

  def find_class(self, module, name):
    # numpy.core is the name before NumPy 2.
    module = module.replace('numpy.core', 'numpy._core')
    if (module, name) in {
      ('numpy', 'ndarray'),
      ('numpy', 'dtype'),
      ('numpy._core.multiarray', '_reconstruct'),
      ('numpy._core.multiarray', 'scalar'),
      ('_codecs', 'encode'),  # makes bytes in pickles of Python 2
    }:
      return super().find_class(module, name)
    raise pickle.UnpicklingError(f'{module}.{name} is not part of NumPy')


def _read_pickle(path: Path) -> dict[str, np.ndarray] | None:
  """Returns {name: array} from a pickle of NumPy arrays; None for any other pickle."""
  try:
    with path.open('rb') as file:
      saved = _OfNumPy(file, encoding='latin1').load()
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}.') from None
  except Exception:  # A damaged file may raise any error. torch.load reports it.
    return None
  saved = _unwrap(saved)
  if not isinstance(saved, Mapping):
    return None
  arrays = {str(k): x for k, x in saved.items() if isinstance(x, np.ndarray)}
  return arrays or None


def _unwrap(saved):
  """Finds the mapping of names to arrays in an object that training code saved."""
  inside = lambda x: (x[k] for k in _WRAPPERS if isinstance(x.get(k), Mapping))
  while isinstance(saved, Mapping) and (inner := next(inside(saved), None)) is not None:
    saved = inner
  return saved


def _read_torch(path: Path) -> dict[str, np.ndarray]:
  """Returns the model's arrays in a pickle, without the optimizer's state and the like."""
  zipped = zipfile.is_zipfile(path)
  if not zipped and (arrays := _read_pickle(path)) is not None:
    return arrays
  try:
    import torch
  except ImportError:
    raise UserError(
      f'{path} is a pickle, which only PyTorch reads safely: pip install torch, or use '
      'safetensors.'
    ) from None
  if zipped:
    with _explain_damage(path), zipfile.ZipFile(path) as archive:
      names = archive.namelist()
    if any(name.endswith('/constants.pkl') for name in names):
      raise UserError(
        f'{path} is a TorchScript archive, which is a program. Save its arrays under the '
        f"same name in another folder: torch.save(torch.jit.load({path.name!r}, 'cpu')."
        f"state_dict(), 'FOLDER/{path.name}')."
      )
  try:
    # Allow Namespace, because training code stores its options as one.
    with torch.serialization.safe_globals([argparse.Namespace]):
      saved = torch.load(path, map_location='cpu', weights_only=True, mmap=zipped)
  except Exception as error:  # A pickle may raise any error.
    why = one_line(str(error).partition('\n')[0])
    raise UserError(
      f'{path}: torch.load refuses this pickle ({why}): use safetensors.'
    ) from None
  saved = _unwrap(saved)
  if not isinstance(saved, Mapping):
    raise UserError(
      f'{path} holds an object of type {type(saved).__name__}, expected arrays by name.'
    )
  tensors = {str(k): x for k, x in saved.items() if isinstance(x, torch.Tensor)}
  cut = len('module.') * all(name.startswith('module.') for name in tensors)
  return {name[cut:]: _convert_tensor(x, torch) for name, x in tensors.items()}


def _convert_tensor(x, torch) -> np.ndarray:
  x = x.detach().contiguous()
  if x.dtype == torch.bfloat16:
    return x.view(torch.int16).numpy().view(jnp.bfloat16)
  return x.numpy()


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
