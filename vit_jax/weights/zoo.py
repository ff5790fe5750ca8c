"""Short names of published checkpoints: those in zoo.json.

Every entry is as its publisher lists it: vision_transformer's README for "An Image is
Worth 16x16 Words" (its heads over i21k were never released), for models trained with
sharpness-aware minimisation (sam, gsam) and for Mixers; timm's registry for the checkpoints
of AugReg (arXiv 2106.10270) that it recommends, and for BiT. No publisher gives checksums;
none of the files could be downloaded where this list was made.
"""

import difflib
import json
from pathlib import Path
from typing import NamedTuple

from vit_jax.errors import UserError

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


def called(address: str, file: str) -> list[Entry]:
  """Returns the entries of that address, else those whose files have that name."""
  exact = [e for e in ENTRIES.values() if e.url == address]
  return exact or [e for e in ENTRIES.values() if e.url.rpartition('/')[2] == file]


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
