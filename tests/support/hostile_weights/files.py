"""Paths that hold no weights: text, other formats, devices, folders, nothing."""

import os
from collections.abc import Callable
from pathlib import Path

from tests.support import GOLDEN

# The published files that the cases change.
NPZ = GOLDEN / 'vit_google_token.npz'
TIMM, HF = GOLDEN / 'vit_timm', GOLDEN / 'vit_hf'

Make = Callable[[Path], Path]  # writes into an empty folder, returns what to load


def of_bytes(name: str, data: bytes) -> Make:
  """Returns the recipe of a file with this name and content."""

  def make(folder):
    (folder / name).write_bytes(data)
    return folder / name

  return make


def kinds():
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
      yield f'kind: {name} as {suffix or "no suffix"}', of_bytes(f'a{suffix}', data)

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
