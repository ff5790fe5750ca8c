"""Tars as pieces. Nothing is unpacked: a tar in a tar is read in place, as a folder."""

import bz2
import contextlib
import dataclasses
import gzip
import itertools
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator

from vit_jax.data import image_file
from vit_jax.data.prepare.entries import Entry, clean, is_hidden, open_file
from vit_jax.errors import UserError

ENDINGS = ('.tar', '.tar.gz', '.tgz', '.tar.bz2', '.tbz2', '.tar.xz', '.txz', '.gtar')
# What reading a damaged archive raises.
DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_COMPRESSED = {b'\x1f\x8b': gzip.open, b'BZh': bz2.open, b'\xfd7zXZ': lzma.open}
# A tar of many small files is cut into ranges of about this many bytes for a cluster.
_RANGE = 256 << 20
# A tar of tars begins with a tar, but for a note or a list or two.
_LOOK_AHEAD = 50


@dataclasses.dataclass(frozen=True)
class Tar:
  """A tar file, plain or compressed, or the members in [start, stop) of a plain one.

  `prefix` stands before the names inside: that of the tar without its ending.
  """

  path: str
  prefix: str
  size: int
  changed: int  # modification time, ns
  start: int = 0
  stop: int | None = None

  def identity(self) -> str:
    return str((os.path.basename(self.path), self.size, self.changed, self.start))

  def entries(self) -> Iterator[Entry]:
    with open_file(self.path) as file:
      file.seek(self.start)
      yield from _entries(file, self.prefix, self.path, self.stop)


def whole(path: str, prefix: str | None = None) -> Tar:
  """Returns a whole tar as one piece. `prefix` is by default its name.

  Raises:
    UserError: if it is missing, empty, or no tar.
  """
  size, changed = _stat(path)
  if not size:
    raise UserError(f'{path} is empty (0 bytes): fetch it again.')
  if prefix is None:
    prefix = stem(path)
  piece = Tar(path, prefix, size, changed)
  # Raises here, before work starts, if it is not a tar.
  next(iter(_members(piece)), None)
  return piece


def pieces(path: str, prefix: str | None = None, *, ranges: bool) -> list[Tar]:
  """Returns a tar's pieces: one for each tar inside, or the whole.

  Args:
    path: the tar.
    prefix: see `Tar`.
    ranges: for many workers: cut a tar of files too. All headers are then read, and a
      compressed tar, which can only be read from its start, is refused.

  Raises:
    UserError: see `whole`; also if it ends early.
  """
  one = whole(path, prefix)
  if is_compressed(path):
    if ranges:
      raise UserError(
        f'{path} is compressed: it can only be read from its start, by one worker. '
        'Decompress it first (gunzip; images hardly grow), or prepare it on one machine, '
        'without --beam_runner.'
      )
    return [one]
  first = itertools.islice(_members(one), _LOOK_AHEAD)
  if not ranges and not any(_is_tar(member) for member in first):
    return [one]
  cuts, was_tar = [0], False
  for member in _members(one):
    is_tar = _is_tar(member)
    if member.offset and (is_tar or was_tar or member.offset - cuts[-1] >= _RANGE):
      cuts.append(member.offset)
    was_tar = is_tar
  return [
    dataclasses.replace(one, start=start, stop=stop)
    for start, stop in zip(cuts, [*cuts[1:], None], strict=True)
  ]


def is_name(path: str) -> bool:
  """Whether a file's name is that of a tar, compressed or not."""
  return path.lower().endswith(ENDINGS)


def is_compressed(path: str) -> bool:
  """Whether a tar is compressed, by its first bytes."""
  with open_file(path) as file:
    return _decompressor(file.read(6)) is not None


def stem(path: str) -> str:
  """Returns 'cats' for 'x/cats.tar.gz'."""
  name = path.rstrip('/').rpartition('/')[2]
  endings = sorted((e for e in ENDINGS if name.lower().endswith(e)), key=len)
  return name[: -len(endings[-1])] if endings else name


