"""Types of the ops' arguments; `registry` checks arguments against them."""

from typing import Annotated, Literal

from vit_jax.check import Positive, Range

# Maximum number of pixels of an image. The header is checked before decoding, because a PNG
# of half a megabyte may decode to gigabytes. Ops do not make larger images either.
MAX_PIXELS = 64_000_000
# The side of a square with MAX_PIXELS.
MAX_SIDE = 8000

Method = Literal['bilinear', 'bicubic', 'area', 'nearest']
# See `basic`.
Rounding = Literal['truncate', 'nearest', 'none']
Side = Annotated[int, Range(1, MAX_SIDE, why='64 megapixels')]
# The side of a square, or (height, width).
Size = Side | tuple[Side, Side]
Percent = Annotated[float, Range(0, 100, '(]')]


def ascending(where: str, value, _) -> None:
  """Raises ValueError for a pair in the wrong order; a rule for `check`."""
  if value[0] > value[1]:
    raise ValueError(f'{where}={value!r} must be (low, high)')


Interval = Annotated[tuple[Positive, Positive], ascending]


def size_pair(size) -> tuple[int, int]:
  """Returns (height, width) of a `Size`."""
  return (size, size) if isinstance(size, int) else tuple(size)
