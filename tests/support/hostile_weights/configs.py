"""JSON that stands beside arrays: config.json of a hub folder, the comment of an .npz."""

import json
import shutil
import zipfile
from pathlib import Path

from tests.support.hostile_weights.files import HF, NPZ, TIMM, Make

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


def comments():
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


def hub_folders():
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
