"""Window attention: tokens attend within windows of a map (arXiv 2103.14030, 3.2)."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vit_jax.nn.layers import Dense

Pair = tuple[int, int]
_INIT = nn.initializers.truncated_normal(0.02)

# What implementations do if windows do not tile a map:
# pad_shift: the authors' code. The map is padded, then shifted. If it is smaller than a
#   window, the side of the windows is the map's shorter side, and nothing is shifted.
# shift_pad: timm. The map is shifted, then padded. Along a side that is shorter than a
#   window, windows have the length of that side, and nothing is shifted.
# pad_shift_twice: Swin V2 in transformers. The same as pad_shift, but the mask of shifted
#   windows is added twice.
# pad_always: the authors' code for detectors. The map is padded, then shifted. Windows keep
#   their size and are shifted even if the map is smaller.
BORDERS = ('pad_shift', 'shift_pad', 'pad_shift_twice', 'pad_always')


def pad(x, multiple: Pair):
  """Pads a map [B, H, W, C] with zeros below and right to multiples of (h, w)."""
  rows, columns = (-n % m for n, m in zip(x.shape[1:3], multiple, strict=True))
  if not rows and not columns:
    return x
  return jnp.pad(x, ((0, 0), (0, rows), (0, columns), (0, 0)))


@dataclasses.dataclass(frozen=True)
class Windows:
  """Cuts a map [B, H, W, C] into windows, after padding and a circular shift.

  Attributes:
    map: (H, W), the size of the map.
    window: (h, w), the size of a window.
    shift: (down, across), the offset of the windows from the tiles of an unshifted map.
    pad_first: whether a map that windows do not tile is first padded and then shifted;
      otherwise it is first shifted and then padded. The order decides where the zeros are.
  """

  map: Pair
  window: Pair
  shift: Pair = (0, 0)
  pad_first: bool = True

  @property
  def grid(self) -> Pair:
    """Number of windows: (rows, columns)."""
    return tuple(math.ceil(n / w) for n, w in zip(self.map, self.window, strict=True))

  def cut(self, x):
    """Returns the windows [B n, h w, C] of a map [B, H, W, C], row by row."""
    steps = [lambda x: pad(x, self.window), lambda x: self._roll(x, -1)]
    for step in steps if self.pad_first else reversed(steps):
      x = step(x)
    (rows, columns), (h, w) = self.grid, self.window
    x = x.reshape(-1, rows, h, columns, w, x.shape[-1]).swapaxes(2, 3)
    return x.reshape(-1, h * w, x.shape[-1])

  def join(self, x):
    """The inverse of `cut`, without the padding. Maps [B n, h w, C] to [B, H, W, C]."""
    (rows, columns), (h, w) = self.grid, self.window
    x = x.reshape(-1, rows, columns, h, w, x.shape[-1]).swapaxes(2, 3)
    x = x.reshape(-1, rows * h, columns * w, x.shape[-1])
    steps = [lambda x: self._roll(x, 1), lambda x: x[:, : self.map[0], : self.map[1]]]
    for step in steps if self.pad_first else reversed(steps):
      x = step(x)
    return x

  def _roll(self, x, sign: int):
    for axis, shift in enumerate(self.shift, start=1):
      if by := sign * shift % x.shape[axis]:
        # Slice a map that is concatenated with itself. XLA for TPUs makes one operation
        # of this, while `jnp.roll` writes two parts and joins them. It saves 4 % of
        # Swin-T's step on a v5e.
        twice = jnp.concatenate([x, x], axis)
        x = lax.slice_in_dim(
          twice, x.shape[axis] - by, 2 * x.shape[axis] - by, axis=axis
        )
    return x

  def mask(self, batch: int, value: float):
    """Returns the bias [B n, 1, h w, h w] that separates tokens which are not neighbours.

    A circular shift moves the first rows and columns after the last ones, into the same
    windows. If nothing is shifted, the bias is 0.0.

    Args:
      batch: B n, the number of windows in all images.
      value: the bias of two tokens that are not neighbours; other pairs have 0.
    """
    if not any(self.shift):
      return 0.0
    sides = []
    for count, window, shift in zip(self.grid, self.window, self.shift, strict=True):
      # The last window has two parts: the last rows of the map, and the first rows of the
      # map, which the circular shift has moved there.
      side = np.zeros((count, window), int)
      side[-1, window - shift :] = 1
      sides.append(side)
    down, across = sides
    parts = 2 * down[:, None, :, None] + across[None, :, None, :]
    parts = jnp.asarray(parts.reshape(-1, math.prod(self.window)))
    apart = parts[:, :, None] != parts[:, None]  # [n, h w, h w]
    # The mask is repeated for every image as booleans: XLA reads these while it computes
    # the scores. A float32 bias would be written to memory first, which takes 8 % of the
    # time of two blocks on a TPU v5e.
    every = jnp.broadcast_to(apart, (batch // len(apart), *apart.shape))
    return jnp.where(every.reshape(-1, 1, *apart.shape[1:]), value, 0.0)


def windows_of(map, side: int, shift: int, borders: str) -> Windows:
  """Returns the windows of a map (H, W), of at most side x side.

  Args:
    shift: the shift of the windows, used if there are several along a side.
    borders: one of BORDERS.
  """
  if borders == 'shift_pad':
    window = tuple(min(side, n) for n in map)
    shifts = tuple(shift if n > side else 0 for n in map)
  elif borders == 'pad_always':
    window, shifts = (side,) * 2, (shift,) * 2
  else:
    window = (min(side, *map),) * 2
    shifts = (shift if min(map) > side else 0,) * 2
  return Windows(tuple(map), window, shifts, borders != 'shift_pad')


def offsets(window: Pair) -> np.ndarray:
  """Returns by how many rows and columns queries are offset from keys, int [h w, h w, 2]."""
  places = np.stack(np.meshgrid(*map(np.arange, window), indexing='ij'), -1)
  places = places.reshape(-1, 2)
  return places[:, None] - places


def from_table(table, window: Pair):
  """Returns the bias [M, h w, h w] for every query and key of a window.

  Args:
    table: [2 H - 1, 2 W - 1, M], for offsets from (1 - H, 1 - W) to (H - 1, W - 1). Offsets
      beyond these get the bias of the nearest one in the table.
  """
  reach = np.array(table.shape[:2]) // 2
  at = np.clip(offsets(window), -reach, reach) + reach
  flat = table.reshape(-1, table.shape[-1])
  rows = jnp.take(flat, at[..., 0] * table.shape[1] + at[..., 1], axis=0)
  return rows.transpose(2, 0, 1)


# -- biases of attention within windows ---------------------------------------------------


class TableBias(nn.Module):
  """A learned bias per head and offset in the window (V1), the parameter `table`."""

  @nn.compact
  def __call__(self, query, key, window):
    """Returns (query, key, bias [M, N, N]); see `MultiHeadDotProductAttention`."""
    h, w = window
    shape = (2 * h - 1, 2 * w - 1, query.shape[-2])
    # If images have another size, an existing table may belong to windows of another size.
    if self.has_variable('params', 'table'):
      shape = self.get_variable('params', 'table').shape
    table = self.param('table', _INIT, shape)
    return query, key, from_table(table, window)


class CosineBias(nn.Module):
  """Scores are cosines times a learned factor. An MLP of log offsets gives the bias (V2).

  Attributes:
    pretrained: the side of the windows in pre-training, by which offsets are scaled; 0: the
      side of the current windows.
  """

  pretrained: int

  @nn.compact
  def __call__(self, query, key, window):
    """Returns (query, key, bias [M, N, N]); see `MultiHeadDotProductAttention`."""
    *_, M, Dh = query.shape
    start = nn.initializers.constant(math.log(10.0))
    scale = self.param('logit_scale', start, (M,), jnp.float32)
    scale = jnp.exp(jnp.minimum(scale, math.log(100.0)))
    # Multiply by sqrt(Dh), because `attend` divides by it.
    query, key = _unit(query, scale[:, None] * math.sqrt(Dh)), _unit(key, 1.0)
    reach = [np.arange(1 - n, n) / max((self.pretrained or n) - 1, 1) for n in window]
    offsets = 8 * np.stack(np.meshgrid(*reach, indexing='ij'), -1)
    offsets = np.sign(offsets) * np.log2(np.abs(offsets) + 1) / np.log2(8)
    x = Dense(512, kernel_init=_INIT, name='Dense_0')(offsets.astype(np.float32))
    x = Dense(M, use_bias=False, kernel_init=_INIT, name='Dense_1')(nn.relu(x))
    # Subtracting 8 does not change the softmax. It centres the biases on 0, the bias of
    # extra tokens, which have no position in the window.
    return query, key, 16 * nn.sigmoid(from_table(x, window)) - 8


def _unit(x, scale):
  """Rescales vectors to length `scale`, in float32; zero vectors stay zero."""
  wide = x.astype(jnp.float32)
  squares = (wide * wide).sum(-1, keepdims=True)
  # A padded key is zero, and its derivative must be zero too, not infinite.
  nonzero = squares > 1e-24
  inverse = jnp.where(nonzero, jax.lax.rsqrt(jnp.where(nonzero, squares, 1.0)), 0.0)
  return (wide * inverse * scale).astype(x.dtype)
