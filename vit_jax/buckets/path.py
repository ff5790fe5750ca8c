"""Paths in buckets, with the methods of `pathlib.Path` that a run's folder needs."""

import errno
import fnmatch
import os
import pathlib
from collections.abc import Iterator

from vit_jax.buckets import client
from vit_jax.errors import UserError

SCHEME = 'gs://'


def is_url(path) -> bool:
  """Returns whether a path is one in a bucket."""
  return str(path).startswith(SCHEME)


def path(name) -> 'pathlib.Path | BucketPath':
  """Returns a path from what a user wrote: in a bucket, or on this machine, with `~`.

  Raises:
    UserError: for a URL of another kind.
  """
  if is_url(name):
    found = BucketPath(str(name))
    if len(found.parts) < 2:
      raise UserError(f'{name} names no bucket: gs://BUCKET/PATH.')
    return found
  if '://' in str(name):
    raise UserError(
      f'{name}: gs:// is the only kind of URL that can be a folder. Mount the storage, '
      'and give the path of the mount.'
    )
  return pathlib.Path(name).expanduser()


def on_disk(name, what: str) -> pathlib.Path:
  """Returns the path of a file that a tool writes, which must be on disk.

  Args:
    what: begins the message: '--out', 'Cannot write'.

  Raises:
    UserError: for a URL.
  """
  if '://' in str(name):
    raise UserError(
      f'{what} {name}: results are written to disk. Give a path there, and copy the '
      'results (gcloud storage cp).'
    )
  return pathlib.Path(name)


class BucketPath(pathlib.PurePosixPath):
  """gs://BUCKET/PATH. A folder exists as long as an object below it does."""

  __slots__ = ()

  def __str__(self) -> str:
    # PurePath keeps one of two slashes: ('gs:', 'bucket', ...).
    return SCHEME + '/'.join(self.parts[1:])

  def __fspath__(self) -> str:
    return str(self)

  def __repr__(self) -> str:
    return f'{type(self).__name__}({str(self)!r})'

  def __reduce__(self):
    return type(self), (str(self),)

  def absolute(self) -> 'BucketPath':
    return self

  def expanduser(self) -> 'BucketPath':
    return self

  def mkdir(self, **_) -> None:
    """Does nothing: buckets have no folders apart from their objects."""

  def read_bytes(self) -> bytes:
    return client.read(self).data

  def read_text(self, encoding: str = 'utf-8') -> str:
    return self.read_bytes().decode(encoding)

  def write_bytes(self, data: bytes) -> None:
    client.write(self, data)

  def is_file(self) -> bool:
    try:
      client.size_and_generation(self)
    except FileNotFoundError:
      return False
    return True

  def is_dir(self) -> bool:
    with client.errors_of(self):
      return client.filesystem().isdir(str(self))

  def exists(self) -> bool:
    with client.errors_of(self):
      return client.filesystem().exists(str(self))

  def iterdir(self) -> Iterator['BucketPath']:
    with client.errors_of(self):
      for name in client.filesystem().ls(str(self), detail=False):
        yield type(self)(SCHEME + name)

  def glob(self, pattern: str) -> Iterator['BucketPath']:
    """Yields what lies in this folder and fits a pattern of one name."""
    try:
      found = list(self.iterdir())
    except FileNotFoundError:
      return
    yield from (path for path in found if fnmatch.fnmatchcase(path.name, pattern))

  def size_and_generation(self) -> tuple[int, int]:
    """Returns the size in bytes and the generation, which change with the content."""
    return client.size_and_generation(self)

  def empty(self, but: str) -> None:
    """Removes all objects in this folder, at any depth, except the one named `but`."""
    fs = client.filesystem()
    with client.errors_of(self):
      for name in fs.find(str(self)):
        if f'{SCHEME}{name}' != f'{self}/{but}':
          fs.rm_file(name)

  def rename_folder(self, target: 'BucketPath', last: str) -> None:
    """Moves a folder by copies in the bucket.

    An interruption leaves the folder whole, or the copy: the object `last` is copied
    last and deleted first.
    """
    fs = client.filesystem()
    with client.errors_of(self):
      names = [f'{SCHEME}{name}' for name in fs.find(str(self))]
      if not names:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
      names.sort(key=lambda name: name == f'{self}/{last}')
      for name in names:
        fs.cp_file(name, f'{target}{name.removeprefix(str(self))}')
      for name in reversed(names):
        fs.rm_file(name)
