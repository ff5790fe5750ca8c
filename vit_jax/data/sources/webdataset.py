"""Tars of WebDataset, as img2dataset writes them: the files of an example share a name."""

import functools
import json
import os
import tarfile

from vit_jax.data import stalls
from vit_jax.data.sources.folder import extensions
from vit_jax.data.sources.shards import Encoded
from vit_jax.errors import UserError


class WebDataset(Encoded):
  """`wds:TARS`: the image 003.jpg, its caption 003.txt or 003.json, its label 003.cls.

  Each line of a .txt is a caption. In a .json, 'caption', 'captions' or 'text' is a caption
  or a list. A .cls holds a number, and counts if every example has one. The place of each
  file is read when a run starts, so that examples are read in any order; tars may not be
  compressed.

  Options:
    stream, shuffle_buffer: see `records.RecordFiles`.
  """

  SCHEME, EXTENSION = 'wds', '.tar'

  def _labels(self, piece) -> list:
    rows = _index(piece.filename)[piece.skip : piece.skip + piece.take]
    return [row.get('label') for row in rows]

  def _count(self, path: str) -> int:
    return len(_index(path))

  def _read_rows(self, path: str, rows: list[int]) -> list[dict]:
    index = _index(path)
    return list(self._readers.map(lambda row: _read(path, index[row]), rows))


# Cached, because a run opens a file several times: to train and to evaluate.
@functools.cache
def _index(path: str) -> list[dict]:
  """Returns the examples of a tar: {'image', 'txt', 'json': (offset, size), 'label': int}."""
  examples: dict[str, dict] = {}
  endings = extensions()
  try:
    with stalls.reading(path), tarfile.open(path, 'r:') as tar:
      for member in tar:
        folder, name = os.path.split(member.name)
        key, _, kind = name.partition('.')
        kind = 'image' if f'.{kind.lower()}' in endings else kind.lower()
        if member.isfile() and key and kind in ('image', 'txt', 'json', 'cls'):
          example = examples.setdefault(f'{folder}/{key}', {})
          if kind == 'cls':
            example['label'] = int(tar.extractfile(member).read())
          else:
            example.setdefault(kind, (member.offset_data, member.size))
  except (OSError, ValueError, tarfile.TarError) as error:
    raise UserError(
      f'{path} is not a complete tar without compression: {error}.'
    ) from None
  return list(examples.values())


def _read(path: str, example: dict) -> dict:
  places = {kind: place for kind, place in example.items() if kind != 'label'}
  try:
    with stalls.reading(path), open(path, 'rb', buffering=0) as file:
      read = {kind: os.pread(file.fileno(), n, at) for kind, (at, n) in places.items()}
    texts = read['txt'].decode().splitlines() if 'txt' in read else []
    if 'json' in read and not texts:
      content = json.loads(read['json'])
      names = (name for name in ('caption', 'captions', 'text') if content.get(name))
      texts = content.get(next(names, ''))
    return {'image': read.get('image'), 'text': texts, 'label': example.get('label')}
  except (OSError, ValueError, AttributeError) as error:
    return {'error': f'cannot be read: {error}'}
