"""Which of a model's classes are right for each class of a data set.

Both have lists of classes, of different length and order: ImageNet-A and -R hold 200 of
ImageNet's 1,000, ImageNet-V2 names its folders by number, a head of ImageNet-21k knows
more than ImageNet-1k asks for, and a class of ObjectNet stands for several of ImageNet's.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax import imagenet
from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.evaluators import class_files, class_names

NUMBER, NAME, KNOWN = 'number', 'name', 'known'
DATA, ALL = 'data', 'all'


class Classes(NamedTuple):
  """The classes of a model: K names or WordNet ids, '' where unknown, or None; and K."""

  names: Sequence[str] | None
  number: int


class Match(NamedTuple):
  """How predictions of a model are compared with the labels of a data set.

  Attributes:
    columns: int [m], the model's classes of which a prediction is one.
    right: bool [k, m], whether a column is right for a class of the data; the images of
      a class that has none are left out.
  """

  columns: np.ndarray
  right: np.ndarray

  @property
  def one_to_one(self) -> bool:
    """Whether the columns are the data's classes, in their order."""
    k, m = self.right.shape
    return k == m and bool(np.all(self.right == np.eye(k, dtype=bool)))


def check(where: str, value: str, _=None) -> None:
  """Refuses an unknown `class_map`; see `config.bind`."""
  known = [NUMBER, NAME, KNOWN, *imagenet.LISTS]
  if value not in known and not Path(value).expanduser().exists():
    raise UserError(
      f'{where}={value!r} is neither one of {known} nor an existing file or folder.'
      f'{did_you_mean(value, known)}'
    )


def check_among(where: str, value: str, _=None) -> None:
  """Refuses an unknown `among`; see `config.bind`."""
  choose(where, value, [DATA, ALL, *imagenet.LISTS])


def match(
  source, model: Classes, class_map: str | None = None, among: str | None = None
) -> tuple[Match | None, str]:
  """Returns (how the classes of a data set are matched with a model's, a remark or '').

  None where they are the same, or are compared by number, class 0 with class 0.

  Args:
    source: of the data, a `data.sources.base.Source`.
    class_map: how: 'name', by WordNet id or name; 'known', likewise, and images of classes
      that the model does not have are left out; 'number'; a name of `imagenet.LISTS`, by
      WordNet id, of a model that does not say that these are its classes; or a path, see
      `class_files`. None: whichever fits, in this order: the mapping that lies beside
      the images of ObjectNet, WordNet ids or names, the numbers that name the folders of
      ImageNet-V2, and by number where both have equally many classes.
    among: of which classes a prediction is one: 'data', those that the data has, 'all',
      the model's, or a list of `imagenet.LISTS`. None: 'data' where a part of the model's
      classes is matched by WordNet ids; 'imagenet_a' and 'imagenet_r' for the data sets of
      these names in TFDS, which declare all 1,000 classes; else 'all'.

  Raises:
    UserError: for a class that the model does not have, or classes that cannot be
      compared.
  """
  if class_map is not None:
    check('class_map', class_map)
  if among is not None:
    check_among('among', among)
  if class_map in imagenet.LISTS:
    model, class_map = _told(class_map, model), class_files.beside(source.name) or NAME
  among = among or _published(source.name)
  names = source.class_names
  if class_map is None and _same(names, model):
    if among in (None, DATA, ALL):
      return None, ''
    class_map = NAME
  path = class_files.beside(source.name) if class_map is None else class_map
  if path not in (None, NAME, KNOWN, NUMBER):
    rows, remark = class_files.rows(path, source.name, names, *model)
    return _matched(rows, model, among or ALL, remark, source.name)
  rows = None
  if class_map != NUMBER:
    rows, remark = _by_name(source.name, names, model, class_map)
  if rows is None:
    if among not in (None, ALL):
      raise UserError(
        f'among={among!r}: the classes of {source.name} are compared with the model by '
        f'number, so which of them those are is not known.{_hint(model)}'
      )
    return None, _by_number(source, model, class_map == NUMBER)
  partly = class_names.are_ids(class_names.ids(names)) and len(rows) < model.number
  return _matched(rows, model, among or (DATA if partly else ALL), remark, source.name)


def _same(names: Sequence[str] | None, model: Classes) -> bool:
  """Whether all of the model's classes that have names are those, in this order."""
  if names is None or model.names is None:
    return False
  named = model.names[: len(names)]
  rest = model.names[len(names) :]
  return not any(rest) and class_names.ids(names) == class_names.ids(named)


def _told(name: str, model: Classes) -> Classes:
  number = imagenet.LISTS[name][1]
  if model.number != number:
    raise UserError(
      f'class_map={name!r} has {number:,} classes, the model {model.number:,}.'
    )
  return Classes(imagenet.wordnet_ids(name), number)


def _hint(model: Classes) -> str:
  """Returns how to say that the model's classes are one of ImageNet's lists, or ''."""
  for name, (_, number) in imagenet.LISTS.items():
    if number == model.number:
      return f' class_map={name!r} says that the model has the classes of that list.'
  return ''


def _published(source: str) -> str | None:
  """Returns the classes that a data set of TFDS is of, where it declares others."""
  scheme, *parts = re.split('[:/]', source)  # a name with its version, or a directory
  known = [x for x in parts if x in ('imagenet_a', 'imagenet_r')]
  return known[-1] if scheme == 'tfds' and known else None


