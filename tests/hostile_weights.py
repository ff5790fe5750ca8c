"""Files of weights that are damaged, lie, or were made to do harm: hundreds, always the same.

`cases(folder)` makes them one by one, `outcome(path)` loads one. They start from two tiny
published files and change them systematically: what a zip, an .npy header, a safetensors
header, a hub folder's config.json or its index says, and what the file is at all.
"""

import io
import json
import os
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from conftest import GOLDEN

from vit_jax import pretrained
from vit_jax.errors import RunError

NPZ = GOLDEN / 'vit_google_token.npz'
TIMM, HF = GOLDEN / 'vit_timm', GOLDEN / 'vit_hf'

Make = Callable[[Path], Path]  # writes into an empty folder, returns what to load


def outcome(path: Path) -> tuple[str, str]:
  """Loads what was made: ('refused', message), ('loaded', '') or ('crashed', why).

  A refusal is one line of one of our own errors; anything else raised is a crash.
  """
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # numpy and Python on what they parse
      pretrained.load(str(path))
  except RunError as error:
    text = str(error)
    return (
      ('crashed', f'{text!r} is not one line') if '\n' in text else ('refused', text)
    )
  except BaseException as error:
    if isinstance(error, KeyboardInterrupt):
      raise
    return 'crashed', f'{type(error).__name__}: {error}'
  return 'loaded', ''


def cases(folder: Path, every: int = 1) -> Iterator[tuple[str, Path]]:
  """Yields (name, path) of each `every`-th case; a file is gone once the next is asked for."""
  for number, (name, make) in enumerate(recipes().items()):
    if number % every:
      continue
    place = Path(folder) / f'{number:04d}'
    place.mkdir(parents=True)
    with warnings.catch_warnings(action='ignore'):  # of the zip library: a name twice
      path = make(place)
    yield name, path
    shutil.rmtree(place)


def recipes() -> dict[str, Make]:
  """Returns {name: how it is made}; names begin with what they are about."""
  groups = (_kinds(), _zips(), _headers(), _arrays(), _comments(), _safetensors())
  groups += (_tensor_headers(), _configs(), _indices())
  found = {}
  for group in groups:
    for name, make in group:
      assert name not in found, name
      found[name] = make
  return found


def _bytes(name: str, data: bytes) -> Make:
  def make(folder):
    (folder / name).write_bytes(data)
    return folder / name

  return make


# -- what a file is ---------------------------------------------------------------------


def _kinds():
  texts = {
    'empty': b'',
    'one byte': b'P',
    'html': b'<!DOCTYPE html><html><body>404 Not Found</body></html>',
    'json': b'{"error": "not found"}',
    'gzip': b'\x1f\x8b\x08\0' + bytes(50),
    'pickle': b'\x80\x04\x95' + bytes(20),
    'png': b'\x89PNG\r\n\x1a\n' + bytes(100),
    'git-lfs': b'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n',
    'utf-16': 'weights'.encode('utf-16'),
    'zeros': bytes(4096),
    'ones': b'\xff' * 4096,
    'zip end alone': b'PK\x05\x06' + bytes(18),
    'zip magic alone': b'PK\x03\x04',
    'npy': b'\x93NUMPY\x01\0v\0' + bytes(200),
  }
  for name, data in texts.items():
    for suffix in ('.npz', '.safetensors', '.pth', ''):
      yield f'kind: {name} as {suffix or "no suffix"}', _bytes(f'a{suffix}', data)

  def special(make):
    def made(folder):
      make(folder / 'a.npz')
      return folder / 'a.npz'

    return made

  def sparse(path):
    with path.open('wb') as file:
      file.truncate(20 << 30)

  yield 'kind: fifo', special(os.mkfifo)
  yield 'kind: link to itself', special(lambda p: p.symlink_to(p))
  yield 'kind: dangling link', special(lambda p: p.symlink_to('nothing'))
  yield 'kind: endless device', special(lambda p: p.symlink_to('/dev/zero'))
  yield 'kind: 20 GB of holes', special(sparse)
  yield 'kind: empty folder', special(lambda p: p.mkdir())
  yield 'kind: name too long', lambda folder: folder / ('a' * 300)
  yield 'kind: NUL in the name', lambda folder: Path(f'{folder}/a\0b.npz')
  yield 'kind: line break in the name', lambda folder: folder / 'a\nb.npz'
  for name in ('model.safetensors', 'config.json'):

    def folder_with(folder, name=name):
      (folder / name).mkdir()
      return folder

    yield f'kind: hub folder with a folder {name}', folder_with


# -- zips -------------------------------------------------------------------------------

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


def _zips():
  size = NPZ.stat().st_size
  for part in range(32):
    end = size * part // 32 + part
    yield f'zip: cut at {end}', _bytes('a.npz', NPZ.read_bytes()[:end])
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


# -- headers of .npy --------------------------------------------------------------------


def _headers():
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


# -- arrays that do not fit -------------------------------------------------------------


def _arrays():
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


# -- configs ----------------------------------------------------------------------------

