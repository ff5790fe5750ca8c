"""Matches the classes of a data set with the classes of a model.

The two lists may differ in length and order. ImageNet-A and -R have 200 of ImageNet's 1,000
classes, ImageNet-V2 names its folders by number, a head of ImageNet-21k has more classes
than ImageNet-1k, and a class of ObjectNet stands for several classes of ImageNet.

Classes are looked up by a key: the WordNet id where a name has one in `imagenet`, else the
name itself. The user has to say how to match classes that have neither in common.
"""

import collections
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax import imagenet
from vit_jax.check import check as check_type
from vit_jax.errors import UserError, choose, did_you_mean

NUMBER, NAME, KNOWN = 'number', 'name', 'known'
DATA, ALL = 'data', 'all'
# Share of class names that must agree with ours. Published lists differ in a few names, such
# as those of the two classes 'crane'.
_ALIKE = 0.95


class Classes(NamedTuple):
  """The classes of a model."""

  # K names or WordNet ids, '' where a name is unknown; None if the model names no class.
  names: Sequence[str] | None
  number: int  # K


class Match(NamedTuple):
  """How predictions of a model are compared with the labels of a data set.

  Attributes:
    columns: int [m], the classes of the model that may be predicted.
    right: bool [k, m], whether a column is right for a class of the data. Images of a class
      for which no column is right are left out.
  """

  columns: np.ndarray
  right: np.ndarray

  @property
  def one_to_one(self) -> bool:
    """Whether the columns are the classes of the data in the same order."""
    k, m = self.right.shape
    return k == m and bool(np.all(self.right == np.eye(k, dtype=bool)))


def check_class_map(where: str, value: str, _=None) -> None:
  """Checks a config's `class_map`."""
  words = [NUMBER, NAME, KNOWN, *imagenet.LISTS]
  if value not in words and not Path(value).expanduser().exists():
    raise UserError(
      f'{where}={value!r} is neither one of {words} nor an existing file.'
      f'{did_you_mean(value, words)}'
    )


def check_among(where: str, value: str, _=None) -> None:
  """Checks a config's `among`."""
  choose(where, value, [DATA, ALL, *imagenet.LISTS])


def match(
  source, model: Classes, class_map: str | None = None, among: str | None = None
) -> tuple[Match | None, str]:
  """Matches the classes of a data set with the classes of a model.

  Args:
    class_map: how to match classes.
      'name': by WordNet id or name.
      'known': the same, without the images of classes that the model lacks.
      'number': by number, class 0 with class 0.
      One of `imagenet.LISTS`: by WordNet id, for a model without class names that has the
      classes of this list.
      A JSON file: see `_read_map`.
      None: by WordNet id or name or, if the names of a side are unknown, by number.
    among: the classes of the model that may be predicted: 'data' for those that the data
      has, 'all', or one of `imagenet.LISTS`. None: the list of a test set of TFDS that has
      one in `imagenet.LISTS`; 'data' if the data has a part of the model's classes, matched
      by WordNet id; otherwise 'all'.

  Returns:
    (the match, a remark or ''). The match is None if the classes are the same, or if they
    are compared by number.
  """
  if class_map is not None:
    check_class_map('class_map', class_map)
  if among is not None:
    check_among('among', among)
  if class_map in imagenet.LISTS:
    number = imagenet.LISTS[class_map].number
    if model.number != number:
      raise UserError(
        f'class_map={class_map!r} has {number:,} classes, but the model has '
        f'{model.number:,}.'
      )
    model, class_map = Classes(imagenet.wordnet_ids(class_map), number), NAME
  scheme, *words = re.split(r'[:/]', source.name)
  lists = [name for name, x in imagenet.LISTS.items() if x.test_set in words]
  if scheme == 'tfds' and lists:
    among = among or lists[0]
  names, restricted = source.class_names, among not in (None, DATA, ALL)
  if class_map is None and not restricted and _are_same(names, model.names):
    return None, ''
  if class_map in (None, NAME, KNOWN):
    rows, remark = _look_up(source, model, class_map)
  elif class_map == NUMBER:
    rows, remark = None, ''
  else:
    rows, remark = _read_map(class_map, source, model)
    among = among or ALL
  if rows is None:
    if among not in (None, ALL):
      raise UserError(
        f'among={among!r} needs classes with names, but those of {source.name} are compared '
        f'with the model by number.{_hint(model)}'
      )
    return None, _compare_numbers(source, model, class_map == NUMBER)
  partly = _are_ids(ids(names)) and len(rows) < model.number
  return _build_match(
    rows, model, among or (DATA if partly else ALL), remark, source.name
  )


