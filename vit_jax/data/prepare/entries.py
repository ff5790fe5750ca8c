"""What all inputs consist of."""

import os
from collections.abc import Callable
from typing import NamedTuple


class Entry(NamedTuple):
  """A file, or a folder that may turn out to hold none (`read` is None).

  Attributes:
    path: '/'-separated, as messages and keys show it.
    folder: the path of its class's folder; '' for a file in none.
    read: returns the bytes; only until the next entry is asked for. Raises OSError,
      `BadImage` or one of DAMAGE.
    error: why there is nothing to read, or ''.
  """

  path: str
  folder: str
  read: Callable[[], bytes] | None
  error: str = ''


def clean(path: str) -> str:
  """Returns a path with '/', without '.' parts, as text that UTF-8 can hold."""
  text = os.fsencode(path).decode('utf-8', 'replace').replace(os.sep, '/')
  return '/'.join(part for part in text.split('/') if part not in ('', '.'))


def open_file(path: str):
  """Opens a local file, or one of a bucket (gs://), for reading bytes."""
  if '://' not in path:
    return open(path, 'rb')
  import tensorflow_datasets as tfds

  return tfds.core.Path(path).open('rb')


def is_hidden(path: str) -> bool:
  """Whether it is what systems leave: '.DS_Store', '._x.jpg', '__MACOSX/x.jpg'."""
  return any(p.startswith('.') or p == '__MACOSX' for p in path.split('/'))
