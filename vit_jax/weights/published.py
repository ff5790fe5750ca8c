"""What is known of published weights besides what is in the file: classes, licence."""

import re
from pathlib import Path
from typing import NamedTuple

from vit_jax import imagenet
from vit_jax.weights import zoo

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
  """What the publisher says of a source; nothing of it is guessed from shapes.

  Attributes:
    lists: of `imagenet`, one of which the classes of the head are.
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


def find(source: str, path: Path, config: dict) -> Published:
  """Returns what is known of a source.

  A file is taken for one of the zoo by its name or address, or by the name of the file,
  unless it holds a config, which Google's files do not. A folder tells by what timm's
  config calls the weights, and by the licence of its config or its card.

  Args:
    source: as the user wrote it.
    path: of the file or folder.
    config: that was read with the arrays.
  """
  known = [entry] if (entry := zoo.find(source)) else zoo.called(source, path.name)
  if known and not config:
    lists = {_ZOO[e.data.split()[-1]] for e in known if e.classes}
    licences = {e.licence.lower() for e in known}
    return Published(
      tuple(sorted(lists)), licences.pop() if len(licences) == 1 else None
    )
  cfg = config.get('pretrained_cfg', {})
  words = re.split(r'[_.]', cfg.get('tag') or config.get('architecture') or '')
  licence = cfg.get('license') or (_card_licence(path) if path.is_dir() else None)
  return Published(_TAGS.get(words[-1], ()), licence)


def _card_licence(folder: Path) -> str | None:
  """The licence that the metadata of a hub folder's README.md names."""
  try:
    text = (folder / 'README.md').read_text(encoding='utf-8')
  except (OSError, ValueError):
    return None
  front = re.match(r'---\s*\n(.*?)\n---', text, re.DOTALL)
  line = r'^license:[ \t]*["\']?([\w.+-]+)["\']?[ \t]*$'
  found = re.search(line, front[1], re.MULTILINE) if front else None
  return found[1] if found and found[1] != 'unknown' else None