_VALUES = {
  **{'null': None, 'true': True, 'zero': 0, 'negative': -7, 'seven': 7, 'huge': 10**30},
  **{'NaN': float('nan'), 'infinite': float('inf'), 'tiny': 1e-300, 'half': 0.5},
  **{
    'empty text': '',
    'text': 'no such',
    'list': [],
    'object': {},
    'lists': [[1], [2]],
  },
  **{'negatives': [-1, -1, -1], 'zeros': [0, 0, 0], 'sides': [100_000, 100_000]},
  **{
    'texts': ['a', 'b', 'c'],
    'odd object': {'height': -1, 'x': []},
    'long': 'x' * 99_999,
  },
}


def _set(config: dict, path: str, value) -> dict:
  config = json.loads(json.dumps(config))
  *parents, last = path.split('.')
  inside = config
  for key in parents:
    inside = inside.setdefault(key, {})
  inside[last] = value
  return config


def _comments():
  def comment(text):
    data = text if isinstance(text, bytes) else json.dumps(text).encode()

    def make(folder):
      shutil.copy(NPZ, folder / 'a.npz')
      with zipfile.ZipFile(folder / 'a.npz', 'a') as archive:
        archive.comment = data
      return folder / 'a.npz'

    return make

  deep = b'{"a":' * 12_000
  texts = {
    'cut': b'{"vit_jax": {',
    'deep': deep,
    'bytes': b'{\xff}',
    'number': b'{"a": 1e}',
  }
  for name, data in texts.items():
    yield f'comment: {name}', comment(data)
  for key in ('fields', 'class_names', 'image_size', 'pp'):
    for name, value in _VALUES.items():
      yield f'comment: {key} is {name}', comment({'vit_jax': {key: value}})
  fields = (
    *(
      ('depth', 10**9),
      ('depth', 1e9),
      ('width', 64),
      ('num_heads', 5),
      ('act', 'relu'),
    ),
    *(
      ('norm_eps', float('nan')),
      ('no_field', True),
      ('dtype', 'float8'),
      ('scan', 'x'),
    ),
    *(
      ('classifier', 'no'),
      ('patch_size', [0, 0]),
      ('num_classes', -1),
      ('remat', 'x'),
    ),
  )
  for field, value in fields:
    yield (
      f'comment: field {field} {value}',
      comment({'vit_jax': {'fields': {field: value}}}),
    )


def _hub_folder(origin: Path, files: dict[str, bytes]) -> Make:
  def make(folder):
    for path in origin.iterdir():
      if path.name not in files:
        (folder / path.name).symlink_to(path)
    for name, data in files.items():
      (folder / name).write_bytes(data)
    return folder

  return make


def _configs():
  timm = ('architecture', 'label_names', 'model_args', 'model_args.num_heads')
  timm += ('model_args.act_layer', 'model_args.class_token', 'pretrained_cfg')
  timm += (
    'pretrained_cfg.input_size',
    'pretrained_cfg.crop_pct',
    'pretrained_cfg.mean',
  )
  timm += ('pretrained_cfg.std', 'vit_jax')
  hf = ('model_type', 'hidden_act', 'layer_norm_eps', 'num_attention_heads', 'id2label')
  hf += ('image_size',)
  for origin, keys in ((TIMM, timm), (HF, hf)):
    config = json.loads((origin / 'config.json').read_text())
    for key in keys:
      for name, value in _VALUES.items():
        data = json.dumps(_set(config, key, value)).encode()
        yield f'config: {key} is {name}', _hub_folder(origin, {'config.json': data})
  plain = {'size': {'height': 32, 'width': 32}, 'do_center_crop': True, 'crop_size': 32}
  for key in ('size', 'crop_size', 'resample', 'image_mean', 'image_std', 'do_resize'):
    for name, value in _VALUES.items():
      data = json.dumps(plain | {key: value}).encode()
      make = _hub_folder(HF, {'preprocessor_config.json': data})
      yield f'config: preprocessor {key} is {name}', make
  whole = (HF / 'config.json').read_bytes()
  texts = {
    'empty': b'',
    'cut': whole[:-10],
    'utf-16': whole.decode().encode('utf-16'),
    'with a BOM': b'\xef\xbb\xbf' + whole,
    'no UTF-8': whole.replace(b'gelu', b'\xff\xfe'),
    'a list': b'[]',
    'a number': b'1',
    'deep lists': b'[' * 100_000,
    'deep objects': b'{"a":' * 100_000,
    'a number of 10,000 digits': b'{"image_size": ' + b'9' * 10_000 + b'}',
    'NULs': bytes(1000),
    'keys twice': b'{"image_size": 32, "image_size": "x"}',
    'lone surrogates': b'{"hidden_act": "\\ud800"}',
    'labels beyond': b'{"id2label": {"0": "a", "9999999999": "b"}}',
    'labels twice': b'{"id2label": {"0": "a", "00": "b"}}',
  }
  for origin in (TIMM, HF):
    for name, data in texts.items():
      make = _hub_folder(origin, {'config.json': data})
      yield f'config: of {origin.name}, {name}', make


# -- safetensors ------------------------------------------------------------------------


