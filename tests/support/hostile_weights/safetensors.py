"""Safetensors: the length and the JSON of the header, and the index of a model in parts."""

import json
import struct

from tests.support.hostile_weights.files import TIMM, of_bytes


def _parts() -> tuple[dict, bytes]:
  data = (TIMM / 'model.safetensors').read_bytes()
  (length,) = struct.unpack('<Q', data[:8])
  return json.loads(data[8 : 8 + length]), data[8 + length :]


def _with_header(header, data: bytes, length: int | None = None) -> bytes:
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return struct.pack('<Q', len(text) if length is None else length) + text + data


def files():
  whole = (TIMM / 'model.safetensors').read_bytes()
  for part in range(24):
    end = len(whole) * part // 24 + 3 * part
    yield f'safetensors: cut at {end}', of_bytes('a.safetensors', whole[:end])
  yield 'safetensors: bytes left over', of_bytes('a.safetensors', whole + bytes(8))
  for length in (0, 1, 7, 100, 10**6, 2**31, 2**32, 2**62, 2**63, 2**64 - 1):
    data = struct.pack('<Q', length) + whole[8:]
    yield f'safetensors: header of {length} bytes', of_bytes('a.safetensors', data)
  for i in range(24):
    flipped = bytearray(whole)
    flipped[i * 211] ^= 1 << i % 8  # the header: nothing guards the arrays
    yield (
      f'safetensors: flipped byte {i * 211}',
      of_bytes('a.safetensors', bytes(flipped)),
    )


def headers():
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
      yield f'tensor: {key} {i} {str(value)[:24]}', of_bytes('a.safetensors', whole)
  for key in entry:
    lacking = {k: v for k, v in entry.items() if k != key}
    whole = _with_header({**header, name: lacking}, data)
    yield f'tensor: no {key}', of_bytes('a.safetensors', whole)
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
    yield f'tensor: header {what}', of_bytes('a.safetensors', _with_header(value, data))
  for i, config in enumerate(
    ('[' * 9000, '[]', '1', '{', '{"model_args": []}', '\ud800')
  ):
    meta = {**header, '__metadata__': {'config': config}}
    whole = _with_header(json.dumps(meta).encode(), data)
    yield f'tensor: metadata {i}', of_bytes('a.safetensors', whole)


def indices():
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
