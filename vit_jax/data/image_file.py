"""Reads the file of an image, if it is a regular file of a sane size."""

import os
import stat

from vit_jax.data import stalls
from vit_jax.errors import BadImage

# A photograph of 64 megapixels, the most that is decoded, is 200 MB uncompressed.
MAX_BYTES = 256 << 20

# Number of threads that read files; they mostly wait for a disk or a mount.
READERS = 16


def read(path: str | os.PathLike, most: int = MAX_BYTES) -> bytes:
  """Returns the bytes of a file. If reading takes long, `stalls` reports the file's name.

  Opens regular files only, because a FIFO would block the reader forever and a device may
  have no end.

  Raises:
    BadImage: for a file that is not regular, has over `most` bytes, or cannot be read.
  """
  try:
    with stalls.reading(path):
      status = os.stat(path)
      if not stat.S_ISREG(status.st_mode):
        raise BadImage(f'not a regular file ({stat.filemode(status.st_mode)})')
      check_size(status.st_size, most)
      with open(path, 'rb', buffering=0) as file:
        return file.readall() or b''
  except BadImage:
    raise
  except (OSError, ValueError) as error:  # ValueError: a NUL in the name
    reason = getattr(error, 'strerror', None) or error
    raise BadImage(f'cannot be read: {reason}') from None


def check_size(size: int, most: int = MAX_BYTES) -> None:
  """Raises BadImage for more than `most` bytes."""
  if size > most:
    raise BadImage(f'{size:,} bytes, above the limit of {most:,}')
