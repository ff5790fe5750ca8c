"""Reads arrays from pickles of NumPy and PyTorch, without their code and without PyTorch.

A pickle names functions to call. This unpickler knows the few that make arrays and
containers. An object of any other class, such as the options of a training, stays empty.

PyTorch has two formats. A zip has the pickle `data.pkl`, and each storage as a member. The
older format is a row of pickles, with all storages behind the last. A tensor is a view of a
storage, maybe a strided one, and several tensors may share a storage.
"""

import functools
import io
import math
import operator
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

# The first object of PyTorch's older format.
_MAGIC = 0x1950A86A20F9469CFC6C
# The most integers of more than 61 bits in a pickle, such as states of random generators.
_MOST_LARGE = 1000
# PyTorch's name of a storage -> type of its numbers.
_STORAGES = {
  'Double': 'float64',
  'Float': 'float32',
  'Half': 'float16',
  'BFloat16': 'bfloat16',
  'Long': 'int64',
  'Int': 'int32',
  'Short': 'int16',
  'Char': 'int8',
  'Byte': 'uint8',
  'Bool': 'bool',
  'ComplexFloat': 'complex64',
  'ComplexDouble': 'complex128',
  'Untyped': 'uint8',
}
# Types of tensors that have no storage of their own type.
_UNTYPED = ('uint16', 'uint32', 'uint64')


class _Inert:
  """An object that a pickle may fill with a state, which is ignored."""

  def __setstate__(self, state):
    pass


class _Unknown(_Inert):
  """An object of a class that is not read. It takes all arguments and keeps none."""

  def __init__(self, *args, **options):
    pass

  def __call__(self, *args):
    return self

  def __setitem__(self, key, value):
    pass

  def append(self, value):
    pass

  def extend(self, values):
    pass


class _Dict(_Inert, dict):
  """An OrderedDict, without the attributes that PyTorch gives it."""


class _Maker(_Inert):
  """A function that a pickle may call. It cannot change an attribute of the function."""

  def __init__(self, function: Callable):
    self._function = function

  def __call__(self, *args):
    return self._function(*args)


class _Storage(_Inert):
  """The numbers of tensors; `read` returns their bytes."""

  read: Callable[[], bytes | np.ndarray]

  def __init__(self, dtype: str, number: int):
    self.dtype = _check_type(dtype)
    self.number = operator.index(number)
    self.size = self.number * self.dtype.itemsize


def _check_type(name) -> np.dtype:
  if name not in (*_STORAGES.values(), *_UNTYPED):
    shown = getattr(name, '__name__', name)
    raise ValueError(f'an unknown type of numbers, {shown!r}')
  return np.dtype(name)


class Array(_Inert):
  """An array in a pickle; `load` returns it."""

  shape: tuple[int, ...] = ()
  dtype = np.dtype('float32')

  def load(self) -> np.ndarray:
    raise ValueError('the pickle holds no numbers for this array')


class _Tensor(Array):
  """A tensor of PyTorch, whose numbers are read when it is loaded."""

  def __init__(
    self, storage: _Storage, offset, shape, strides, dtype: np.dtype, signs: dict | None
  ):
    if signs:
      raise ValueError('a tensor is a conjugate or negative view: save a `clone()`')
    index = operator.index
    self.shape, self.dtype = tuple(map(index, shape)), dtype
    self._storage, self._offset = storage, index(offset)
    self._strides = tuple(map(index, strides))
    ends = [(n - 1) * s for n, s in zip(self.shape, self._strides, strict=True)]
    last = (self._offset + sum(ends) + 1) * dtype.itemsize
    if min(0, self._offset, *self.shape, *self._strides) < 0 or storage.size < 0:
      raise ValueError('a tensor has negative sizes')
    if math.prod(self.shape) and last > storage.size:
      raise ValueError('a tensor exceeds its storage')

  def load(self) -> np.ndarray:
    step = self.dtype.itemsize
    strides = [s * step for s in self._strides]
    start = self._offset * step
    data = self._storage.read()
    view = np.ndarray(self.shape, self.dtype, data, start, strides)
    return np.ascontiguousarray(view).reshape(self.shape)


class _NumPyArray(Array):
  """An array of NumPy, whose own code for pickles would trust the file."""

  def __init__(self, data, dtype, shape, order, axes=None):
    value = np.frombuffer(data, dtype.value)
    value = value.reshape(shape, order='F' if order == 'F' else 'C')
    value = value if axes is None else value.transpose(axes)
    self.shape, self.dtype, self.load = value.shape, value.dtype, lambda: value

  def __setstate__(self, state):
    _, shape, dtype, is_fortran, data = state
    data = data.encode('latin1') if isinstance(data, str) else data
    self.__init__(data, dtype, shape, 'F' if is_fortran else 'C')


class _NumPyType(_Inert):
  """The type of an array of NumPy."""

  def __init__(self, name, *_):
    self.value = np.dtype(name)

  def __setstate__(self, state):
    self.value = self.value.newbyteorder(state[1])


def _make_tensor(storage, offset, shape, strides, grad=None, hooks=None, signs=None):
  return _Tensor(storage, offset, shape, strides, storage.dtype, signs)


