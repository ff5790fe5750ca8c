"""Damaged, lying and malicious files of weights, the same at every run.

`cases(folder)` writes them one by one. They change tiny systematically: the archive, its headers, the arrays, the JSON beside them.
"""

import io
import json
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.support import GOLDEN

NPZ, TIMM, HF = GOLDEN / 'vit_google_token.npz', GOLDEN / 'vit_timm', GOLDEN / 'vit_hf'
OPEN_CLIP = GOLDEN / 'clip_open_clip'

Make = Callable[[Path], Path]  # writes into an empty folder, returns what to load


def cases(folder: Path, every: int = 1) -> Iterator[tuple[str, Path]]:
  """Yields (name, path) of every `every`-th case, deleted before the next."""
  for number, (name, make) in enumerate(recipes().items()):
    if number % every:
      continue
    place = Path(folder) / f'{number:04d}'
    place.mkdir(parents=True)
    with warnings.catch_warnings(action='ignore'):  # zipfile's, of duplicate names
      path = make(place)
    yield name, path
    shutil.rmtree(place)


def recipes() -> dict[str, Make]:
  """Returns {name: how it is made}."""
  return {
    name: make
    for group in (kinds, zips, pickles, npy_headers, arrays, safetensors, configs)
    for name, make in group()
  }


def of_bytes(name: str, data: bytes) -> Make:
  """Returns the recipe of a file with this name and content."""

  def make(folder):
    (folder / name).write_bytes(data)
    return folder / name

  return make


def kinds():
  """Files, devices and folders that hold no weights."""
  for name, data in {
    'empty': b'',
    'html': b'<!DOCTYPE html><html><body>404 Not Found</body></html>',
    'pickle': b'\x80\x04\x95' + bytes(20),
    'zeros': bytes(4096),
    'zip end alone': b'PK\x05\x06' + bytes(18),
    'zip magic alone': b'PK\x03\x04',
    'npy': b'\x93NUMPY\x01\0v\0' + bytes(200),
  }.items():
    for suffix in ('.npz', '.safetensors', '.pth'):
      yield f'kind: {name} as {suffix}', of_bytes(f'a{suffix}', data)

  special = lambda make: lambda folder: make(folder / 'a.npz') or folder / 'a.npz'
  yield 'kind: fifo', special(os.mkfifo)
  yield 'kind: link to itself', special(lambda p: p.symlink_to(p))
  yield 'kind: endless device', special(lambda p: p.symlink_to('/dev/zero'))
  yield 'kind: empty folder', special(lambda p: p.mkdir())
  yield 'kind: NUL in the name', lambda folder: Path(f'{folder}/a\0b.npz')


def _npz(**members: bytes) -> Make:
  def make(folder):
    with zipfile.ZipFile(folder / 'a.npz', 'w', zipfile.ZIP_DEFLATED) as archive:
      for name, data in members.items():
        archive.writestr(name, data)
    return folder / 'a.npz'

  return make


def _npy(array) -> bytes:
  out = io.BytesIO()
  np.lib.format.write_array(out, array, allow_pickle=True)
  return out.getvalue()


