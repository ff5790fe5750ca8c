"""Names of ViTs on the hub, written for transformers, and of their authors and open_clip.

A row of hub.json has a regex; the variant, with groups of the regex; fields; and fields that
a group adds where it has a given text.
"""

import json
import re
from pathlib import Path

# Sizes in names -> those of `vit.VARIANTS`.
_SIZES = {'tiny': 'Ti', 'small': 'S', 'base': 'B', 'large': 'L', 'huge': 'H', 'h': 'H'}
_SIZES |= {'giant': 'g-opt', 'giant-opt': 'g-opt', 'so400m': 'So400m', 'bigG': 'G'}
_SIZES |= {
  's': 'S',
  'splus': 'S',
  'b': 'B',
  'l': 'L',
  'hplus': 'H',
  '7b': 'H',
  'T': 'Ti',
}


def published(name: str) -> tuple[str, dict] | None:
  """Returns (variant, fields) of a ViT by its name, None for other names."""
  rows = json.loads(Path(__file__).with_suffix('.json').read_text('utf-8'))
  for regex, variant, fields, more in rows:
    if match := re.fullmatch(regex, name):
      for text in match.groups():
        fields |= more.get(text, {})
      fields = {k: tuple(x) if isinstance(x, list) else x for k, x in fields.items()}
      return variant.format(*(_SIZES.get(x or '', x) for x in match.groups())), fields
  return None