def _are_same(names, model_names) -> bool:
  """Whether a model has the classes of the data first, and does not name any others."""
  n = len(names or ())
  same = names and model_names and ids(names) == ids(model_names[:n])
  return bool(same) and not any(model_names[n:])


def _hint(model: Classes) -> str:
  """Suggests the list of ImageNet that has as many classes as the model, or returns ''."""
  for name, row in imagenet.LISTS.items():
    if row.number == model.number:
      return f' class_map={name!r} says that the model has the classes of that list.'
  return ''


def _look_up(source, model: Classes, how: str | None) -> tuple[list | None, str]:
  """Looks up the classes of the data among the model's; `how` is 'name', 'known' or None.

  Returns:
    ([[class of the model] for each class of the data], a remark); None in place of the list
    if the classes are compared by number.

  Raises:
    UserError: if the model lacks a class and `how` is not 'known', or lacks all of them, or
      if `how` is given and the names of a side are unknown.
  """
  names, K = source.class_names or (), model.number
  n, named = len(names), source.class_names is not None and model.names is not None
  if how is not None and not named:
    owner = 'the model' if source.class_names is not None else source.name
    raise UserError(f'class_map: {owner} does not name its classes.{_hint(model)}')
  places = find_indices(_keys(names), _keys(model.names)) if named else [None] * n
  missing = [name for name, i in zip(names, places, strict=True) if i is None]
  numbers = [int(name) for name in names if name.isdecimal()]
  if len(missing) == n == K and sorted(numbers) == list(range(K)):
    # Folders are sorted as text: '0', '1', '10', '2'.
    return [[i] for i in numbers], 'The names of the classes are numbers of the model.'
  if not named:
    return None, ''
  kind = 'WordNet id' if _are_ids(ids(names)) else 'name'
  remark = (
    f'Classes are matched by {kind}: {n - len(missing):,} of {n:,} are in the model.'
  )
  if how == KNOWN and 0 < len(missing) < n:
    remark += f' Others are left out: {", ".join(map(_describe, missing[:3]))}.'
    missing = []
  if not missing:
    return [[] if i is None else [i] for i in places], remark
  # If no class is in the model, a similar name is an accident.
  hint = did_you_mean(missing[0], model.names) if len(missing) < n else ''
  raise UserError(
    f'{source.name}: {len(missing):,} of its {n:,} classes are none of the {K:,} classes of '
    f"the model, such as {_describe(missing[0])}; set class_map='known' to leave them out, "
    f"'number', or a FILE that maps them.{hint}"
  )


def _read_map(path: str, source, model: Classes) -> tuple[list, str]:
  """Matches classes by a JSON file {"class of the data": [classes of the model]}.

  The classes of the model are WordNet ids, names or numbers. Images of a class with [] are
  left out. Returns the same as `_look_up`.
  """
  if (names := source.class_names) is None:
    raise UserError(f'class_map: {source.name} does not name its classes.')
  try:
    table = json.loads(Path(path).expanduser().read_text(encoding='utf-8'))
    check_type(path, table, dict[str, list[str | int]])
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(
      f'class_map: {path} is not JSON of {{"class": [classes]}}: {error}'
    ) from None
  if missing := [name for name in names if name not in table]:
    raise UserError(
      f'{path} lacks the class {missing[0]!r} of {source.name}, one of {len(missing):,}; '
      'give [] for classes to leave out.'
    )
  places: dict = {i: i for i in range(model.number)}
  for read in (list, _keys):
    places |= {name: i for i, name in enumerate(read(model.names or ()))}
  for value in (value for name in names for value in table[name]):
    if value not in places:
      raise UserError(
        f'{path}: the model has no class {_describe(str(value))} among its '
        f'{model.number:,}.{_hint(model)}'
      )
  rows = [[places[value] for value in table[name]] for name in names]
  if not any(rows):
    raise UserError(f'{path} leaves out all classes of {source.name}.')
  mapped = sum(map(bool, rows))
  return rows, f'{mapped:,} of {len(rows):,} classes are mapped by {path}.'