def zips():
  """Archives that are cut, flipped, lie in their directory, or are bombs."""
  whole = NPZ.read_bytes()
  for part in range(12):
    end = len(whole) * part // 12 + part
    yield f'zip: cut at {end}', of_bytes('a.npz', whole[:end])
  for i in range(24):  # spread over data and directory, which is the last part
    at = len(whole) * i // 16 if i < 16 else len(whole) - 1 - 97 * (i - 16)
    flipped = bytearray(whole)
    flipped[at] ^= 1 << i % 8
    yield f'zip: flipped bit {i % 8} of byte {at}', of_bytes('a.npz', bytes(flipped))
  for field, at, form, values in (
    ('flags', 8, '<H', (1, 0x2000, 0xFFFF)),
    ('method', 10, '<H', (8, 14, 99)),
    ('checksum', 16, '<I', (0,)),
    ('compressed size', 20, '<I', (1, 0x7FFFFFFF, 0xFFFFFFFF)),
    ('size', 24, '<I', (1, 0x7FFFFFFF, 0xFFFFFFFE)),
    ('name length', 28, '<H', (0, 0xFFFF)),
    ('offset', 42, '<I', (1, 0x7FFFFFFF)),
  ):
    for value in values:
      changed = bytearray(whole)
      struct.pack_into(form, changed, changed.index(b'PK\x01\x02') + at, value)
      yield f'zip: {field} {value:#x}', of_bytes('a.npz', bytes(changed))
  one = _npy(np.zeros((1, 1, 4), np.float32))
  objects = _npy(np.array([{'a': 1}], dtype=object))
  yield 'zip: no member', _npz()
  yield 'other arrays', _npz(**{'a.npy': one})
  yield 'zip: one is a pickle', _npz(**{'cls.npy': one, 'data.pkl': b'\x80\x04.'})
  yield 'zip: one holds objects', _npz(**{'cls.npy': objects})
  yield 'zip: one holds text', _npz(**{'cls.npy': _npy(np.array(['a']))})
  yield 'zip: torch', _npz(**{'archive/data.pkl': b'\x80\x02', 'archive/version': b'3'})
  for name in ('../cls.npy', '.npy', 'a\nb.npy'):
    yield f'zip: member {name!r}', _npz(**{name: one})
  scale = 'Transformer/encoderblock_{}/LayerNorm_0/scale.npy'
  yield '5,000 layers', _npz(**{scale.format(i): one for i in range(5000)})
  yield 'layer 99999', _npz(**{scale.format(99999): one})
  zeros = _npy(np.zeros(1 << 21, np.float32))
  yield '320 MB in 330 KB', _npz(**{f'Transformer/{i}.npy': zeros for i in range(40)})


def pickles():
  """Pickles that have no end, or make more than they hold."""
  file = lambda data: of_bytes('a.pkl', data)
  itself, first, second = {}, {}, {}
  itself['model'], first['state_dict'], second['model'] = itself, second, first
  yield 'pickle: holds itself', file(pickle.dumps(itself))
  yield 'pickle: two hold each other', file(pickle.dumps(first))
  yield 'pickle: index 2**30', file(b'\x80\x02]r\0\0\0\x40.')
  # Python's hash is modulo 2**61 - 1.
  keys = [pickle.encode_long(i * (2**61 - 1)) for i in range(1, 50_000)]
  items = b''.join(b'\x8a' + bytes([len(key)]) + key + b'K\0' for key in keys)
  yield 'pickle: keys of one hash', file(b'\x80\x04}(' + items + b'u.')
  # Each of them doubles a text.
  twice = b'c_codecs\nencode\n\x8c\x01a\x8c\x05utf32\x86R'
  for _ in range(32):
    twice = b'c_codecs\nencode\n' + twice + b'\x8c\x03hex\x86R'
  yield 'pickle: hexadecimal of hexadecimal', file(b'\x80\x04' + twice + b'.')


def npy_headers():
  """Headers of arrays that lie about their sizes, or are no headers."""

  def header(text: str, version=(1, 0), length=None):
    data = text.encode('latin-1')
    size = struct.pack('<H' if version == (1, 0) else '<I', length or len(data))
    body = b'\x93NUMPY' + bytes(version) + size + data + bytes(64)
    return _npz(**{'cls.npy': body})

  entry = "{{'descr': {}, 'fortran_order': False, 'shape': {}, }}\n".format
  for shape in (
    *('(True, 4)', '(-4, -4)', '(4.0, 4)', '16', 'None', '(16, None)', '((4, 4),)'),
    *('(10**6, 10**6)', '(1000000, 1000000)', f'({"2, " * 60})', '(0, 16)', '()'),
    *(f'(0, {2**62})', '__import__("os")', '', f'{"(" * 9000}', '(4, 4'),
  ):
    yield f'npy: shape {shape[:24]}', header(entry("'<f4'", shape))
  for kind in (
    *("'|O'", "'<U16'", "'<M8[s]'", "'<c8'", "'|V3'", "'|V0'", "[('a', '<f4')]"),
    *("'<f4,<f4'", "('<f4', (4,))", "'x'", 'None', f'{"[" * 5000}', "'>f4'"),
  ):
    yield f'npy: type {kind[:24]}', header(entry(kind, '(16,)'))
  plain = entry("'<f4'", '(16,)')
  for version in ((0, 0), (2, 0), (255, 255)):
    yield f'npy: version {version}', header(plain, version)
  yield 'npy: header of 4 GB', header(plain, (2, 0), 0xFFFFFFF0)
  for text in ('', '{}', '\0' * 50, "{'shape': (16,)}"):
    yield f'npy: header {text[:10]!r}', header(text)


