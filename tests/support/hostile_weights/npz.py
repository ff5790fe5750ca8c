"""Archives of arrays, .npz: the zip, the header of each .npy, arrays that do not fit."""

import io
import struct
import zipfile
from collections.abc import Callable

import numpy as np

from tests.support.hostile_weights.files import NPZ, Make, of_bytes

_CENTRAL = b'PK\x01\x02'


def _changed(changes: Callable[[bytearray], None], name: str = 'a.npz') -> Make:
  def make(folder):
    data = bytearray(NPZ.read_bytes())
    changes(data)
    (folder / name).write_bytes(data)
    return folder / name

  return make


def _directory(at: int, form: str, value: int) -> Make:
  """Another value in the directory's entry of the first member, at an offset."""

  def change(data):
    struct.pack_into(form, data, data.index(_CENTRAL) + at, value)

  return _changed(change)


def zips():
  size = NPZ.stat().st_size
  for part in range(32):
    end = size * part // 32 + part
    yield f'zip: cut at {end}', of_bytes('a.npz', NPZ.read_bytes()[:end])
  for i in range(48):
    # Spread over data and directory, which is the last part.
    at = size * i // 32 if i < 32 else size - 1 - 97 * (i - 32)

    def flip(data, at=at, bit=i % 8):
      data[at] ^= 1 << bit

    yield f'zip: flipped bit {i % 8} of byte {at}', _changed(flip)
  fields = {
    'flags': (8, '<H', (1, 0x2000, 0xFFFF)),
    'method': (10, '<H', (8, 9, 12, 14, 93, 99)),
    'checksum': (16, '<I', (0, 0xFFFFFFFF)),
    'compressed size': (20, '<I', (0, 1, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF)),
    'size': (24, '<I', (0, 1, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF)),
    'name length': (28, '<H', (0, 1, 0xFFFF)),
    'extra length': (30, '<H', (1, 0xFFFF)),
    'comment length': (32, '<H', (1, 0xFFFF)),
    'disk': (34, '<H', (1, 0xFFFF)),
    'offset': (42, '<I', (1, 70, 0x7FFFFFFF, 0xFFFFFFFF)),
  }
  for field, (at, form, values) in fields.items():
    for value in values:
      yield f'zip: {field} {value:#x}', _directory(at, form, value)

  def members(*named):
    def make(folder):
      with zipfile.ZipFile(folder / 'a.npz', 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, data in named:
          archive.writestr(name, data)
      return folder / 'a.npz'

    return make

  one = _npy()
  yield 'zip: no member', members()
  yield 'zip: a member twice', members(('cls.npy', one), ('cls.npy', one))
  yield 'zip: one is a pickle', members(('cls.npy', one), ('data.pkl', b'\x80\x04.'))
  for name in ('../cls.npy', '/etc/cls.npy', '.npy', 'a\nb.npy', 'x' * 60_000 + '.npy'):
    yield f'zip: member {name[:20]!r}', members((name, one))
  yield (
    'zip: torch',
    members(('archive/data.pkl', b'\x80\x02'), ('archive/version', b'3')),
  )
  names = [f'Transformer/encoderblock_{i}/LayerNorm_0/scale.npy' for i in range(5000)]
  yield 'zip: 5,000 layers', members(*((name, one) for name in names))
  yield 'zip: layer 99999', members((names[0].replace('_0/', '_99999/', 1), one))
  many = 'conv_root/kernel.npy', _npy(np.zeros((3, 3, 3, 8), np.float32))
  yield (
    'zip: block 1000000000 of a ResNet',
    members(many, ('block1000000000/unit1/conv1/kernel.npy', one)),
  )
  zeros = np.zeros((1 << 21,), np.float32)
  bomb = [(f'Transformer/{i}.npy', _npy(zeros)) for i in range(40)]
  yield 'zip: 320 MB in 330 KB', members(*bomb)


def _npy(array=None) -> bytes:
  out = io.BytesIO()
  array = np.zeros((1, 1, 4), np.float32) if array is None else array
  np.lib.format.write_array(out, array, allow_pickle=True)
  return out.getvalue()


def headers():
  def header(text, version=(1, 0), length=None, data=64):
    text = text if isinstance(text, bytes) else text.encode('latin-1')
    size = struct.pack('<H' if version == (1, 0) else '<I', length or len(text))
    body = b'\x93NUMPY' + bytes(version) + size + text + bytes(data)

    def make(folder):
      with zipfile.ZipFile(folder / 'a.npz', 'w') as archive:
        archive.writestr('cls.npy', body)
      return folder / 'a.npz'

    return make

  entry = "{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}\n".format
  shapes = (
    *('(True, 4)', '(-4, -4)', '(-1,)', '(4.0, 4)', '("4", 4)', '[4, 4]', '16', 'None'),
    *('(16, None)', '((4, 4),)', '(1e3,)', '(10**6, 10**6)', '(99999999999999999999,)'),
    *(f'({"2, " * 60})', '(0, 16)', '(0,)', '()', f'(0, {2**62})', '(16,) * 9'),
    *('__import__("os")', 'x', '', f'{"(" * 9000}', f'{"[" * 9000}', '(4, 4'),
  )
  for i, shape in enumerate(shapes):
    yield f'npy: shape {i} {shape[:24]}', header(entry("'<f4'", 'False', shape))
  kinds = (
    *("'|O'", "'<U16'", "'|S64'", "'<M8[s]'", "'<m8[ns]'", "'<c8'", "'|V3'", "'|V0'"),
    *("'|S0'", "[('a', '<f4')]", "[('a', 'O')]", "'<f4,<f4'", "('<f4', (4,))", "'x'"),
    *('4', 'None', "''", "'<f99'", "'<f4' * 9", "[('a', '|u1'), ('b', '|u1')]", '[]'),
    *(f'{"[" * 5000}', "'>f4'", "'<f8'", "'|b1'"),
  )
  for i, kind in enumerate(kinds):
    yield f'npy: type {i} {kind[:24]}', header(entry(kind, 'False', '(16,)'))
  for order in ('1', 'None', "'no'", '[]', 'True'):
    yield f'npy: order {order}', header(entry("'<f4'", order, '(16,)'))
  plain = entry("'<f4'", 'False', '(16,)')
  for version in ((0, 0), (1, 1), (2, 0), (3, 0), (255, 255)):
    yield f'npy: version {version}', header(plain, version)
  for length in (1, 10, 9_999, 65_535):
    yield f'npy: header of {length} bytes', header(plain, length=length)
  yield 'npy: header of 4 GB', header(plain, (2, 0), 0xFFFFFFF0)
  texts = ('', '{}', '[]', 'None', '\0' * 50, plain * 2, plain[:-5], "{'shape': (16,)}")
  for i, text in enumerate((*texts, plain[:-3] + " 'more': 1}", b'\xff\xfe{\0}\0')):
    yield f'npy: header {i}', header(text)
  for data in (0, 1, 63, 65, 640):
    yield f'npy: {data} bytes for 64', header(plain, data=data)


def arrays():
  def changed(name, change):
    def make(folder):
      with np.load(NPZ) as file:
        arrays = dict(file)
      x = arrays.pop(name)
      if (y := change(x)) is not None:
        arrays[name] = y
      np.savez(folder / 'a.npz', **arrays)
      return folder / 'a.npz'

    return make

  block = 'Transformer/encoderblock_0/'
  names = ('cls', 'embedding/kernel', 'embedding/bias', 'head/kernel', 'head/bias')
  names += ('Transformer/posembed_input/pos_embedding', f'{block}LayerNorm_0/scale')
  attention = f'{block}MultiHeadDotProductAttention_1/'
  names += (f'{attention}query/kernel', f'{attention}out/kernel')
  names += (f'{block}MlpBlock_3/Dense_0/kernel', f'{block}MlpBlock_3/Dense_1/bias')
  changes = {
    'missing': lambda x: None,
    'transposed': lambda x: x.T[..., None],
    'flat': lambda x: x.reshape(-1),
    'of one axis more': lambda x: x[None],
    'a scalar': lambda x: np.float32(1),
    'empty': lambda x: x[:0],
    'cut': lambda x: x[..., : max(1, x.shape[-1] // 2)],
    'of integers': lambda x: np.zeros(x.shape, np.int8),
    'complex': lambda x: x.astype(np.complex64),
  }
  for name in names:
    for what, change in changes.items():
      yield (
        f'array: {name.rpartition("encoderblock_")[2]} {what}',
        changed(name, change),
      )
