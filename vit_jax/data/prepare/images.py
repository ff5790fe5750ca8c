"""A person's images: folders of classes, tars, or a list of labels."""

import dataclasses
import os
import re
from collections.abc import Iterator

from vit_jax.data.prepare import folders, manifest, tars
from vit_jax.data.prepare.entries import Entry
from vit_jax.data.prepare.plan import LeftOut, Place, Plan, fraction, number
from vit_jax.data.sources.listing import extensions
from vit_jax.errors import UserError

_SHARE = re.compile(r'([A-Za-z]\w*)=(\d+(?:\.\d+)?)%')
# Files of a manifest that one worker reads in one go.
_FILES = 1000
# More numbers than this are names, not numbers of classes.
_MAX_CLASSES = 1_000_000


@dataclasses.dataclass(frozen=True)
class Shares:
  """Splits by a hash of the file's key: `bounds` are their upper ends in (0, 1].

  A file keeps its split when others are added.
  """

  names: tuple[str, ...]
  bounds: tuple[float, ...]

  def __call__(self, key: str) -> str:
    x = fraction(key)
    return next(n for n, b in zip(self.names, self.bounds, strict=True) if x < b)


@dataclasses.dataclass(frozen=True)
class _Folders:
  """The class is the folder, the split a folder above it, or by shares."""

  shares: Shares | None

  def __call__(self, entry: Entry) -> Place:
    above, _, label = entry.folder.rpartition('/')
    if entry.read and not entry.path.lower().endswith(extensions()):
      raise LeftOut('not an image by its name')
    if not label:
      raise LeftOut('in no folder, so of no class')
    split = next(filter(folders.split_of, above.split('/')), None)
    if self.shares is None:
      return Place(entry.path, split or 'train', (label,))
    if split:
      raise UserError(
        f'{entry.path} is in a folder of the split {split!r} already: leave --split out, '
        'or give the folder of one split as --from.'
      )
    return Place(entry.path, self.shares(entry.path), (label,))


@dataclasses.dataclass(frozen=True)
class _Listed:
  """Labels, and splits if it has them, are those of a manifest."""

  rows: dict[str, manifest.Row]
  shares: Shares | None

  def __call__(self, entry: Entry) -> Place:
    row = self.rows.get(entry.path)
    if row is None or entry.read is None:
      raise LeftOut('not in the list of labels')
    split = self.shares(entry.path) if self.shares else row.split or 'train'
    return Place(entry.path, split, row.labels)

  def expected(self) -> Iterator[tuple[str, str]]:
    """Yields the (split, key) of every row."""
    for key, row in self.rows.items():
      yield self.shares(key) if self.shares else row.split or 'train', key


def plan(
  sources: list[str],
  name: str,
  *,
  version: str = '1.0.0',
  split: str | None = None,
  max_side: int | None = None,
  ranges: bool = False,
) -> Plan:
  """Returns the plan of a data set.

  Args:
    sources: one folder; or tars; or a manifest (.csv, .tsv, .jsonl), followed by the
      folder or tars that its paths are in, if that is not the manifest's own folder.
    name: of the data set.
    version: of the data set to write.
    split: 'train=90%,val=10%', by a hash of the file's name; by default folders or
      tars above the classes that are named as splits are (train, val, test, ...), or the
      manifest's column, decide, and without them all is 'train'.
    max_side: see `Plan`.
    ranges: for many workers, see `tars.pieces`.

  Raises:
    UserError: for missing, empty or damaged input and wrong arguments.
  """
  shares = _shares(split) if split else None
  about = dict(name=name, version=version, settings=(split or '',), upright=True)
  about['max_side'] = max_side
  if manifest.is_manifest_name(sources[0]):
    return _listed(sources[0], sources[1:], shares, about, ranges)
  pieces = tuple(_pieces(sources, ranges, bare=False))
  description = f'Images from {", ".join(map(_base, sources))}.'
  return Plan(pieces=pieces, place=_Folders(shares), description=description, **about)


