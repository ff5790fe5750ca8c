"""Which images a folder holds, and from one run to the next without listing it again.

Listing asks for the size of every file: seconds for a million on a local disk, minutes
on a network's. What was found in each class is kept in `paths.cache_dir()` with the state
of every directory in it, and holds for as long as those are as they were: a file that is
added, removed or renamed changes its directory's times.

A file overwritten in place changes no directory. Only its size is listed, and nothing but
the fingerprint depends on that; one file of each class is looked at, which shows a folder
whose images were all written anew.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import time
import uuid
from collections import Counter
from typing import NamedTuple

from vit_jax import paths
from vit_jax.errors import UserError

# What TensorFlow or Pillow reads, in any case of letters.
EXTENSIONS = (
  *('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.gif', '.bmp', '.webp', '.avif', '.jp2'),
  *('.tif', '.tiff', '.ppm', '.pgm', '.pbm', '.pnm', '.tga'),
)

# As many phones save photographs; readable if pillow-heif is installed.
HEIF = ('.heic', '.heif')

# A directory that changes twice within a tick of its file system's clock (4 ms, up to 2 s)
# may look the same after the second change as after the first. What changed less than this
# long ago is therefore listed again. A minute, as a server's clock may differ from ours.
_SETTLED = 60 * 10**9  # nanoseconds


class Found(NamedTuple):
  """What is below a directory.

  Attributes:
    images: their paths below it, unsorted.
    sizes: of each in bytes; 0 of a link that leads nowhere.
    folders: {path below it: `_state`} of itself ('') and of every directory in it; None
      of one that may change unseen.
    ignored: {extension: number} of the other files that are not hidden.
  """

  images: list[str]
  sizes: list[int]
  folders: dict[str, list[int] | None]
  ignored: dict[str, int]


class Listing(NamedTuple):
  """The images of some folders, in the order of the SHA-256 of their paths.

  Attributes:
    paths: below a root.
    sizes: of each in bytes.
    places: of each, the index of its folder.
    folders: {folder: [`Found.folders`, a path below it, its size, `Found.ignored`]}, in
      their order.
  """

  paths: list[str]
  sizes: list[int]
  places: list[int]
  folders: dict[str, list]


@functools.cache
def extensions() -> tuple[str, ...]:
  """Returns the file name extensions of readable images, in lower case, with the dot."""
  return EXTENSIONS + (HEIF if importlib.util.find_spec('pillow_heif') else ())


def images_below(directory: str) -> tuple[list[tuple[str, int]], dict[str, int]]:
  """Returns the files below a directory; links are followed once, hidden files left out.

  Returns:
    ([(path, size in bytes)] of images, unsorted; {extension: number} of other files).

  Raises:
    UserError: for a directory that cannot be listed.
  """
  found = _list(directory)
  names = (os.path.join(directory, image) for image in found.images)
  return list(zip(names, found.sizes, strict=True)), found.ignored


def images_in(
  root: str,
  directory: str,
  names: list[str],
  pool: concurrent.futures.Executor,
  keep: bool = True,
) -> Listing:
  """Returns the images below some folders of a directory.

  Args:
    root: absolute; paths are below it.
    directory: where the folders are, in the root or the root itself.
    names: of the folders.
    pool: threads that list them.
    keep: use what an earlier call found, and keep what this one finds. Where the cache
      cannot be written, the next call lists again.

  Raises:
    UserError: for a folder that cannot be listed.
  """
  inside = [os.path.join(directory, name) for name in names]
  place = _place(root, directory)
  kept = (_load(place) if keep else None) or Listing([], [], [], {})
  known = [kept.folders.get(name) for name in names]
  same = list(pool.map(_holds, inside, known))
  if all(same) and list(kept.folders) == names:
    return kept
  changed = [i for i, holds in enumerate(same) if not holds]
  listed = list(pool.map(_list, [inside[i] for i in changed]))
  found = dict(zip(changed, listed, strict=True))
  out = _merged(root, directory, names, same, kept, found)
  # Unless all that is new will be listed again anyway.
  if keep and (not changed or any(None not in x.folders.values() for x in listed)):
    _save(place, out)
  return out


def _merged(root, directory, names, same, kept, found: dict[int, Found]) -> Listing:
  """Returns what was kept of the folders that are the same, and what was found."""
  place_of = {name: i for i, name in enumerate(names) if same[i]}
  now = [place_of.get(name) for name in kept.folders]
  columns = zip(kept.paths, kept.sizes, kept.places, strict=True)
  rows = [(path, size, now[i]) for path, size, i in columns if now[i] is not None]
  folders = {name: kept.folders.get(name) for name in names}
  for i, one in found.items():
    prefix = os.path.join(directory, names[i], '')[len(os.path.join(root, '')) :]
    files = list(zip(one.images, one.sizes, strict=True))
    rows += [(prefix + image, size, i) for image, size in files]
    some = files[0] if files else ('', 0)
    folders[names[i]] = [one.folders, *some, one.ignored]
  rows.sort(key=lambda row: hashlib.sha256(os.fsencode(row[0])).digest())
  return Listing(*([row[column] for row in rows] for column in range(3)), folders)


def is_hidden(name: str) -> bool:
  """Whether a file or folder is not the user's own: dot files, what macOS adds to zips."""
  return name.startswith('.') or name == '__MACOSX'


