"""Writing a run's small files so that a full disk costs nothing but the new one."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from vit_jax.errors import DiskFull, disk_is_full


def replace(path: Path, data: bytes) -> None:
  """Writes a file so that a reader, or what follows a failure, sees the old or the new.

  Raises:
    OSError: the old file is as it was, and no half of the new one is left.
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
  """Writes over a file in the blocks that it has: what a full disk has room for.

  Not for what must survive a kill. Raises: OSError.
  """
  file = os.open(path, os.O_WRONLY)
  try:
    # Spaces keep it JSON in between: a reader never sees the end of the old text.
    write(file, data.ljust(os.fstat(file).st_size))
    os.ftruncate(file, len(data))
  finally:
    os.close(file)


def write(file: int, data: bytes) -> None:
  """Writes all of `data` to a file descriptor; OSError where a part did not fit."""
  while data:  # a full disk may take a part, and says so at the next write only
    data = data[os.write(file, data) :]


@contextlib.contextmanager
def full_is_one_line(workdir: str | os.PathLike) -> Iterator[None]:
  """Makes of whatever says that there is no room a `DiskFull`; see `disk_is_full`."""
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