def arrays():
  """Arrays that are missing or of another shape or type."""

  def changed(name, change):
    def make(folder):
      with np.load(NPZ) as file:
        arrays = dict(file)
      if (x := change(arrays.pop(name))) is not None:
        arrays[name] = x
      np.savez(folder / 'a.npz', **arrays)
      return folder / 'a.npz'

    return make

  block = 'Transformer/encoderblock_0/'
  for name in (
    *('cls', 'embedding/kernel', 'head/kernel', 'head/bias'),
    *(f'{block}LayerNorm_0/scale', 'Transformer/posembed_input/pos_embedding'),
    f'{block}MultiHeadDotProductAttention_1/query/kernel',
    f'{block}MlpBlock_3/Dense_0/kernel',
  ):
    for what, change in {
      'missing': lambda x: None,
      'transposed': lambda x: x.T[..., None],
      'a scalar': lambda x: np.float32(1),
      'empty': lambda x: x[:0],
      'cut': lambda x: x[..., : max(1, x.shape[-1] // 2)],
      'of integers': lambda x: np.zeros(x.shape, np.int8),
      'complex': lambda x: x.astype(np.complex64),
    }.items():
      yield f'array: {name.removeprefix(block)} {what}', changed(name, change)


def safetensors():
  """Safetensors: the length and the JSON of the header, and the index of parts."""
  whole = (TIMM / 'model.safetensors').read_bytes()
  (length,) = struct.unpack('<Q', whole[:8])
  header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
  file = lambda content: of_bytes('a.safetensors', content)
  for part in range(8):
    end = len(whole) * part // 8 + 3 * part
    yield f'safetensors: cut at {end}', file(whole[:end])
  for size in (0, 7, 10**6, 2**32, 2**63, 2**64 - 1):
    name = f'safetensors: header of {size} bytes'
    yield name, file(struct.pack('<Q', size) + whole[8:])

  def with_header(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return file(struct.pack('<Q', len(text)) + text + data)

  name = next(key for key in header if key != '__metadata__')
  start, end = header[name]['data_offsets']
  for key, values in {
    'dtype': ('F8_E4M3', 'X', 5, None, 'I64'),
    'shape': ([-1, 4], [1.5], [10**6, 10**6], 'x', [], [0, 2**62]),
    'data_offsets': ([end, start], [-4, end], [0, 2**63], 'x', [start, start]),
  }.items():
    for value in values:
      changed = {**header, name: {**header[name], key: value}}
      yield f'safetensors: {key} {value}', with_header(changed)
  for text in (b'x' * 100, b'[]', b'{"a":' * 9000):
    yield f'safetensors: header {text[:9]}', with_header(text)
  for config in ('[' * 9000, '[]', '{', '{"model_args": []}', '\ud800'):
    meta = {**header, '__metadata__': {'config': config}}
    yield f'safetensors: metadata {config[:20]!r}', with_header(meta)
  for names in (
    *([], 'x', {'a': 1}, {}, {'a': 'model-00009.safetensors'}, {'a': 'x.bin'}),
    *({'a': '../model.safetensors'}, {'a': '/etc/passwd'}, {'a': 'a\0b.safetensors'}),
  ):
    text = json.dumps({'weight_map': names}).encode()

    def index(folder, text=text):
      (folder / 'model.safetensors.index.json').write_bytes(text)
      return folder

    yield f'safetensors: index {names}', index


VALUES = {
  **{'null': None, 'true': True, 'zero': 0, 'negative': -7, 'huge': 10**30},
  **{'NaN': float('nan'), 'infinite': float('inf'), 'tiny': 1e-300, 'text': 'no such'},
  **{'list': [], 'object': {}, 'zeros': [0, 0, 0], 'sides': [100_000, 100_000]},
  **{'texts': ['a', 'b'], 'odd object': {'height': -1, 'x': []}},
}


def configs():
  """JSON beside arrays: the comment of an .npz, config.json, preprocessor_config.json."""

  def comment(data: bytes):
    def make(folder):
      shutil.copy(NPZ, folder / 'a.npz')
      with zipfile.ZipFile(folder / 'a.npz', 'a') as archive:
        archive.comment = data
      return folder / 'a.npz'

    return make

  def folder_with(origin, name, data: bytes):
    def make(folder):
      for path in origin.iterdir():
        if path.name != name:
          (folder / path.name).symlink_to(path)
      (folder / name).write_bytes(data)
      return folder

    return make

  def changed(path, key, value) -> bytes:
    config = json.loads(path.read_text())
    *parents, last = key.split('.')
    inside = config
    for parent in parents:
      inside = inside.setdefault(parent, {})
    inside[last] = value
    return json.dumps(config).encode()

  for data in (b'{"vit_jax": {', b'{"a":' * 12_000, b'{\xff}', b'{"a": 1e}'):
    yield f'comment: {data[:16]}', comment(data)
  for field, value in (
    *(('depth', 10**9), ('depth', 1e9), ('act', 'relu'), ('no_field', True)),
    *(('dtype', 'float8'), ('patch_size', [0, 0]), ('num_classes', -1)),
  ):
    data = json.dumps({'vit_jax': {'fields': {field: value}}}).encode()
    yield f'comment: field {field} {value}', comment(data)
  for key in ('fields', 'class_names', 'image_size', 'pp'):
    for name, value in VALUES.items():
      data = json.dumps({'vit_jax': {key: value}}).encode()
      yield f'comment: {key} is {name}', comment(data)
  timm = ('architecture', 'label_names', 'model_args', 'model_args.num_heads')
  timm += ('model_args.act_layer', 'pretrained_cfg.input_size', 'pretrained_cfg.std')
  timm += ('pretrained_cfg.crop_pct', 'vit_jax')
  hf = ('model_type', 'hidden_act', 'layer_norm_eps', 'num_attention_heads', 'id2label')
  for origin, keys in ((TIMM, timm), (HF, (*hf, 'image_size'))):
    for key in keys:
      for name, value in VALUES.items():
        data = changed(origin / 'config.json', key, value)
        make = folder_with(origin, 'config.json', data)
        yield f'config: {key} is {name}', make
  plain = {'size': {'height': 32, 'width': 32}, 'do_center_crop': True, 'crop_size': 32}
  for key in ('size', 'crop_size', 'resample', 'image_std'):
    for name, value in VALUES.items():
      data = json.dumps(plain | {key: value}).encode()
      make = folder_with(HF, 'preprocessor_config.json', data)
      yield f'config: preprocessor {key} is {name}', make
  name, wrong = 'open_clip_config.json', {'pair': [0.5, 0.5], 'too large': [1e308] * 3}
  cases = {('model_cfg.vision_cfg.head_width', 'true'): True}
  cases |= {('model_cfg.vision_cfg.norm_kwargs.eps', 'NaN'): float('nan')}
  for key in ('mean', 'std', 'interpolation'):
    cases |= {(f'preprocess_cfg.{key}', k): v for k, v in {**VALUES, **wrong}.items()}
  for (key, case), value in cases.items():
    data = changed(OPEN_CLIP / name, key, value)
    yield f'config: {key} is {case}', folder_with(OPEN_CLIP, name, data)
  for data in (
    *(b'', b'{"a"', b'[]', b'1', b'[' * 100_000, b'{"a":' * 100_000, bytes(1000)),
    *(b'{"hidden_act": "\\ud800"}', b'{"id2label": {"0": "a", "00": "b"}}'),
  ):
    yield f'config: {data[:24]}', folder_with(HF, 'config.json', data)
