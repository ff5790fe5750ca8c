"""Published checkpoints by short names (zoo.json), their classes and their licences.

The entries come from the publishers' lists. vision_transformer's README lists the models of
"An Image is Worth 16x16 Words" (whose heads over i21k were never released), models trained
with sharpness-aware minimisation (sam, gsam) and Mixers. timm's registry lists BiT and the
checkpoints of AugReg (arXiv 2106.10270) that it recommends. Detectors are those of detectron2's
model zoo and its ViTDet, of torchvision, and of DETR's authors, which can be built.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import NamedTuple

from vit_jax import config as config_lib
from vit_jax import imagenet
from vit_jax.errors import UserError
from vit_jax.weights import download, readers, runs

# {address of files: (their format, their licence or None if the publisher states none)}.
_PUBLISHERS = {
  'gs://': ('google', 'apache-2.0'),
  'https://dl.fbaipublicfiles.com/detr/': ('authors', 'apache-2.0'),
  'https://dl.fbaipublicfiles.com/detectron2/ViTDet/': ('detectron2', None),
  'https://dl.fbaipublicfiles.com/detectron2/': ('detectron2', 'cc-by-sa-3.0'),
  'https://download.pytorch.org/': ('torchvision', None),
}


class Entry(NamedTuple):
  """Published weights: their address, their model, and the data they were trained on."""

  name: str
  url: str
  model: str  # a name for `models.build`
  format: str
  licence: str | None
  resolution: int  # side in pixels of the images on which it was trained last
  classes: int | None  # None: the published head is all zeros
  data: str


def _entries():
  text = Path(__file__).with_suffix('.json').read_text(encoding='utf-8')
  for name, (address, model, resolution, classes, data) in json.loads(text).items():
    url = address if '://' in address else f'gs://{address}'
    format, licence = next(x for k, x in _PUBLISHERS.items() if url.startswith(k))
    format = 'bit' if model.startswith('bit:') else format
    yield Entry(name, url, model, format, licence, resolution, classes, data)


ENTRIES = {entry.name: entry for entry in _entries()}


# -- classes and licences -------------------------------------------------------------


def find_class_names(source: str, path: Path, config: dict, classes: int | None):
  """Returns the names of a head's classes; None if no publisher says which data it is for.

  timm's folders are recognised by the tag in their config. Google's files have no config, so
  they are recognised by the name in the zoo, the URL or the file's name. The last word of a
  tag, or of `Entry.data`, names the data set that the head is for.
  """
  if config:
    tag = _read_pretrained_cfg(config).get('tag') or config.get('architecture')
    words = [re.split(r'[_.]', str(tag or ''))[-1]]
  else:
    words = [e.data.split()[-1] for e in _find_entries(source, path) if e.classes]
  for name, row in imagenet.LISTS.items():
    if classes == row.number and not {*words}.isdisjoint(row.tags):
      return imagenet.class_names(name)
  return None


class Licence(NamedTuple):
  """The licence of the published weights from which a source was made."""

  name: str | None  # its name on the hub ('apache-2.0'); None: unknown
  origin: str | None  # the published weights; None: a run from scratch


def find_licence(source: str) -> Licence:
  """Returns the licence of a source. A run has that of the weights that it started from."""
  if (run := runs.find(source)) is not None:
    weights = config_lib.read(run[0]).get('weights')
    return find_licence(weights['source']) if weights else Licence(None, None)
  source, path, config, name = str(source), Path(str(source)), {}, None
  with contextlib.suppress(UserError):
    path = path if source in ENTRIES else download.locate(source)
    if path.is_dir() and (path / 'config.json').is_file():
      config = readers.read_json(path / 'config.json')
  if not config and (entries := _find_entries(source, path)):
    name = entries[0].licence
  elif not (name := _read_pretrained_cfg(config).get('license')):
    with contextlib.suppress(OSError, ValueError):  # the card of a hub folder
      text = (path / 'README.md').read_text(encoding='utf-8')
      line = r'---\n(?:(?!---).*\n)*?license:\s*["\']?(?!unknown)([\w.+-]+)["\']?\s*\n'
      name = match[1] if (match := re.match(line, text)) else None
  return Licence(name, source)


def _read_pretrained_cfg(config: dict) -> dict:
  cfg = config.get('pretrained_cfg')
  return cfg if isinstance(cfg, dict) else {}


def _find_entries(source: str, path: Path) -> list[Entry]:
  """Returns the entries with this name or address, else those with this file name."""
  every = ENTRIES.values()
  exact = [e for e in every if source in (e.name, e.url)]
  return exact or [e for e in every if e.url.rpartition('/')[2] == path.name]
