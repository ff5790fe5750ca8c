"""Parses split expressions as in TFDS: 'train', 'train[:90%]', 'train[100:]+test'."""

import re
from collections.abc import Iterable

import numpy as np

from vit_jax.errors import choose

# Names that mean the same split.
SYNONYMS = {
  'train': ('train', 'training'),
  'validation': ('validation', 'val', 'valid', 'dev'),
  'test': ('test', 'testing'),
}

_PART = re.compile(r'\s*([\w.-]+)\s*(?:\[\s*([^:\]]*?)\s*:\s*([^:\]]*?)\s*\])?\s*')
_BOUND = re.compile(r'-?\d[\d_]*%?')


def parse(expression: str) -> list[tuple[str, str, str]]:
  """Parses an expression to [(split, from, to)]; an open bound is ''."""
  parts = []
  for text in str(expression).split('+'):
    match = _PART.fullmatch(text)
    name, *bounds = match.groups(default='') if match else ('', '', '')
    if not match or not all(b == '' or _BOUND.fullmatch(b) for b in bounds):
      raise ValueError(
        f"Split {expression!r}: expected 'train', 'train[:90%]', 'train[-10%:]+test', ..."
      )
    parts.append((name, *bounds))
  return parts


def canonical(name: str) -> str:
  """Returns 'validation' for 'val', and so on; returns other names unchanged."""
  for split, names in SYNONYMS.items():
    if name.lower() in names:
      return split
  return name


def with_canonical_names(expression: str) -> str:
  """Returns an expression with the names of `canonical`: 'validation[:90%]' for 'val[:90%]'."""
  parts = parse(expression)
  return '+'.join(f'{canonical(name)}[{low}:{high}]' for name, low, high in parts)


def check_name(name: str, names: Iterable[str], where: str) -> None:
  """Raises ValueError if `name` is not one of a source's splits."""
  choose('split', name, sorted(names), f', those of {where}')


def select(expression: str, sizes: dict[str, int], where: str) -> list[tuple]:
  """Returns the [(split, indices int64 [n])] that an expression selects, see `ranges`."""
  return [
    (name, np.arange(low, high, dtype=np.int64))
    for name, low, high in ranges(expression, sizes, where)
  ]


def ranges(expression: str, sizes: dict[str, int], where: str) -> list[tuple]:
  """Returns the [(split, first, end)] that an expression selects, in its order.

  Percentages are rounded to the nearest example, as TFDS does by default.

  Args:
    sizes: the number of examples of every split.
    where: the name of the source, for error messages.
  """
  out = []
  for name, start, stop in parse(expression):
    check_name(name, sizes, where)
    size = sizes[name]
    low, high = (
      _absolute(bound, size, default, f'{expression!r} of {where}')
      for bound, default in ((start, 0), (stop, size))
    )
    out.append((name, low, max(low, high)))
  if all(low == high for _, low, high in out):
    raise ValueError(
      f'Split {expression!r} of {where} selects no example: {sizes}. A share has a per '
      "cent sign, 'train[90%:]'"
    )
  return out


def _absolute(bound: str, size: int, default: int, noun: str) -> int:
  """Converts a bound to an index into a split of `size` examples; '' is the default."""
  if not bound:
    return default
  number = round(int(bound[:-1]) * size / 100) if bound.endswith('%') else int(bound)
  if abs(number) > size:
    raise ValueError(f'Split {noun}: {bound} is outside its {size} examples')
  # A negative bound counts from the end even if it rounds to 0, such as '-1%' of 7 examples.
  return number + size if int(bound.rstrip('%')) < 0 else number
