"""The classes of ImageNet: their WordNet ids in the order of published heads, and names.

`lists.json` has the published lists of classes, with the test sets and the tags of weights
that each belongs to. `synsets.json` has a row for each WordNet id: the marks of the lists
that contain it, and its lemmas. Every list is in ascending order of its ids. Lists and lemmas
are facts from timm 1.0.31 (timm/data/_info, Apache-2.0), whose 21,843 ids are those of
gs://bit_models/imagenet21k_wordnet_ids.txt. The lemmas are from WordNet 3.0, Princeton
University.

There is no list for the whole release of winter 2021, 19,167 of the classes of 2011, because
no published source has all of them. Data made from it has their ids, and `describe` has a
name for each.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vit_jax.errors import choose


class _List(NamedTuple):
  """A published list of classes, a row of lists.json."""

  about: str
  mark: str  # the letter that marks its classes in synsets.json
  number: int  # number of classes
  # Last words of the tags of weights with a head for these classes, as in timm's
  # 'augreg_in21k_ft_in1k'.
  tags: Sequence[str] = ()
  # The data set of TFDS whose images have only these classes, though it declares more.
  test_set: str | None = None


def _read(file: str) -> dict:
  return json.loads(Path(__file__).with_name(file).read_text(encoding='utf-8'))


LISTS = {name: _List(**row) for name, row in _read('lists.json').items()}


@functools.cache
def _synsets() -> dict[str, tuple[str, str]]:
  return {k: tuple(v) for k, v in _read('synsets.json').items()}


def wordnet_ids(name: str) -> list[str]:
  """Returns the WordNet ids of one of LISTS, in the order of its classes."""
  mark = choose('list of classes', name, LISTS).mark
  return [synset for synset, (marks, _) in _synsets().items() if mark in marks]


def class_names(name: str) -> list[str]:
  """Returns the class names of one of LISTS. A name is all lemmas: 'tench, Tinca tinca'.

  Two classes may have the same name ('crane', the bird and the machine). `wordnet_ids` tells
  them apart.
  """
  return [_synsets()[synset][1] for synset in wordnet_ids(name)]


def describe(name: str) -> str | None:
  """Returns the lemmas of a WordNet id such as 'n01440764'; None for other names."""
  return _synsets()[name][1] if is_wordnet_id(name) and name in _synsets() else None


def is_wordnet_id(name: str) -> bool:
  """Whether a name has the form of the WordNet id of a noun, such as 'n01440764'."""
  return len(name) == 9 and name[0] == 'n' and name[1:].isdecimal()


def list_of(names: Sequence[str]) -> str | None:
  """Finds the one of LISTS that has exactly these names in this order, or returns None."""
  for name, row in LISTS.items():
    if len(names) == row.number and list(names) == class_names(name):
      return name
  return None
