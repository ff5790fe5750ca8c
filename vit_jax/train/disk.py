"""Writing a run's small files; on a full disk the old versions survive."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from vit_jax.errors import DiskFull, disk_is_full


def replace(path: Path, data: bytes) -> None:
  """Replaces a file atomically: readers see the old version or the new one.

  Raises:
    OSError: the old file is unchanged, and no partial file is left behind.
  """
  temporary = path.with_suffix('.tmp')
  try:
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
      write(file, data)
    finally:
      os.close(file)
    temporary.replace(path)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink()
    raise


def overwrite(path: Path, data: bytes) -> None:
  """Overwrites a file in place, which works on a full disk as it needs no new blocks.

  Not atomic: a kill may leave a mixture. Raises: OSError.
  """
  file = os.open(path, os.O_WRONLY)
  try:
    # Padded with spaces, the text is valid JSON until the file is cut to length.
    write(file, data.ljust(os.fstat(file).st_size))
    os.ftruncate(file, len(data))
  finally:
    os.close(file)


def write(file: int, data: bytes) -> None:
  """Writes all of `data` to a file descriptor; raises OSError if it does not fit."""
  while data:  # a write may be partial: only the next one fails
    data = data[os.write(file, data) :]


@contextlib.contextmanager
def full_raises_disk_full(workdir: str | os.PathLike) -> Iterator[None]:
  """Raises `DiskFull` in place of any error that means a full disk (`disk_is_full`)."""
  try:
    yield
  except DiskFull:
    raise
  except Exception as error:
    if not disk_is_full(error):
      raise
    line = ' '.join(str(error).split())[:300]
    raise DiskFull(
      f'Disk full: {line}. {_room(Path(workdir))}What was written before is intact. '
      'Make room, and rerun the same command.'
    ) from error


def _room(workdir: Path) -> str:
  there = next((p for p in (workdir, *workdir.parents) if p.exists()), None)
  if there is None:
    return ''
  free, files = shutil.disk_usage(there).free, os.statvfs(there).f_favail
  return f'{there} has room for {free / 1e6:,.1f} MB in {files:,} files. '
