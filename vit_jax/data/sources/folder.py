"""A folder of images with one folder per class. Extensions tell which files are images."""

import functools
import hashlib
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vit_jax.data import image_file
from vit_jax.data.features import ImageFeature
from vit_jax.data.sources import splits
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.errors import BadImage, UserError

# Extensions of the formats that TensorFlow or Pillow reads, in lower case.
EXTENSIONS = (
  *('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.gif', '.bmp', '.webp', '.avif', '.jp2'),
  *('.tif', '.tiff', '.ppm', '.pgm', '.pbm', '.pnm', '.tga'),
)

# Extensions of photographs of many phones, which are readable if pillow-heif is installed.
HEIF = ('.heic', '.heif')


class Folder(Source):
  """ROOT/SPLIT/CLASS/**/IMAGE, or ROOT/CLASS/**/IMAGE as one split, 'train'.

  Classes are the sorted names of the folders; folders inside a class belong to it. If images
  are in no folder, ROOT/SPLIT/IMAGE or ROOT/IMAGE, they have no labels.

  The images of a split are in a fixed pseudo-random order, by a hash of their path below
  the root. So 'train[:90%]' holds every class although files are sorted by class, and an
  added file hardly moves the others. Hidden files are skipped. Files whose extension is
  not that of an image are counted in `remarks`. Symbolic links are followed.

  Args:
    target: ROOT.
    split: a split expression, see `splits`.
  """

  # The name of the source in messages.
  SCHEME, BELOW, RECIPE = 'folder', 'CLASS/IMAGE', 'folder:data=FOLDER'
  # The part of the source that a split is.
  PLACE = 'folder'
  exif = True

  def __init__(self, target: str, split: str):
    root = os.path.abspath(os.path.expanduser(target))
    if not os.path.isdir(root):
      raise UserError(
        f'{self.SCHEME}: no such directory: {root!r}, expected DIR/train/{self.BELOW} '
        f'(and val or test), or DIR/{self.BELOW}.'
      )
    self.name = f'{self.SCHEME}:{target}'
    self._root = root
    directories = split_directories(root)
    self._set_classes(directories)
    left_out, misplaced = Counter(), Counter()
    split = splits.with_canonical_names(split)
    names = dict.fromkeys(name for name, *_ in splits.parse(split))
    for name in names:
      self._check_split(name, directories)
    rows = {name: self._scan(directories[name], left_out, misplaced) for name in names}
    remarks = [
      f'{where}: {describe(counts)}'
      for where, counts in (('left out', left_out), ('in no class', misplaced))
      if counts
    ]
    if [*self.features] == ['image']:
      remarks.append('no labels, which need a folder per class, CLASS/1.jpg')
    self.remarks = '; '.join(remarks)
    self._select({name: rows.get(name, []) for name in directories}, split)
    if 'label' not in self.features:
      self.labels = None

  def _check_split(self, name: str, names: Iterable[str]) -> None:
    if name in ('validation', 'test') and [*names] == ['train']:
      raise UserError(
        f'{self.name} has no {self.PLACE} for the split {name!r}, only images to train on: '
        "use the splits 'train[:90%]' and 'train[90%:]', with --config='"
        f"{self.RECIPE},train=train[:90%],val=train[90%:]'."
      )
    splits.check_name(name, names, self.name)

  def _set_classes(self, directories: dict[str, str]) -> None:
    if names := _class_names(directories):
      self.class_names, self.num_classes = names, len(names)
    else:
      self.features = {'image': ImageFeature()}

  def _select(self, rows: dict[str, list], split: str) -> None:
    """Sets the images and labels of a split expression.

    Args:
      rows: {split: [(path, label)]}.
    """
    sizes = {name: len(part) for name, part in rows.items()}
    chosen = [
      row
      for name, first, end in splits.ranges(split, sizes, self.name)
      for row in rows[name][first:end]
    ]
    self._paths = [path for path, _ in chosen]
    self.labels = np.array([label for _, label in chosen], np.int64)
    self.fingerprint = fingerprint(
      (self.class_names, os.fsencode('\0'.join(self._paths)), self.labels.tobytes())
    )

  def __len__(self) -> int:
    return len(self._paths)

  def read(self, indices: np.ndarray) -> list[dict]:
    return list(self._readers.map(self._example, indices))

  def _example(self, index: int) -> dict:
    try:
      return {'image': image_file.read(self.name_of(index)), **self._annotate(index)}
    except BadImage as error:
      return {'error': str(error)}

  def _annotate(self, index: int) -> dict:
    """Returns the features of an example other than its image."""
    return {} if self.labels is None else {'label': int(self.labels[index])}

  def name_of(self, index: int) -> str:
    return os.path.join(self._root, self._paths[index])

  def _scan(self, directory: str, left_out: Counter, misplaced: Counter) -> list:
    """Returns the (path below the root, label) of a split's images; counts other files."""
    label_of = {name: i for i, name in enumerate(self.class_names or [])}
    names = folders(directory)
    if unknown := [name for name in names if name not in label_of]:
      raise UserError(
        f'{self.name}: {directory} has folders that are not classes of the train split: '
        f'{some([*map(repr, unknown)])}.'
      )
    if self.class_names:
      misplaced.update(map(extension, _entries(directory)[1]))
    else:
      names, label_of = [''], {'': 0}
    places = [os.path.join(directory, name) for name in names]
    listed = list(self._readers.map(images_below, places))
    left_out.update(sum((others for _, others in listed), Counter()))
    if empty := [i for i, (images, _) in enumerate(listed) if not images]:
      others = sum((listed[i][1] for i in empty), Counter())
      there = f', only {describe(others)}' if others else ''
      way = 'Remove the folder, or add images'
      if not self.class_names:
        way = f'Put the images of each class into a folder, {directory}/CLASS/1.jpg'
      raise UserError(
        f'{self.name}: no image in {some([repr(places[i]) for i in empty])}{there}. {way} '
        f'({" ".join(sorted(extensions()))}).'
      )
    rows = []
    for name, place, (images, _) in zip(names, places, listed, strict=True):
      prefix = place[len(os.path.join(self._root, '')) :]
      rows += [(os.path.join(prefix, image), label_of[name]) for image in images]
    return sort_by_hash(rows)


