"""Which files of a folder are images, by their names alone: no file is opened or looked at."""

import functools
import importlib.util
import os
from collections import Counter
from collections.abc import Mapping, Sequence

from vit_jax.errors import UserError

# Extensions that TensorFlow or Pillow reads, in lower case.
EXTENSIONS = (
  *('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.gif', '.bmp', '.webp', '.avif', '.jp2'),
  *('.tif', '.tiff', '.ppm', '.pgm', '.pbm', '.pnm', '.tga'),
)

# Photographs of many phones; readable if pillow-heif is installed.
HEIF = ('.heic', '.heif')


@functools.cache
def extensions() -> tuple[str, ...]:
  """Returns the file name extensions of readable images, in lower case, with the dot."""
  return EXTENSIONS + (HEIF if importlib.util.find_spec('pillow_heif') else ())


def is_hidden(name: str) -> bool:
  """Whether a name is a dot file's, or that of the folder which macOS adds to zips."""
  return name.startswith('.') or name == '__MACOSX'


def is_folder(entry: os.DirEntry) -> bool:
  """Whether an entry is a folder or a link to one; False for a link to itself."""
  try:
    return entry.is_dir()
  except OSError:
    return False


def images_below(directory: str) -> tuple[list[str], Counter]:
  """Lists the files below a directory. Links are followed once, hidden files left out.

  Returns (paths of images, in no order; {extension: number} of other files).
  """
  images, others = [], Counter()
  todo, visited, endings = [''], set(), extensions()
  while todo:
    prefix = todo.pop()
    here = os.path.join(directory, prefix)
    if (real := os.path.realpath(here)) in visited:
      continue  # a link to a folder above it
    visited.add(real)
    try:
      with os.scandir(here) as entries:
        for entry in entries:
          name = entry.name
          if is_hidden(name):
            continue
          if is_folder(entry):
            todo.append(f'{prefix}{name}/')
          elif name.lower().endswith(endings):
            images.append(prefix + name)
          else:
            others[extension(name)] += 1
    except OSError as error:
      raise UserError(f'folder: {here}: {error.strerror}.') from None
  return images, others


def extension(name: str) -> str:
  """Returns '.txt', in lower case, or 'without extension'."""
  return os.path.splitext(name)[1].lower() or 'without extension'


def describe(counts: Mapping[str, int]) -> str:
  """Returns '3 .heic, 2 .txt' of {extension: number}, and how to read HEIC."""
  ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
  text = some([f'{n:,} {ending}' for ending, n in ordered])
  if set(counts) & set(HEIF):
    text += " (HEIC needs pillow-heif: pip install 'vit_jax[heif]')"
  return text


def some(names: Sequence[str]) -> str:
  """Returns the first five names, and the number of the others."""
  more = f' and {len(names) - 5} more' if len(names) > 5 else ''
  return ', '.join(names[:5]) + more
