"""Checks of ops' arguments; a ValueError says what is wrong with one."""

import math

from vit_jax.errors import did_you_mean

METHODS = ('bilinear', 'bicubic', 'area', 'nearest')
ROUNDING = ('truncate', 'nearest', 'none')  # see `basic`


# Images with more pixels by their header are refused unread: a PNG of half a megabyte may
# decode to gigabytes. Ops do not make larger images either.
MAX_PIXELS = 64_000_000
MAX_SIDE = 8000  # of a square with MAX_PIXELS


def is_int(value) -> bool:
  """Whether a value is an integer; True and False are not."""
  return isinstance(value, int) and not isinstance(value, bool)


def positive(name, value, most=MAX_PIXELS):
  """Raises ValueError unless a value is an integer from 1 to `most`."""
  if not is_int(value) or value < 1:
    raise ValueError(f'{name}={value!r} must be a positive integer')
  if value > most:
    raise ValueError(f'{name}={value!r} must be in [1, {most}]')


def number(name, value, low, high):
  """Raises ValueError unless a value is a number from `low` to `high`."""
  known = isinstance(value, int | float) and not isinstance(value, bool)
  if not known or not low <= value <= high or math.isinf(value):
    allowed = f'from {low} to {high}' if math.isfinite(high) else f'of at least {low}'
    raise ValueError(f'{name}={value!r} must be a number {allowed}')


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


def choice(name, value, allowed):
  """Returns a value that is one of those allowed; else raises ValueError."""
  if value not in allowed:
    raise ValueError(
      f'{name}={value!r} is not in {allowed}{did_you_mean(value, allowed)}'
    )
  return value