def _make_untyped(storage, offset, shape, strides, grad, hooks, dtype, signs=None):
  return _Tensor(storage, offset, shape, strides, _check_type(dtype), signs)


def _make_subclass(make: _Maker, kind, args, state):
  return make(*args)


def _take_first(x, *_):
  return x


_FUNCTIONS = {
  ('collections', 'OrderedDict'): _Dict,
  ('torch', 'Size'): tuple,
  ('torch._utils', '_rebuild_tensor'): _make_tensor,
  ('torch._utils', '_rebuild_tensor_v2'): _make_tensor,
  ('torch._utils', '_rebuild_tensor_v3'): _make_untyped,
  ('torch._utils', '_rebuild_parameter'): _take_first,
  ('torch._utils', '_rebuild_parameter_with_state'): _take_first,
  ('torch._tensor', '_rebuild_from_type_v2'): _make_subclass,
  ('numpy', 'dtype'): _NumPyType,
  ('numpy._core.multiarray', '_reconstruct'): lambda *_: object.__new__(_NumPyArray),
  ('numpy._core.numeric', '_frombuffer'): _NumPyArray,
  # Pickles of protocol 2 and below hold bytes as text, and no bytes as a call of `bytes`.
  ('__builtin__', 'bytes'): lambda: b'',
  ('_codecs', 'encode'): lambda text, _: text.encode('latin1'),
}
_NAMES = {('torch', f'{name}Storage'): dtype for name, dtype in _STORAGES.items()}
_NAMES |= {('torch', dtype): dtype for dtype in _UNTYPED}


class _Unpickler(pickle.Unpickler):
  """Makes arrays, numbers, texts and containers, and calls nothing else.

  Args:
    storages: those of the tensors, by name; the unpickler adds them.
  """

  def __init__(self, file: IO[bytes], storages: dict[str, _Storage]):
    super().__init__(file, encoding='latin1')
    self._storages = storages

  def find_class(self, module, name):
    # The names before NumPy 2, and since PyTorch 2.
    module = module.replace('numpy.core', 'numpy._core')
    module = 'torch' if module == 'torch.storage' else module
    if (module, name) in _NAMES:
      return _NAMES[module, name]
    if (module, name) in _FUNCTIONS:
      return _Maker(_FUNCTIONS[module, name])
    # A class of its own, because the pickle may change its attributes.
    return type(name, (_Unknown,), {})

  def persistent_load(self, pid):
    kind, dtype, key, _, number, *view = pid
    if kind != 'storage' or any(x is not None for x in view):
      raise pickle.UnpicklingError(f'an unknown kind of storage, {kind!r}')
    return self._storages.setdefault(str(key), _Storage(dtype, number))


def read(path: Path) -> object:
  """Returns the object in a file, in which each array is an `Array`.

  Raises:
    Exception: of any type, for a damaged or malicious file.
  """
  if zipfile.is_zipfile(path):
    return _read_zip(zipfile.ZipFile(path))
  storages = {}
  with path.open('rb') as file:
    saved = _unpickle(file, storages)
    if saved != _MAGIC:
      return saved
    _unpickle(file, {})  # the format's number
    if not _unpickle(file, {}).get('little_endian', True):
      raise ValueError('its numbers are big-endian')
    saved = _unpickle(file, storages)
    for key in _unpickle(file, {}):
      storage = storages[key]
      number = int.from_bytes(file.read(8), 'little')
      if number != storage.number:
        raise ValueError(f'storage {key!r} has {number} numbers, not {storage.number}')
      storage.read = functools.partial(
        np.fromfile, path, np.uint8, storage.size, offset=file.tell()
      )
      file.seek(storage.size, os.SEEK_CUR)
    if file.tell() > path.stat().st_size:
      raise EOFError('the last storages are missing')
  return saved


def _read_zip(archive: zipfile.ZipFile) -> object:
  (name,) = (name for name in archive.namelist() if name.endswith('/data.pkl'))
  root = name.removesuffix('data.pkl')
  order = f'{root}byteorder'
  if order in archive.namelist() and archive.read(order) != b'little':
    raise ValueError('its numbers are big-endian')
  storages = {}
  saved = _unpickle(io.BytesIO(archive.read(name)), storages)
  # Tensors that share a storage come one after another.
  read_last = functools.lru_cache(maxsize=1)(archive.read)
  for key, storage in storages.items():
    member = archive.getinfo(f'{root}data/{key}')
    if member.file_size < storage.size:
      raise ValueError(f'storage {key!r} has {member.file_size} bytes')
    storage.read = functools.partial(read_last, member)
  return saved


def _unpickle(file: IO[bytes], storages: dict[str, _Storage]) -> object:
  """Returns the next object of a file."""
  start, large = file.tell(), 0
  for opcode, value, _ in pickletools.genops(file):
    # Python would allocate a table up to the largest index that the file names.
    if opcode.name in ('PUT', 'BINPUT', 'LONG_BINPUT') and value > file.tell():
      raise pickle.UnpicklingError(f'{value} is no index of an object')
    # Many such numbers may have the same hash, and would be keys of a slow dict.
    large += isinstance(value, int) and abs(value) >= 1 << 61
    if large > _MOST_LARGE:
      raise pickle.UnpicklingError('too many integers of more than 61 bits')
  file.seek(start)
  return _Unpickler(file, storages).load()
