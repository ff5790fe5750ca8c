"""Annotations of ops' arguments, which `registry` checks."""

from typing import Annotated, Literal

from vit_jax.check import Positive, Range

# Images with more pixels by their header are refused unread: a PNG of half a megabyte may
# decode to gigabytes. Ops do not make larger images either.
MAX_PIXELS = 64_000_000
MAX_SIDE = 8000  # A square of that side has MAX_PIXELS.

Method = Literal['bilinear', 'bicubic', 'area', 'nearest']
Rounding = Literal['truncate', 'nearest', 'none']  # see `basic`
Side = Annotated[int, Range(1, MAX_SIDE, why='64 megapixels')]
Size = Side | tuple[Side, Side]  # The side of a square, or (height, width).
Percent = Annotated[float, Range(0, 100, '(]')]


def ascending(where: str, value, _) -> None:
  """Refuses a pair in the wrong order: a rule of `check`."""
  if value[0] > value[1]:
    raise ValueError(f'{where}={value!r} must be (low, high)')


Interval = Annotated[tuple[Positive, Positive], ascending]


def size_pair(size) -> tuple[int, int]:
  """Returns (height, width) of a `Size`."""
  return (size, size) if isinstance(size, int) else tuple(size)