def is_folder(entry: os.DirEntry) -> bool:
  """Whether an entry is a folder or a link to one; False for a link to itself."""
  try:
    return entry.is_dir()
  except OSError:
    return False


def files_in(directory: str) -> Counter:
  """Returns {extension: number} of the files directly in a directory; not of hidden ones."""
  with contextlib.suppress(OSError), os.scandir(directory) as entries:
    there = [e.name for e in entries if not is_hidden(e.name) and not is_folder(e)]
    return Counter(map(_extension, there))
  return Counter()


def _extension(name: str) -> str:
  return os.path.splitext(name)[1].lower() or 'without extension'


def _list(directory: str) -> Found:
  found = Found([], [], {}, Counter())
  todo, seen, known = [''], set(), extensions()
  while todo:
    below = todo.pop()
    here = os.path.join(directory, below) if below else directory
    real = os.path.realpath(here)
    if real in seen:
      continue  # a link to a folder above it
    seen.add(real)
    prefix = os.path.join(below, '')
    try:
      before = time.time_ns()
      state = _state(here)
      # Some mounted buckets have no times of directories.
      if not 0 < min(state[1:]) <= max(state[1:]) < before - _SETTLED:
        state = None
      with os.scandir(here) as entries:
        for entry in entries:
          name = entry.name
          if is_hidden(name):
            continue
          if is_folder(entry):
            todo.append(prefix + name)
          elif name.lower().endswith(known):
            found.images.append(prefix + name)
            found.sizes.append(_size(entry))
          else:
            found.ignored[_extension(name)] += 1
            if entry.is_symlink():
              state = None  # to a folder, perhaps, that is mounted later
    except OSError as error:
      raise UserError(f'folder: {here}: {error.strerror}.') from None
    found.folders[below] = state
  return found


def _state(directory: str) -> list[int]:
  """Returns what changes with a directory's entries, times in ns.

  The time of modification can be set, and archives and rsync do; that of change cannot.
  The number shows that two directories changed places.
  """
  found = os.stat(directory)
  return [found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _size(file) -> int:
  """Returns the size of a file, an `os.DirEntry` or a path."""
  try:
    stat = os.stat(file) if isinstance(file, str) else file.stat()
    return stat.st_size
  except OSError:
    return 0  # a dangling link: reported when it is read


def _holds(directory: str, known: list | None) -> bool:
  """Whether what is known of a folder, in `Listing.folders`, is still so."""
  if known is None:
    return False
  folders, some, size, _ = known
  try:
    for below, state in folders.items():
      if _state(os.path.join(directory, below)) != state:
        return False
  except OSError:
    return False
  return not some or _size(os.path.join(directory, some)) == size


# A kept listing is a line with the SHA-256 of the rest, which is JSON.


def _place(root: str, directory: str) -> str:
  # The key depends on all that decides the content: also on the format, 2, and on which
  # files are images.
  about = '\0'.join([root, directory, '2', *extensions()])
  key = hashlib.sha256(os.fsencode(about)).hexdigest()[:16]
  return str(paths.cache_dir() / 'listings' / f'{key}.json')


def _load(place: str) -> Listing | None:
  """Returns a kept listing; None if it is missing or damaged."""
  try:
    with open(place, 'rb') as file:
      digest, text = file.readline().strip(), file.read()
  except OSError:
    return None
  return Listing(*json.loads(text)) if digest == _digest(text) else None


def _save(place: str, listing: Listing) -> None:
  text = json.dumps(listing, separators=(',', ':')).encode()
  # Not the process's id: on a pod every host may have the same.
  temporary = f'{place}.{uuid.uuid4().hex}.tmp'
  try:
    os.makedirs(os.path.dirname(place), exist_ok=True)
    with open(temporary, 'wb') as file:
      file.write(_digest(text) + b'\n' + text)
    os.replace(temporary, place)
  except OSError:
    with contextlib.suppress(OSError):
      os.remove(temporary)


def _digest(text: bytes) -> bytes:
  return hashlib.sha256(text).hexdigest().encode()
