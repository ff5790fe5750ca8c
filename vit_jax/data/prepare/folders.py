"""Folders as pieces: what one worker reads from its start to its end.

A piece yields its entries in a fixed order, so that a place in it can be found again.
"""

import dataclasses
import logging
import os
from collections.abc import Iterator

from vit_jax.data import image_file
from vit_jax.data.prepare import tars
from vit_jax.data.prepare.entries import Entry, clean, is_hidden
from vit_jax.data.sources import listing
from vit_jax.data.sources.splits import SYNONYMS
from vit_jax.errors import UserError

_SPLIT_OF = {name: split for split, names in SYNONYMS.items() for name in names}


@dataclasses.dataclass(frozen=True)
class Files:
  """Files of a local directory: one class's, or some that a manifest lists."""

  root: str
  folder: str
  paths: tuple[str, ...]  # below root
  sizes: tuple[int, ...]

  @property
  def size(self) -> int:
    return sum(self.sizes)

  def identity(self) -> str:
    return str((self.folder, self.paths, self.sizes))

  def entries(self) -> Iterator[Entry]:
    if self.folder:
      yield Entry(self.folder, self.folder, None)
    for path in self.paths:
      yield Entry(clean(path), self.folder, lambda p=path: self._read(p))

  def _read(self, path: str) -> bytes:
    return image_file.read(os.path.join(self.root, path))


def pieces(root: str, *, ranges: bool) -> list[Files | tars.Tar]:
  """Returns the pieces of ROOT/CLASS/**/IMAGE or ROOT/SPLIT/CLASS/**/IMAGE.

  A tar in the place of a folder counts as one. As in the source 'folder:', a folder of
  a split's name makes the folder one of splits.

  Raises:
    UserError: if there is neither folder nor tar.
  """
  places = [(root, '')]
  names, _ = _listing(root)
  splits = [name for name in names if split_of(name)]
  if splits:
    if len({split_of(name) for name in splits}) < len(splits):
      raise UserError(f'{root}: of {splits}, two stand for the same split: keep one.')
    if others := sorted(set(names) - set(splits)):
      message = '%s: left out, as it has folders for splits: %s'
      logging.getLogger(__name__).warning(message, root, others[:5])
    places = [(os.path.join(root, name), f'{name}/') for name in splits]
  out = []
  for directory, prefix in places:
    names, archives = _listing(directory)
    for name in names:
      found = sorted(listing.images_below(os.path.join(directory, name))[0])
      paths = tuple(os.path.relpath(path, root) for path, _ in found)
      sizes = tuple(size for _, size in found)
      out.append(Files(root, clean(prefix + name), paths, sizes))
    for name in archives:
      path = os.path.join(directory, name)
      out += tars.pieces(path, clean(prefix + tars.stem(name)), ranges=ranges)
  if not out:
    raise UserError(
      f'{root} has neither class folders nor tars. Needed is DIR/CLASS/IMAGE, '
      'DIR/train/CLASS/IMAGE (and val or test), or tars.'
    )
  return out


def split_of(name: str) -> str | None:
  """Returns 'validation' for 'val', and so on; None for other names."""
  return _SPLIT_OF.get(name.lower())


def _listing(directory: str) -> tuple[list[str], list[str]]:
  """Returns the sorted names of the folders and of the tars."""
  try:
    entries = [e for e in os.scandir(directory) if not is_hidden(e.name)]
  except OSError as error:
    raise UserError(f'{directory}: {error.strerror}.') from None
  folders = sorted(e.name for e in entries if listing.is_folder(e))
  archives = sorted(e.name for e in entries if tars.is_name(e.name) and _is_file(e))
  return folders, archives


def _is_file(entry: os.DirEntry) -> bool:
  try:
    return entry.is_file()
  except OSError:  # a link that leads to itself
    return False
