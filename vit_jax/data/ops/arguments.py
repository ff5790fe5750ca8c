"""Annotations of ops' arguments, which `registry` checks, and checks that depend on more."""

from typing import Annotated, Literal

from vit_jax.check import Range

# Images with more pixels by their header are refused unread: a PNG of half a megabyte may
# decode to gigabytes. Ops do not make larger images either.
MAX_PIXELS = 64_000_000
MAX_SIDE = 8000  # A square of that side has MAX_PIXELS.

Method = Literal['bilinear', 'bicubic', 'area', 'nearest']
Rounding = Literal['truncate', 'nearest', 'none']  # see `basic`
Side = Annotated[int, Range(1, MAX_SIDE)]
Percent = Annotated[float, Range(0, 100, '(]')]


def is_int(value) -> bool:
  """Whether a value is an integer; True and False are not."""
  return isinstance(value, int) and not isinstance(value, bool)


def positive(name, value, most=MAX_PIXELS):
  """Raises ValueError unless a value is an integer from 1 to `most`."""
  if not is_int(value) or value < 1:
    raise ValueError(f'{name}={value!r} must be a positive integer')
  if value > most:
    raise ValueError(f'{name}={value!r} must be in [1, {most}]')


def size_pair(size) -> tuple[int, int]:
  """Returns (h, w) of a side or a pair."""
  pair = (size, size) if is_int(size) else size
  if not isinstance(pair, tuple | list) or len(pair) != 2:
    raise ValueError(f'size={size!r} must be an integer or (height, width)')
  for side in pair:
    positive('size', side)
  if pair[0] * pair[1] > MAX_PIXELS:
    raise ValueError(f'size={size!r} is more than {MAX_PIXELS / 1e6:.0f} megapixels')
  return tuple(pair)


def interval(name, value) -> tuple[float, float]:
  """Returns (low, high), two numbers above 0 in this order; else raises ValueError."""
  ok = isinstance(value, tuple | list) and len(value) == 2
  if not ok or not 0 < value[0] <= value[1]:
    raise ValueError(f'{name}={value!r} must be (low, high) with 0 < low <= high')
  return tuple(value)