def _listed(path, sources, shares, about, ranges) -> Plan:
  rows, multi_label = manifest.read(path)
  if shares and any(row.split for row in rows.values()):
    raise UserError(f'{path} has a column of splits: leave --split out.')
  if not sources or (len(sources) == 1 and os.path.isdir(sources[0])):
    root = sources[0] if sources else os.path.dirname(os.path.abspath(path))
    pieces = _files(root, [row.path for row in rows.values()], path)
  else:
    pieces = _pieces(sources, ranges, bare=True)
  labels = {label for row in rows.values() for label in row.labels}
  place = _Listed(rows, shares)
  return Plan(
    pieces=tuple(pieces),
    place=place,
    class_names=class_names(labels, path),
    splits=tuple(sorted({split for split, _ in place.expected()})),
    multi_label=multi_label,
    description=f'Images with the labels of {_base(path)}.',
    **{**about, 'settings': (*about['settings'], *map(str, sorted(rows.values())))},
  )


def class_names(labels: set[str], where: str) -> tuple[str, ...]:
  """Returns a manifest's class names: sorted, but integers keep their value.

  Labels '0', '2' are classes 0 and 2 of three, so that numbers stay what they were.
  """
  if not labels:
    raise UserError(f'{where}: no row has a label.')
  if not all(re.fullmatch('0|[1-9][0-9]*', label) for label in labels):
    return number(labels)
  highest = max(map(int, labels))
  if highest >= _MAX_CLASSES:
    raise UserError(
      f'{where}: the label {highest} would be class {highest} of {highest + 1}: write a '
      'name, or number the classes from 0.'
    )
  return tuple(map(str, range(highest + 1)))


def _shares(text: str) -> Shares:
  names, percents = [], []
  for part in text.split(','):
    match = _SHARE.fullmatch(part.strip())
    if not match or match[1] in (*names, 'all') or not float(match[2]):
      raise UserError(
        f"--split {text!r}: {part!r} is not understood. Example: 'train=90%,val=10%'."
      )
    names.append(match[1])
    percents.append(float(match[2]))
  if abs(sum(percents) - 100) > 1e-9:
    raise UserError(
      f'--split {text!r} is {sum(percents):g} % in total: expected 100 %.'
    )
  bounds = [sum(percents[: i + 1]) / 100 for i in range(len(percents))]
  return Shares(tuple(names), (*bounds[:-1], 1.0))


def _pieces(sources: list[str], ranges: bool, *, bare: bool) -> list:
  """Returns the pieces of a folder or of tars.

  Args:
    bare: names in tars as they are, which a manifest has; else below the tar's name.
  """
  if len(sources) == 1 and os.path.isdir(sources[0]):
    return folders.pieces(sources[0], ranges=ranges)
  for source in sources:
    if '://' not in source and not os.path.exists(source):
      raise UserError(f'{source}: no such file or folder.')
    if not tars.is_name(source):
      raise UserError(
        f'{source}: expected one folder, or tars ({" ".join(tars.ENDINGS)}), or a '
        f'list of labels first ({" ".join(manifest.ENDINGS)}).'
      )
  names = [tars.stem(source) for source in sources]
  if not bare and len(set(names)) < len(names):
    raise UserError(f'Two of the tars have the same name: {names}.')
  return [
    piece
    for source in sources
    for piece in tars.pieces(source, '' if bare else None, ranges=ranges)
  ]


def _files(root: str, paths: list[str], where: str) -> list[folders.Files]:
  sizes = [_size(os.path.join(root, path)) for path in paths]
  if all(size is None for size in sizes):
    raise UserError(
      f'{where}: none of its {len(paths)} files is there; the first is '
      f'{os.path.join(root, paths[0])}. Paths are relative to {root}; another folder, or '
      'tars, can follow: --from LABELS FOLDER.'
    )
  sizes = [size or 0 for size in sizes]  # a missing file is reported as broken
  return [
    folders.Files(root, '', tuple(paths[i : i + _FILES]), tuple(sizes[i : i + _FILES]))
    for i in range(0, len(paths), _FILES)
  ]


def _size(path: str) -> int | None:
  try:
    return os.path.getsize(path)
  except OSError:
    return None


def _base(path: str) -> str:
  return os.path.basename(path.rstrip('/'))
