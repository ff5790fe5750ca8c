"""What is prepared: the pieces, and what every file in them becomes."""

import concurrent.futures
import dataclasses
import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from vit_jax.data.prepare import checks, tars
from vit_jax.data.prepare.entries import Entry
from vit_jax.data.sources.base import fingerprint
from vit_jax.errors import BadImage, UserError

# What TFDS takes for a data set's name, and for a version.
_NAME = re.compile(r'[a-z][a-z0-9_]*')
_VERSION = re.compile(r'\d+\.\d+\.\d+')


class LeftOut(ValueError):
  """A file that does not belong to the data set; the message is the reason."""


class Place(NamedTuple):
  """Where a file goes: `key` names it for good and decides its place in the order."""

  key: str
  split: str
  labels: tuple[str, ...]


class Outcome(NamedTuple):
  """What became of an entry.

  Attributes:
    path: as the user knows the file.
    place: its place; None if the file is left out.
    data: an encoded image, or None.
    note: with data, what was changed, see `checks.check`; else the reason.
    kind: 'kept', 'broken', 'skipped', or 'class': a class's folder, maybe empty.
  """

  path: str
  place: Place | None
  data: bytes | None
  note: str
  kind: str


@dataclasses.dataclass(frozen=True)
class Plan:
  """A data set to prepare. It can be pickled: a cluster's workers get it whole.

  Attributes:
    name: the data set's, as in 'tfds:NAME'.
    version: 'X.Y.Z'.
    pieces: see `tars` and `folders`.
    place: returns the `Place` of an entry, or raises `LeftOut`. For a folder (an entry
      without `read`), the label counts. One that knows all files that there should be
      has `expected()`, their (split, key).
    class_names: in the order of their numbers; None: sorted, once all are read.
    splits: None: those that are met.
    multi_label: any number of labels for an image, instead of one.
    upright: turn photographs as their EXIF orientation says.
    max_side: of images in pixels; larger ones are made smaller. None: any.
    settings: what else decides the result, for the fingerprint.
    description, homepage, citation: for people.
  """

  name: str
  version: str
  pieces: tuple
  place: Callable[[Entry], Place]
  class_names: tuple[str, ...] | None = None
  splits: tuple[str, ...] | None = None
  multi_label: bool = False
  upright: bool = False
  max_side: int | None = None
  settings: tuple[str, ...] = ()
  description: str = ''
  homepage: str = ''
  citation: str = ''

  def __post_init__(self):
    if not _NAME.fullmatch(self.name):
      raise UserError(
        f'--name {self.name!r}: a data set\'s name is lower-case letters, digits and "_", '
        f"and begins with a letter, such as '{_suggestion(self.name)}'."
      )
    if not _VERSION.fullmatch(self.version):
      raise UserError(f'--version {self.version!r} is not X.Y.Z, such as 1.0.0.')
    if self.max_side is not None and self.max_side < 1:
      raise UserError(
        f'--max_side {self.max_side} must be a positive number of pixels, such as 512.'
      )

  @property
  def size(self) -> int:
    """Bytes of the input: about those of the data set, or more with `max_side`."""
    return sum(piece.size for piece in self.pieces if not getattr(piece, 'start', 0))

  def fingerprint(self) -> str:
    """Returns 16 hex digits that change with the input or what is made of it."""
    parts = [piece.identity() for piece in self.pieces]
    # Without one as before there was any: what was begun then can be resumed.
    side = [] if self.max_side is None else [f'max_side={self.max_side}']
    return fingerprint([self.name, self.version, *self.settings, *side, *parts])

  def outcomes(self, piece, skip: int = 0, threads: int = 1) -> Iterator[Outcome]:
    """Reads one piece, one outcome for every entry, in their order.

    Args:
      piece: one of `pieces`.
      skip: number of entries not to read again.
      threads: that check images; reading is in the caller's.
    """
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
      waiting: deque = deque()
      for i, entry in enumerate(piece.entries()):
        if i >= skip:
          waiting.append(self._submit(entry, pool))
        if len(waiting) > 4 * threads:
          yield _result(waiting.popleft())
      while waiting:
        yield _result(waiting.popleft())

  def _submit(self, entry: Entry, pool):
    if entry.error:
      return Outcome(entry.path, None, None, entry.error, 'broken')
    try:
      place = self.place(entry)
    except LeftOut as error:
      return Outcome(entry.path, None, None, str(error), 'skipped')
    if entry.read is None:
      return Outcome(entry.path, place, None, '', 'class')
    try:
      data = entry.read()
    except BadImage as error:
      return Outcome(entry.path, None, None, str(error), 'broken')
    except (OSError, *tars.DAMAGE) as error:
      reason = f'cannot be read: {getattr(error, "strerror", None) or error}'
      return Outcome(entry.path, None, None, reason, 'broken')
    how = self.upright, self.max_side
    return pool.submit(_checked, entry.path, place, data, *how)


def number(labels: Iterable[str]) -> tuple[str, ...]:
  """Returns the class names in the order of their numbers: sorted."""
  return tuple(sorted(set(labels)))


def fraction(key: str) -> float:
  """Returns a number in [0, 1) that depends on the key alone."""
  return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6]) / 2**48


def _checked(path: str, place: Place, data: bytes, *how) -> Outcome:
  try:
    kept, note = checks.check(data, *how)
  except BadImage as error:
    return Outcome(path, None, None, str(error), 'broken')
  return Outcome(path, place, kept, note, 'kept')


def _result(outcome) -> Outcome:
  return outcome if isinstance(outcome, Outcome) else outcome.result()


def _suggestion(name: str) -> str:
  words = re.findall('[a-z0-9]+', name.lower())
  return '_'.join(words).lstrip('0123456789_') or 'my_images'
