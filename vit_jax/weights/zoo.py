"""Published checkpoints by short names, in zoo.json, and their classes and licences.

Every entry is as its publisher lists it: vision_transformer's README for "An Image is
Worth 16x16 Words" (its heads over i21k were never released), for models trained with
sharpness-aware minimisation (sam, gsam) and for Mixers; timm's registry for the checkpoints
of AugReg (arXiv 2106.10270) that it recommends, and for BiT. No publisher gives checksums;
none of the files could be downloaded where this list was made.
"""

import difflib
import json
import re
from pathlib import Path
from typing import NamedTuple

from vit_jax import config as config_lib
from vit_jax import imagenet
from vit_jax.errors import UserError
from vit_jax.weights import download, readers, runs

APACHE = 'Apache-2.0'


class Entry(NamedTuple):
  """Published weights: their address, their model, and the data they were trained on."""

  name: str
  url: str
  model: str  # as `models.build` takes it
  format: str
  resolution: int  # px, of the images that it was last trained on
  classes: int | None  # None: the published head is all zeros
  data: str
  licence: str = APACHE


def _entries():
  text = Path(__file__).with_suffix('.json').read_text(encoding='utf-8')
  for name, (address, model, resolution, classes, data) in json.loads(text).items():
    format = 'bit' if model.startswith('bit:') else 'google'
    yield Entry(name, f'gs://{address}', model, format, resolution, classes, data)


ENTRIES = {entry.name: entry for entry in _entries()}


def find(name: str) -> Entry | None:
  """Returns the entry of that name, None for a path or a URL.

  Raises:
    UserError: for what looks like a name and is close to one, but is not in the zoo.
  """
  name = str(name)
  if name in ENTRIES:
    return ENTRIES[name]
  if any(c in name for c in '/:\\.'):
    return None
  near = difflib.get_close_matches(name, ENTRIES, n=3, cutoff=0.7)
  if near and not Path(name).exists():
    raise UserError(
      f'{name!r} is neither a path nor a name of the zoo; close to: {near}.'
    )
  return None


# -- classes and licences -------------------------------------------------------------

# The data that a head is for, the last word of timm's tags, 'augreg_in21k_ft_in1k' ->
# the lists of `imagenet` that it may be, which differ in their number of classes.
_TAGS = {
  'in1k': ('imagenet1k',),
  'in12k': ('imagenet12k',),
  'in21k': ('imagenet21k', 'imagenet21k_miil'),
  'in22k': ('imagenet22k',),
}
_ZOO = {'i1k': 'imagenet1k', 'i21k': 'imagenet21k'}


class Published(NamedTuple):
  """Facts about a source by its publisher; nothing is guessed from shapes.

  Attributes:
    lists: names of `imagenet.LISTS`; the head's classes are one of these lists.
    licence: its identifier, as on the hub ('apache-2.0'), or None.
  """

  lists: tuple[str, ...] = ()
  licence: str | None = None

  def class_names(self, classes: int | None) -> list[str] | None:
    """Returns the names of a head's classes; None where its list is not known."""
    for name in self.lists:
      if classes == imagenet.LISTS[name][1]:
        return imagenet.class_names(name)
    return None


class Licence(NamedTuple):
  """The licence of the weights that a source was made from.

  Attributes:
    name: its identifier on the hub ('apache-2.0'), None if unknown.
    origin: the published weights that it goes back to; None: a run that began without.
  """

  name: str | None
  origin: str | None


def licence(source: str) -> Licence:
  """Returns the licence of a source: of a run, that of the weights that it started from.

  Weights that were removed, or are out of reach, are still recognised by their name.
  """
  if (run := runs.find(source)) is not None:
    weights = config_lib.read(run[0]).get('weights')
    return licence(weights['source']) if weights else Licence(None, None)
  path, config = Path(str(source)), {}
  try:
    if not find(source):
      path = download.locate(source)
    if path.is_dir() and (path / 'config.json').is_file():
      config = readers.read_json(path / 'config.json')
  except UserError:
    pass
  return Licence(published(str(source), path, config).licence, str(source))


def published(source: str, path: Path, config: dict) -> Published:
  """Returns the publisher's facts about a source.

  A file is recognised as one of the zoo by that name, its URL, or its file name, unless it
  holds a config, which Google's files do not. Of a folder, the classes follow from the tag
  in timm's config; the licence is that of the config or of the card.

  Args:
    source: as the user wrote it.
    path: of the file or folder.
    config: the one read with the arrays.
  """
  entries = [entry] if (entry := find(source)) else _called(source, path.name)
  if entries and not config:
    lists = {_ZOO[e.data.split()[-1]] for e in entries if e.classes}
    licences = {e.licence.lower() for e in entries}
    one = licences.pop() if len(licences) == 1 else None
    return Published(tuple(sorted(lists)), one)
  cfg = config.get('pretrained_cfg')
  cfg = cfg if isinstance(cfg, dict) else {}
  words = re.split(r'[_.]', str(cfg.get('tag') or config.get('architecture') or ''))
  name = cfg.get('license') or (_card_licence(path) if path.is_dir() else None)
  return Published(_TAGS.get(words[-1], ()), name)


def _card_licence(folder: Path) -> str | None:
  """Returns the licence in the metadata of a hub folder's README.md, or None."""
  try:
    text = (folder / 'README.md').read_text(encoding='utf-8')
  except (OSError, ValueError):
    return None
  front = re.match(r'---\s*\n(.*?)\n---', text, re.DOTALL)
  line = r'^license:[ \t]*["\']?([\w.+-]+)["\']?[ \t]*$'
  match = re.search(line, front[1], re.MULTILINE) if front else None
  return match[1] if match and match[1] != 'unknown' else None


def _called(address: str, file: str) -> list[Entry]:
  """Returns the entries of that address, else those whose files have that name."""
  exact = [e for e in ENTRIES.values() if e.url == address]
  return exact or [e for e in ENTRIES.values() if e.url.rpartition('/')[2] == file]
