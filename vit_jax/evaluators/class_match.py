"""Matches the classes of a data set with the classes of a model.

The two lists may differ in length and order. ImageNet-A and -R have 200 of ImageNet's 1,000
classes, ImageNet-V2 names its folders by number, a head of ImageNet-21k has more classes
than ImageNet-1k, and a class of ObjectNet stands for several classes of ImageNet.
"""

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
      A JSON file: see `_match_by_file`.
      None: by WordNet id or name or, if no name matches, by number.
    among: the classes of the model that may be predicted: 'data' for those that the data
      has, 'all', or one of `imagenet.LISTS`. None: 'data' if the data has a part of the
      model's classes, matched by WordNet id; 'imagenet_a' or 'imagenet_r' for the TFDS
      data sets of these names, which declare all 1,000 classes; otherwise 'all'.

  Returns:
    (the match, a remark or ''). The match is None if the classes are the same, or if they
    are compared by number.
  """
  if class_map is not None:
    check_class_map('class_map', class_map)
  if among is not None:
    check_among('among', among)
  if class_map in imagenet.LISTS:
    number = imagenet.LISTS[class_map][1]
    if model.number != number:
      raise UserError(
        f'class_map={class_map!r} has {number:,} classes, but the model has '
        f'{model.number:,}.'
      )
    model, class_map = Classes(imagenet.wordnet_ids(class_map), number), NAME
  if declared := re.match(r'tfds:(?:.*/)?(imagenet_[ar])\b', source.name):
    among = among or declared[1]
  names, rows, remark = source.class_names, None, ''
  n = len(names or ())
  same = names and model.names and ids(names) == ids(model.names[:n])
  # The classes of the data are the first classes of the model, and its others have no names.
  if class_map is None and same and not any(model.names[n:]):
    if among in (None, DATA, ALL):
      return None, ''
    class_map = NAME
  if class_map in (None, NAME, KNOWN):
    rows, remark = _match_by_name(source.name, names, model, class_map)
  elif class_map != NUMBER:
    rows, remark = _match_by_file(class_map, source.name, names, model)
    among = among or ALL
  if rows is None:
    if among not in (None, ALL):
      raise UserError(
        f'among={among!r} needs classes with names, but those of {source.name} are compared '
        f'with the model by number.{_hint(model)}'
      )
    return None, _match_by_number(source, model, class_map == NUMBER)
  partly = are_ids(ids(names)) and len(rows) < model.number
  return _build_match(
    rows, model, among or (DATA if partly else ALL), remark, source.name
  )


def _hint(model: Classes) -> str:
  """Suggests the list of ImageNet that has as many classes as the model, or returns ''."""
  for name, (_, number) in imagenet.LISTS.items():
    if number == model.number:
      return f' class_map={name!r} says that the model has the classes of that list.'
  return ''


def _match_by_name(source, names, model, how: str | None) -> tuple[list | None, str]:
  """Matches classes by WordNet id or name; `how` is 'name', 'known' or None, see `match`.

  Returns:
    ([[class of the model] for each class of the data], a remark); (None, '') if no name
    matches and `how` is None.

  Raises:
    UserError: if only some of the names match and `how` is not 'known', or if none match
      and `how` is 'name' or 'known'.
  """
  numbered = _numbers(names or (), model.number)
  if names is None or model.names is None:
    if how is not None:
      owner = source if names is None else 'the model'
      raise UserError(f'class_map: {owner} does not name its classes.{_hint(model)}')
    return numbered
  ways = []
  for read in (ids, words):
    theirs = read(names)
    places = find_indices(theirs, read(model.names))
    missing = [name for name, i in zip(theirs, places, strict=True) if i is None]
    ways.append((missing, places, 'WordNet id' if are_ids(theirs) else 'name'))
  missing, places, kind = min(ways, key=lambda way: len(way[0]))
  rows, n = [[] if i is None else [i] for i in places], len(names)
  if not missing:
    which = f"the data has {n:,} of the model's {model.number:,}"
    if n == model.number:
      which = 'they are the same' if places == sorted(places) else 'their order differs'
    return rows, f'Classes are matched by {kind}: {which}.'
  if how == KNOWN and len(missing) < n:
    return rows, (
      f'Classes are matched by {kind}; {len(missing):,} of {n:,}, which the model lacks, '
      f'are left out: {", ".join(map(describe_class, missing[:3]))}.'
    )
  if len(missing) == n:
    if numbered[0] is not None:
      return numbered
    if how is None and not (are_ids(ids(names)) and are_ids(ids(model.names))):
      return None, ''
  raise UserError(
    f'{source}: the model has no class {describe_class(missing[0])}, one of {len(missing):,} of '
    f"{n:,}; set class_map='known' to leave them out, 'number', or a FILE that maps them."
    f'{did_you_mean(missing[0], model.names)}'
  )


def _numbers(names: Sequence[str], number: int) -> tuple[list | None, str]:
  """Matches class names that are numbers in another order, such as '0', '1', '10', '2'.

  Returns the same as `_match_by_name`.
  """
  values = [int(name) for name in names if name.isdecimal()]
  ordered = list(range(number))
  if len(names) != number or sorted(values) != ordered or values == ordered:
    return None, ''
  return [[i] for i in values], "The data names its classes by the model's numbers."


def _match_by_file(path: str, source, names, model: Classes) -> tuple[list, str]:
  """Matches classes by a JSON file {"class of the data": [classes of the model]}.

  The classes of the model are WordNet ids, names or numbers. Images of a class with [] are
  left out. Returns the same as `_match_by_name`.
  """
  if names is None:
    raise UserError(f'class_map: {source} does not name its classes.')
  try:
    table = json.loads(Path(path).expanduser().read_text(encoding='utf-8'))
    check_type(path, table, dict[str, list[str | int]])
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(
      f'class_map: {path} is not JSON of {{"class": [classes]}}: {error}'
    ) from None
  if missing := [name for name in names if name not in table]:
    raise UserError(
      f'{path} lacks the class {missing[0]!r} of {source}, one of {len(missing):,}; give '
      '[] for classes to leave out.'
    )
  places: dict = {i: i for i in range(model.number)}
  for read in (words, ids):
    places |= {name: i for i, name in enumerate(read(model.names or ()))}
  for value in (value for name in names for value in table[name]):
    if value not in places:
      raise UserError(
        f'{path}: the model has no class {describe_class(str(value))} among its '
        f'{model.number:,}.{_hint(model)}'
      )
  rows = [[places[value] for value in table[name]] for name in names]
  if not any(rows):
    raise UserError(f'{path} leaves out all classes of {source}.')
  mapped = sum(map(bool, rows))
  return rows, f'{mapped:,} of {len(rows):,} classes are mapped by {path}.'


def _match_by_number(source, model: Classes, explicit: bool) -> str:
  """Returns a remark on classes that are compared by number, or ''.

  Raises:
    UserError: if the data has more classes than the model, or if it has fewer classes with
      names and the comparison is not `explicit`.
  """
  names, k, K = source.class_names, source.num_classes, model.number
  if k is not None and (k > K or (k < K and names and not explicit)):
    raise UserError(
      f'{source.name} has {k} classes, but the model has {K}: choose other data, set '
      'class_map, or train a head: vit_jax train --config=finetune:weights=SOURCE.'
      f'{"" if model.names or k > K else _hint(model)}'
    )
  if names and model.names and not explicit:
    return (
      f'Note: the model names its classes {list(model.names)[:3]}..., the data '
      f'{list(names)[:3]}...; they are compared by number.'
    )
  if k is not None and k < K:
    return f"The data's {k:,} classes are compared with the first of the model's {K:,}."
  return ''


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
        f'among={among!r}: the model has no class {describe_class(missing[0])}.{_hint(model)}'
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
  for name, (_, number) in imagenet.LISTS.items():
    if len(names) == number:
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


def words(names: Sequence[str]) -> list[str]:
  """Replaces WordNet ids by names in words."""
  return [imagenet.describe(name) or name for name in names]


def are_ids(names: Sequence[str] | None) -> bool:
  """Whether there are names, and all of them are WordNet ids."""
  return bool(names) and all(map(imagenet.is_wordnet_id, names))


def find_indices(names: Sequence[str], among: Sequence[str]) -> list[int | None]:
  """Returns the index of each name in `among`; None for a name that it lacks or has twice."""
  places: dict[str, int | None] = {}
  for i, name in enumerate(among):
    places[name] = None if name in places else i
  return [places.get(name) for name in names]


def describe_class(name: str) -> str:
  """Formats the name of a class for a message, with the words of a WordNet id."""
  described = imagenet.describe(name)
  return f'{name!r} ({described})' if described else repr(name)