def _by_name(source, names, model, how: str | None) -> tuple[list | None, str]:
  """Returns ([[the model's class] for each of the data's], a remark), or (None, '').

  Raises:
    UserError: where only some of the names match, unless `how` is 'known', or none do and
      it is 'name' or 'known'.
  """
  if names is None or model.names is None:
    if how is not None:
      whose = source if names is None else 'the model'
      raise UserError(f'class_map: {whose} does not name its classes.{_hint(model)}')
    return _by_numbers_as_names(names, model)
  ways = []
  for read in (class_names.ids, class_names.words):
    theirs = read(names)
    found = class_names.find(theirs, read(model.names))
    lost = [name for name, i in zip(theirs, found, strict=True) if i is None]
    ways.append((lost, found, 'WordNet id' if class_names.are_ids(theirs) else 'name'))
  lost, found, what = min(ways, key=lambda way: len(way[0]))
  rows = [[] if i is None else [i] for i in found]
  if not lost:
    which = f"the data has {len(found):,} of the model's {model.number:,}"
    if len(found) == model.number:
      which = 'they are the same'
      if found != sorted(found):
        which = 'their order differs'
    return rows, f'Classes are matched by {what}: {which}.'
  if how == KNOWN and len(lost) < len(names):
    return rows, (
      f'Classes are matched by {what}; {len(lost):,} of {len(names):,} are left out, as '
      f'the model does not have them: {_some(lost)}.'
    )
  numbered = _by_numbers_as_names(names, model)
  if numbered[0] is not None and len(lost) == len(names):
    return numbered
  both_ids = all(class_names.are_ids(class_names.ids(x)) for x in (names, model.names))
  if how is not None or len(lost) < len(names) or both_ids:
    raise UserError(
      f'{source}: the model has no class {class_names.shown(lost[0])}; {len(lost):,} of '
      f"{len(names):,} are not among its {model.number:,}. class_map='known' leaves them "
      "out, class_map=FILE says which they are, class_map='number' takes class 0 for "
      f'class 0.{did_you_mean(lost[0], model.names)}'
    )
  return None, ''


def _by_numbers_as_names(names, model: Classes) -> tuple[list | None, str]:
  """As `_by_name`, of names such as '0', '1', '10', '2', where the order is another."""
  numbers = class_names.numbers(names or (), model.number)
  if numbers is None or numbers == sorted(numbers):
    return None, ''
  return [[i] for i in numbers], "The data names its classes by the model's numbers."


def _some(names: Sequence[str]) -> str:
  more = f' and {len(names) - 3:,} more' if len(names) > 3 else ''
  return ', '.join(map(class_names.shown, names[:3])) + more


def _by_number(source, model: Classes, meant: bool) -> str:
  """Returns a remark on classes that are compared by number, '' if there is none.

  Raises:
    UserError: unless that is meant, or there are equally many, or the data's have no
      names.
  """
  names, k, K = source.class_names, source.num_classes, model.number
  if k is not None and (k > K or (k < K and names and not meant)):
    first = " class_map='number' takes class 0 for class 0." if k < K else ''
    raise UserError(
      f'{source.name} has {k} classes, the model {K}'
      f'{"" if model.names else ", without names"}: they cannot be compared. Choose other '
      'data, or train a head: vit_jax train --config=finetune:weights=SOURCE.'
      f'{first}{"" if model.names or k > K else _hint(model)}'
    )
  if names and model.names and not meant:
    return (
      f'Note: the model names its classes {list(model.names)[:3]}..., the data '
      f'{list(names)[:3]}...; they are compared by number.'
    )
  if k is not None and k < K:
    return f"The data's {k:,} classes are compared with the first of the model's {K:,}."
  return ''


def _matched(rows, model, among: str, remark: str, source: str) -> tuple[Match, str]:
  """Returns the match of [[the model's classes] for each of the data's], and a remark."""
  full = np.zeros((len(rows), model.number), bool)
  for row, found in zip(full, rows, strict=True):
    row[found] = True
  if among in (DATA, ALL):
    columns = np.flatnonzero(full.any(0)) if among == DATA else np.arange(model.number)
    # Where they are the data's classes, in their order: tables are in it.
    if np.all(full.sum(1) == 1) and len(columns) == len(full) == full.any(0).sum():
      columns = full.argmax(1)
  else:
    wanted = imagenet.wordnet_ids(among)
    columns = class_names.find(wanted, class_names.ids(model.names or ['']))
    lost = [x for x, i in zip(wanted, columns, strict=True) if i is None]
    columns = [i for i in columns if i is not None]
    if lost and (all(rows) or not columns):
      raise UserError(
        f'among={among!r}: the model has no class {class_names.shown(lost[0])}; '
        f'{len(lost):,} of {len(wanted):,} are missing.{_hint(model)}'
      )
  right = full[:, columns]
  if not right.any():
    raise UserError(f'among={among!r}: {source} has none of these classes.')
  if len(columns) < model.number:
    remark += f' Predictions are among {len(columns):,} of the {model.number:,}.'
  return Match(np.asarray(columns), right), remark