def _compare_numbers(source, model: Classes, explicit: bool) -> str:
  """Returns a remark on classes that are compared by number, or ''.

  Raises:
    UserError: if the data has more classes than the model, or if it has fewer classes with
      names and the comparison is not `explicit`.
  """
  names, k, K = source.class_names, source.num_classes, model.number
  if k is None or k == K:
    return ''
  if k > K or (names and not explicit):
    raise UserError(
      f'{source.name} has {k} classes, but the model has {K}: choose other data, set '
      'class_map, or train a head: vit_jax train --config=finetune:weights=SOURCE.'
      f'{"" if model.names or k > K else _hint(model)}'
    )
  return f"The data's {k:,} classes are compared with the first of the model's {K:,}."


def _build_match(
  rows, model, among: str, remark: str, source: str
) -> tuple[Match, str]:
  """Builds the match from [[classes of the model] for each class of the data].

  Adds a sentence on the classes that may be predicted to the remark, and returns both.
  """
  full = np.zeros((len(rows), model.number), bool)
  for row, places in zip(full, rows, strict=True):
    row[places] = True
  if among in (DATA, ALL):
    columns = np.flatnonzero(full.any(0)) if among == DATA else np.arange(model.number)
    # If the columns are exactly the classes of the data, keep the data's order, also in
    # tables.
    if np.all(full.sum(1) == 1) and len(columns) == len(full) == full.any(0).sum():
      columns = full.argmax(1)
  else:
    theirs = imagenet.wordnet_ids(among)
    places = find_indices(theirs, ids(model.names or ()))
    missing = [x for x, i in zip(theirs, places, strict=True) if i is None]
    columns = [i for i in places if i is not None]
    if missing and (all(rows) or not columns):
      raise UserError(
        f'among={among!r}: the model has no class {_describe(missing[0])}.{_hint(model)}'
      )
  right = full[:, columns]
  if not right.any():
    raise UserError(f'among={among!r}: {source} has none of these classes.')
  if len(columns) < model.number:
    remark += f' Predictions are among {len(columns):,} of the {model.number:,}.'
  return Match(np.asarray(columns), right), remark


# -- names ----------------------------------------------------------------------------


def find_list(names: Sequence[str]) -> str | None:
  """Finds the list of `imagenet.LISTS` that has these ids, or nearly these names, in order."""
  for name, row in imagenet.LISTS.items():
    if len(names) == row.number:
      exact = imagenet.is_wordnet_id(names[0])
      ours = imagenet.wordnet_ids(name) if exact else imagenet.class_names(name)
      same = np.mean([a == b for a, b in zip(names, ours, strict=True)])
      if same >= (1 if exact else _ALIKE):
        return name
  return None


def ids(names: Sequence[str]) -> list[str]:
  """Replaces names by WordNet ids if the names are one of `imagenet.LISTS`."""
  name = find_list(names)
  return imagenet.wordnet_ids(name) if name else list(names)


def _keys(names: Sequence[str]) -> list[str]:
  """Returns the WordNet id of each name that has one, else the name itself."""
  return [_ids_of_lemmas().get(name, name) for name in ids(names)]


@functools.cache
def _ids_of_lemmas() -> dict[str, str]:
  """Returns {lemmas: WordNet id} for lemmas that only one class of ImageNet has."""
  every = imagenet.class_names('imagenet21k')
  counts = collections.Counter(every)
  pairs = zip(every, imagenet.wordnet_ids('imagenet21k'), strict=True)
  return {name: synset for name, synset in pairs if counts[name] == 1}


def _are_ids(names: Sequence[str] | None) -> bool:
  """Whether there are names, and all of them are WordNet ids."""
  return bool(names) and all(map(imagenet.is_wordnet_id, names))


def find_indices(names: Sequence[str], among: Sequence[str]) -> list[int | None]:
  """Returns the index of each name in `among`; None for a name that it lacks or has twice."""
  places: dict[str, int | None] = {}
  for i, name in enumerate(among):
    places[name] = None if name in places else i
  return [places.get(name) for name in names]


def _describe(name: str) -> str:
  """Formats the name of a class for a message, with the words of a WordNet id."""
  described = imagenet.describe(name)
  return f'{name!r} ({described})' if described else repr(name)