def _stat(path: str) -> tuple[int, int]:
  try:
    if '://' not in path:
      found = os.stat(path)
      if not stat.S_ISREG(found.st_mode):
        raise UserError(f'{path} is not a regular file.')
      return found.st_size, found.st_mtime_ns
    import tensorflow_datasets as tfds

    found = tfds.core.Path(path).stat()
    return found.length, found.mtime
  except OSError as error:
    raise UserError(f'{path}: {error.strerror or error}.') from None


def _is_tar(member: tarfile.TarInfo) -> bool:
  return member.isfile() and is_name(member.name) and not is_hidden(clean(member.name))


def _members(piece: Tar) -> Iterator[tarfile.TarInfo]:
  """Reads the headers only."""
  with open_file(piece.path) as file, _damage(piece.path):
    opened, stream = _decompressed(file)
    yield from _walk(opened, stream, None, lambda tar, member: [member])


def _entries(file, prefix: str, where: str, stop: int | None) -> Iterator[Entry]:
  with _damage(where):
    opened, stream = _decompressed(file)
    make = lambda tar, member: _of_member(tar, member, prefix, stream)
    yield from _walk(opened, stream, stop, make)


def _walk(file, stream: bool, stop: int | None, make) -> Iterator:
  """Yields what `make(tar, member)` does for every member.

  Args:
    stream: whether the file cannot go back, which tarfile otherwise does by a byte.

  Raises:
    tarfile.TarError: also where tarfile stops in silence, at a malformed header.
  """
  with tarfile.open(fileobj=file, mode='r|' if stream else 'r:') as tar:
    tar.fileobj = last = _LastRead(tar.fileobj)
    while (member := tar.next()) is not None:
      tar.members = []  # else it holds all headers in memory
      if stop is not None and member.offset >= stop:
        return
      yield from make(tar, member)
    if last.data.strip(b'\0'):
      raise tarfile.ReadError(f'no header at byte {tar.offset}')


def _of_member(tar, member, prefix: str, stream: bool) -> Iterator[Entry]:
  name = clean(member.name)
  if member.isdir() or is_hidden(name):
    return
  path = f'{prefix}/{name}' if prefix else name
  place = path.rpartition('/')[0]
  if not member.isfile():
    yield Entry(path, place, None, 'a link or a device, not a file')
  elif not is_name(name):
    yield Entry(path, place, lambda: _content(tar, member))
  else:
    inside = f'{place}/{stem(name)}' if place else stem(name)
    yield Entry(inside, inside, None)
    try:
      opened, compressed = _decompressed(tar.extractfile(member))
      stream = stream or compressed
      make = lambda t, m: _of_member(t, m, inside, stream)
      yield from _walk(opened, stream, None, make)
    except tarfile.TarError as error:
      # If the tar around it is what ends early, that shows at its next member.
      yield Entry(path, inside, None, f'damaged, the rest is left out: {error}')


def _content(tar, member) -> bytes:
  image_file.check_size(member.size)  # by its header
  return tar.extractfile(member).read()


def _decompressor(head: bytes):
  return next((f for magic, f in _COMPRESSED.items() if head.startswith(magic)), None)


def _decompressed(file):
  """Returns (file, whether it cannot go back)."""
  if hasattr(file, 'peek'):
    head = file.peek(6)[:6]
  else:  # a file of a bucket
    position = file.tell()
    head = file.read(6)
    file.seek(position)
  opener = _decompressor(head)
  return (opener(file), True) if opener else (file, False)


class _LastRead:
  """Remembers what was read last: at the end of a tar it is zeros, or nothing."""

  def __init__(self, file):
    self._file, self.data = file, b''

  def read(self, *args) -> bytes:
    self.data = self._file.read(*args)
    return self.data

  def __getattr__(self, name):
    return getattr(self._file, name)


@contextlib.contextmanager
def _damage(where: str):
  """Turns what the readers raise on broken archives into one line."""
  try:
    yield
  except DAMAGE as error:
    raise UserError(
      f'{where} is not a tar archive, is damaged, or ends early ({error}): fetch it again.'
    ) from None
