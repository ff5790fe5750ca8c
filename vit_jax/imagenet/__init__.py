"""The classes of ImageNet: their WordNet ids in the order of published heads, and names.

`synsets.json` has a row for each WordNet id: the lists that contain it, one letter for each
list, and its lemmas. Every list is in ascending order of its ids. Lists and lemmas are facts
from timm 1.0.31 (timm/data/_info, Apache-2.0), whose 21,843 ids are those of
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

from vit_jax.errors import choose

# {name: (letter that marks its classes in synsets.json, number of classes)}.
LISTS = {
  # ILSVRC 2012.
  'imagenet1k': ('1', 1_000),
  # The classes of Google's published heads: ViT, AugReg, Mixer, BiT, FlexiViT.
  'imagenet21k': ('G', 21_843),
  # The release of autumn 2011.
  'imagenet22k': ('F', 21_841),
  # timm's selection from imagenet22k.
  'imagenet12k': ('T', 11_821),
  # The selection of arXiv 2104.10972 from the release of autumn 2011.
  'imagenet21k_miil': ('P', 11_221),
  # The selection by the same method from the release of winter 2021.
  'imagenet21k_miil_winter21': ('W', 10_450),
  # Two test sets, whose classes are among those of imagenet1k: natural adversarial examples
  # (arXiv 1907.07174) and renditions (arXiv 2006.16241).
  'imagenet_a': ('A', 200),
  'imagenet_r': ('R', 200),
}


@functools.cache
def _synsets() -> dict[str, tuple[str, str]]:
  path = Path(__file__).with_name('synsets.json')
  return {k: tuple(v) for k, v in json.loads(path.read_text(encoding='utf-8')).items()}


def wordnet_ids(name: str) -> list[str]:
  """Returns the WordNet ids of one of LISTS, in the order of its classes."""
  letter, _ = choose('list of classes', name, LISTS)
  return [synset for synset, (lists, _) in _synsets().items() if letter in lists]


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
  for name, (_, number) in LISTS.items():
    if len(names) == number and list(names) == class_names(name):
      return name
  return None
