"""Reads the file of an image, if it is a regular file of a sane size."""

import os
import stat

from vit_jax.data import stalls
from vit_jax.errors import BadImage

# A photograph of 64 megapixels, the most that is decoded, is 200 MB uncompressed.
MAX_BYTES = 256 << 20

# Threads that read files at a time: they mostly wait for a disk or a mount.
READERS = 16


def read(path: str | os.PathLike, max_bytes: int | None = None) -> bytes:
  """Returns a file's bytes; `stalls` names the file if reading takes long.

  Only regular files are opened, because a FIFO would block its reader forever and a
  device may have no end.

  Args:
    max_bytes: the config's data.max_file_bytes; None: 256 MiB.

  Raises:
    BadImage: for a file that is not regular, has more bytes, or cannot be read.
  """
  try:
    with stalls.reading(path):
      _check(os.stat(path), max_bytes)
      # Without blocking, in case a FIFO has taken its place since.
      file = os.open(path, os.O_RDONLY | getattr(os, 'O_NONBLOCK', 0))
      with open(file, 'rb', buffering=0) as opened:
        _check(os.fstat(file), max_bytes)
        return opened.readall() or b''
  except (OSError, ValueError) as error:  # ValueError: a NUL in the name
    if isinstance(error, BadImage):
      raise
    reason = getattr(error, 'strerror', None) or error
    raise BadImage(f'cannot be read: {reason}') from None


def _check(status: os.stat_result, max_bytes: int | None) -> None:
  if not stat.S_ISREG(status.st_mode):
    raise BadImage(f'not a regular file ({stat.filemode(status.st_mode)})')
  check_size(status.st_size, max_bytes)


def check_size(size: int, max_bytes: int | None = None) -> None:
  """Raises BadImage for more bytes than `max_bytes`, see `read`."""
  limit = MAX_BYTES if max_bytes is None else max_bytes
  if size > limit:
    option = '' if max_bytes is None else ' (data.max_file_bytes)'
    raise BadImage(f'{size:,} bytes, above the limit of {limit:,}{option}')
