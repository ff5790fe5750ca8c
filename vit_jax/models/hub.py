"""Names of ViTs that transformers, the models' authors and open_clip publish on the hub.

A row of hub.json has a regex of names, the variant (which may contain the regex's groups),
fields, and further fields for names in which a group has a given text.
"""

import json
import re
from pathlib import Path

# {size in a name: its key in `vit.VARIANTS`}.
_SIZES = {'tiny': 'Ti', 'small': 'S', 'base': 'B', 'large': 'L', 'huge': 'H', 'h': 'H'}
_SIZES |= {'giant': 'g-opt', 'giant-opt': 'g-opt', 'so400m': 'So400m', 'bigG': 'G'}
_SIZES |= {'s': 'S', 'splus': 'S', 'b': 'B', 'l': 'L', 'hplus': 'H', '7b': 'H'}
_SIZES |= {'T': 'Ti'}


def published(name: str) -> tuple[str, dict] | None:
  """Returns the (variant, fields) of a ViT on the hub by its name; None for other names."""
  rows = json.loads(Path(__file__).with_suffix('.json').read_text('utf-8'))
  for regex, variant, fields, more in rows:
    if match := re.fullmatch(regex, name):
      for text in match.groups():
        fields |= more.get(text, {})
      fields = {k: tuple(x) if isinstance(x, list) else x for k, x in fields.items()}
      return variant.format(*(_SIZES.get(x or '', x) for x in match.groups())), fields
  return None
