"""A person's folder of images, one folder per class."""

import concurrent.futures
import logging
import os
from collections import Counter

import numpy as np

from vit_jax.data import contents, image_file
from vit_jax.data.sources import listing, shards, splits
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.errors import BadImage, UserError


class Folder(Source):
  """ROOT/SPLIT/CLASS/**/IMAGE, or ROOT/CLASS/**/IMAGE as one split, 'train'.

  Classes are the names of the folders, sorted; folders inside a class belong to it.
  A split's images are in a fixed pseudo-random order, that of a hash of their path
  below the root: 'train[:90%]' holds every class although files are sorted by class,
  and adding a file hardly moves the others. Hidden files are left out, and files that
  are not images by their extension are counted (`left_out`). Symbolic links are followed.

  Args:
    target: ROOT.
    split: a split expression, see `splits`.
    keep_listing: do not list folders again that no file was added to or removed from, see
      `listing`. For file systems that do not keep the times of directories: False.
  """

  exif = True

  def __init__(self, target: str, split: str, *, keep_listing: bool = True):
    root = os.path.abspath(os.path.expanduser(target))
    if not os.path.isdir(root):
      raise UserError(
        f'folder: there is no directory {root!r}. Expected DIR/train/CLASS/IMAGE '
        '(and val or test), or DIR/CLASS/IMAGE.'
      )
    self.name = f'folder:{target}'
    self._root = root
    self._pool = concurrent.futures.ThreadPoolExecutor(shards.READERS)
    directories = _split_directories(root)
    self.class_names = _class_names(directories)
    self.num_classes = len(self.class_names)
    self.left_out, self.misplaced = Counter(), Counter()
    wanted = []
    for name, start, stop in splits.parse(split):
      name = splits.canonical(name)
      known = name in splits.SYNONYMS  # else a misspelling, which check_name answers
      if known and name not in directories and list(directories) == ['train']:
        raise UserError(
          f'{self.name} has no folder for the split {name!r}, only images to train on. '
          "To keep a tenth of them for evaluation, take the splits 'train[:90%]' and "
          "'train[90%:]'; to train, --config='folder:data=FOLDER,train=train[:90%],"
          "val=train[90%:]'."
        )
      splits.check_name(name, directories, self.name)
      wanted.append(f'{name}[{start}:{stop}]')
    found = {
      name: self._scan(directories[name], keep_listing)
      for name in {part.split('[')[0] for part in wanted}
    }
    sizes = {name: len(found.get(name, ())) for name in directories}
    rows = [
      found[name][i]
      for name, indices in splits.select('+'.join(wanted), sizes, self.name)
      for i in indices.tolist()
    ]
    self._paths = [path for path, _, _ in rows]
    self.labels = np.array([label for _, label, _ in rows], np.int64)
    # As `str` shows a row, in two thirds of the time.
    shown = [f'({path!r}, {label}, {size})' for path, label, size in rows]
    self.fingerprint = fingerprint((self.class_names, *shown))

  def __len__(self) -> int:
    return len(self._paths)

  def read(self, indices: np.ndarray) -> list[dict]:
    files = self._pool.map(self._content, [self.name_of(i) for i in indices])
    return [
      {**content, 'label': int(label)}
      for content, label in zip(files, self.labels[indices], strict=True)
    ]

  def name_of(self, index: int) -> str:
    return os.path.join(self._root, self._paths[index])

  def _content(self, path: str) -> dict:
    try:
      return {'image': image_file.read(path, self.max_file_bytes)}
    except BadImage as error:
      return {'error': str(error)}

  def _scan(self, directory: str, keep_listing: bool) -> list[tuple[str, int, int]]:
    """Returns a split's (path below the root, label, size in bytes) in its order."""
    label_of = {name: i for i, name in enumerate(self.class_names)}
    folders = _folders(directory)
    unknown = [name for name in folders if name not in label_of]
    if unknown:
      raise UserError(
        f'{self.name}: {directory} has folders that are not classes of the train split: '
        f'{_some(unknown)}.'
      )
    paths, sizes, places, states = listing.images_in(
      self._root, directory, folders, self._pool, keep_listing
    )
    left_out = [Counter(ignored) for *_, ignored in states.values()]
    self.left_out.update(sum(left_out, Counter()))
    self.misplaced.update(listing.files_in(directory))
    if empty := sorted(set(range(len(folders))) - set(places)):
      where = [os.path.join(directory, folders[i]) for i in empty]
      there = sum((left_out[i] for i in empty), Counter())
      raise UserError(
        f'{self.name}: no image in {_some(where)}{contents.only(there)}. Remove the '
        f'folder, or add images ({" ".join(sorted(listing.extensions()))}).'
        f'{contents.how_to_convert(there)}'
      )
    labels = [label_of[name] for name in folders]
    return list(zip(paths, [labels[i] for i in places], sizes, strict=True))


def _split_directories(root: str) -> dict[str, str]:
  """Returns {split: directory}."""
  out: dict[str, str] = {}
  for name in _folders(root):
    canonical = splits.canonical(name)
    if canonical not in splits.SYNONYMS:
      continue
    if canonical in out:
      raise UserError(
        f'folder:{root}: both {os.path.basename(out[canonical])!r} and {name!r} are '
        f'folders for the split {canonical!r}: keep one.'
      )
    out[canonical] = os.path.join(root, name)
  others = [
    name for name in _folders(root) if splits.canonical(name) not in splits.SYNONYMS
  ]
  if out and others:
    logging.getLogger(__name__).warning(
      'folder:%s: left out, as it has folders for splits: %s', root, _some(others)
    )
  return out or {'train': root}


def _class_names(directories: dict[str, str]) -> list[str]:
  """Returns the sorted classes: the train split's, where there is one."""
  every = [directories['train']] if 'train' in directories else directories.values()
  names = sorted({name for directory in every for name in _folders(directory)})
  if not names:
    raise UserError(
      f'folder: {" and ".join(every)} has no class folders. Needed is one folder per '
      'class with its images inside.'
    )
  return names


def _folders(directory: str) -> list[str]:
  try:
    with os.scandir(directory) as entries:
      return sorted(
        e.name
        for e in entries
        if listing.is_folder(e) and not listing.is_hidden(e.name)
      )
  except OSError as error:
    raise UserError(f'folder: {directory}: {error.strerror}.') from None


def _some(names: list[str]) -> str:
  more = f' and {len(names) - 5} more' if len(names) > 5 else ''
  return ', '.join(map(repr, names[:5])) + more