def sort_by_hash(rows: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
  """Sorts (path, label) by a hash of the path: a fixed pseudo-random order."""
  return sorted(rows, key=lambda row: hashlib.sha256(os.fsencode(row[0])).digest())


def split_directories(root: str) -> dict[str, str]:
  """Returns {split: directory} of a folder."""
  out: dict[str, str] = {}
  others = []
  for name in folders(root):
    split = splits.canonical(name)
    if split not in splits.SYNONYMS:
      others.append(name)
    elif split in out:
      raise UserError(
        f'folder:{root}: {os.path.basename(out[split])!r} and {name!r} are both the split '
        f'{split!r}: keep one.'
      )
    else:
      out[split] = os.path.join(root, name)
  if out and others:
    logging.getLogger(__name__).warning(
      'folder:%s: left out, as it has folders for splits: %s',
      root,
      some([*map(repr, others)]),
    )
  return out or {'train': root}


def folders(directory: str) -> list[str]:
  """Returns the sorted names of the folders in a directory."""
  return sorted(_entries(directory)[0])


def _entries(directory: str) -> tuple[list[str], list[str]]:
  """Returns the names of the folders, and of the files, in a directory without hidden ones."""
  names: tuple[list[str], list[str]] = [], []
  try:
    with os.scandir(directory) as entries:
      for entry in entries:
        if not is_hidden(entry.name):
          try:
            names[not entry.is_dir()].append(entry.name)
          except OSError:
            # A link to itself counts as a file.
            names[1].append(entry.name)
  except OSError as error:
    raise UserError(f'folder: {directory}: {error.strerror}.') from None
  return names


def _class_names(directories: dict[str, str]) -> list[str]:
  """Returns the sorted classes: those of the train split if there is one, else of all."""
  every = [directories['train']] if 'train' in directories else [*directories.values()]
  return sorted({name for directory in every for name in folders(directory)})


@functools.cache
def extensions() -> tuple[str, ...]:
  """Returns the file name extensions of readable images, in lower case, with the dot."""
  return EXTENSIONS + (HEIF if importlib.util.find_spec('pillow_heif') else ())


def is_hidden(name: str) -> bool:
  """Whether a name begins with a dot, or is the folder that macOS adds to zips."""
  return name.startswith('.') or name == '__MACOSX'


def images_below(directory: str) -> tuple[list[str], Counter]:
  """Lists the files below a directory; follows links once and skips hidden files.

  Returns:
    (paths of images in no particular order, {extension: number} of the other files).
  """
  images, others = [], Counter()
  todo, visited, endings = [''], set(), extensions()
  while todo:
    prefix = todo.pop()
    here = os.path.join(directory, prefix)
    if (real := os.path.realpath(here)) in visited:
      # Skip a link to a folder above it.
      continue
    visited.add(real)
    inside, files = _entries(here)
    todo += [f'{prefix}{name}/' for name in inside]
    for name in files:
      if name.lower().endswith(endings):
        images.append(prefix + name)
      else:
        others[extension(name)] += 1
  return images, others


def extension(name: str) -> str:
  """Returns the extension of a file name in lower case, '.txt', or 'without extension'."""
  return os.path.splitext(name)[1].lower() or 'without extension'


def describe(counts: Mapping[str, int]) -> str:
  """Describes {extension: number} as '3 .heic, 2 .txt', and says how to read HEIC."""
  ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
  text = some([f'{n:,} {ending}' for ending, n in ordered])
  if set(counts) & set(HEIF):
    text += " (HEIC needs pillow-heif: pip install 'vit_jax[heif]')"
  return text


def some(names: Sequence[str]) -> str:
  """Returns the first five names, and the number of the others."""
  more = f' and {len(names) - 5} more' if len(names) > 5 else ''
  return ', '.join(names[:5]) + more
