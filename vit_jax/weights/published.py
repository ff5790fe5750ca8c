"""What the publishers of weights say of them beyond the file: classes and licence."""

import re
from pathlib import Path
from typing import NamedTuple

from vit_jax import config as config_lib
from vit_jax import imagenet
from vit_jax.errors import UserError
from vit_jax.weights import download, readers, runs, zoo

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
    name: its identifier on the hub ('apache-2.0'), None if it is not known.
    origin: the published weights that it goes back to; None: a run that began without.
  """

  name: str | None
  origin: str | None


def licence(source: str) -> Licence:
  """Returns the licence of a source: of a run, that of the weights that it started from.

  Weights that are not there any more, or out of reach, are still known by their name.
  """
  if (run := runs.find(source)) is not None:
    weights = config_lib.read(run[0]).get('weights')
    return licence(weights['source']) if weights else Licence(None, None)
  path, config = Path(str(source)), {}
  try:
    if not zoo.find(source):
      path = download.locate(source)
    if path.is_dir() and (path / 'config.json').is_file():
      config = readers.read_json(path / 'config.json')
  except UserError:
    pass
  return Licence(find(str(source), path, config).licence, str(source))


def find(source: str, path: Path, config: dict) -> Published:
  """Returns what is known about a source.

  A file is recognised as one of the zoo by that name, its URL, or its file name, unless it
  holds a config, which Google's files do not. Of a folder, the classes follow from the tag
  in timm's config; the licence is that of the config or of the card.

  Args:
    source: as the user wrote it.
    path: of the file or folder.
    config: the one read with the arrays.
  """
  entries = [entry] if (entry := zoo.find(source)) else zoo.called(source, path.name)
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