def _parts() -> tuple[dict, bytes]:
  data = (TIMM / 'model.safetensors').read_bytes()
  (length,) = struct.unpack('<Q', data[:8])
  return json.loads(data[8 : 8 + length]), data[8 + length :]


def _with_header(header, data: bytes, length: int | None = None) -> bytes:
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return struct.pack('<Q', len(text) if length is None else length) + text + data


def _safetensors():
  whole = (TIMM / 'model.safetensors').read_bytes()
  for part in range(24):
    end = len(whole) * part // 24 + 3 * part
    yield f'safetensors: cut at {end}', _bytes('a.safetensors', whole[:end])
  yield 'safetensors: bytes left over', _bytes('a.safetensors', whole + bytes(8))
  for length in (0, 1, 7, 100, 10**6, 2**31, 2**32, 2**62, 2**63, 2**64 - 1):
    data = struct.pack('<Q', length) + whole[8:]
    yield f'safetensors: header of {length} bytes', _bytes('a.safetensors', data)
  for i in range(24):
    flipped = bytearray(whole)
    flipped[i * 211] ^= 1 << i % 8  # the header: nothing guards the arrays
    yield (
      f'safetensors: flipped byte {i * 211}',
      _bytes('a.safetensors', bytes(flipped)),
    )


def _tensor_headers():
  header, data = _parts()
  name = next(key for key in header if key != '__metadata__')
  entry = header[name]
  start, end = entry['data_offsets']
  values = {
    'dtype': ['F8_E4M3', 'F8_E5M2', 'F4', 'X', 'f32', '', 5, None, [], 'I64', 'C64'],
    'shape': [
      *(
        [-1, 4],
        [1.5],
        ['4'],
        [2**63],
        [10**6, 10**6],
        [[4]],
        [True],
        [None],
        'x',
        None,
      ),
      *({}, [], [0], [0, 2**62], [1] * 40),
    ],
    'data_offsets': [
      *([end, start], [start, end + 4], [-4, end], [0, 2**63], [start], [], 'x', None),
      *([start, start], [len(data), len(data) + 4], [0.5, 4], [4, end]),
    ],
  }
  for key, options in values.items():
    for i, value in enumerate(options):
      changed = {**header, name: {**entry, key: value}}
      whole = _with_header(changed, data)
      yield f'tensor: {key} {i} {str(value)[:24]}', _bytes('a.safetensors', whole)
  for key in entry:
    lacking = {k: v for k, v in entry.items() if k != key}
    whole = _with_header({**header, name: lacking}, data)
    yield f'tensor: no {key}', _bytes('a.safetensors', whole)
  text = json.dumps(header)
  texts = {
    'no JSON': b'x' * 100,
    'a list': b'[]',
    'empty object': b'{}',
    'deep': b'{"a":' * 50_000,
    'utf-16': text.encode('utf-16'),
    'no UTF-8': text.encode().replace(b'blocks', b'\xff\xfe\xfd\xfc\xfb\xfa'),
    'a name twice': text.replace('{', f'{{"{name}": {json.dumps(entry)}, ', 1).encode(),
    'NULs after it': text.encode() + bytes(64),
  }
  for what, value in texts.items():
    yield f'tensor: header {what}', _bytes('a.safetensors', _with_header(value, data))
  for i, config in enumerate(
    ('[' * 9000, '[]', '1', '{', '{"model_args": []}', '\ud800')
  ):
    meta = {**header, '__metadata__': {'config': config}}
    whole = _with_header(json.dumps(meta).encode(), data)
    yield f'tensor: metadata {i}', _bytes('a.safetensors', whole)


def _indices():
  part = 'model-00001-of-00001.safetensors'
  weights = (TIMM / 'model.safetensors').read_bytes()
  maps = {
    'a list': [],
    'a text': 'x',
    'null': None,
    'a number': 1,
    'numbers': {'a': 1},
    'lists': {'a': ['x']},
    'mixed': {'a': part, 'b': None},
    'empty': {},
    'missing parts': {'a': 'model-00009-of-00009.safetensors'},
    'a part above': {'a': '../model.safetensors'},
    'an absolute part': {'a': '/etc/passwd'},
    'a pickle': {'a': 'pytorch_model.bin'},
    'a folder': {'a': '.'},
    'an empty name': {'a': ''},
    'NUL in a name': {'a': 'a\0b.safetensors'},
    'a long name': {'a': 'x' * 5000 + '.safetensors'},
    'arrays twice': {'a': part, 'b': 'again.safetensors'},
  }
  for name, value in maps.items():

    def make(folder, value=value):
      (folder / part).write_bytes(weights)
      (folder / 'again.safetensors').write_bytes(weights)
      text = json.dumps({'weight_map': value})
      (folder / 'model.safetensors.index.json').write_text(text)
      return folder

    yield f'index: {name}', make
  for name, data in {
    'a list': b'[]',
    'cut': b'{"weight',
    'deep': b'[' * 99_999,
  }.items():

    def broken(folder, data=data):
      (folder / 'model.safetensors.index.json').write_bytes(data)
      return folder

    yield f'index: is {name}', broken
