"""Rows of bfloat16 in a kernel's block, read and written as what the kernel computes in.

Where vector registers hold no bfloat16 (v2, v3), Mosaic unpacks each through memory and
waits for it, which was a third of the attention kernels' cycles. There a block is read as
words of 32 bits, which hold two rows: the even rows come first, then the odd ones. An
order of rows that all arrays share changes no sum over them. And a block is read by columns
that are one register wide: in a wider one the words of a register do not lie together.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

ALL = slice(None)
LANES = 128  # of a vector register and, at least, of a matrix unit
SUBLANES = 8  # of a vector register
FEWEST = 64  # rows of a grid step: with fewer, starting it takes longer than its work
_PAIR = 16  # rows of two registers, whose words fill one


def round_up(n: int, unit: int) -> int:
  """Returns the least multiple of a unit that is n or more."""
  return -(-n // unit) * unit


def largest_divisor(count: int, most: int, unit: int = 1) -> int:
  """Returns the largest multiple of `unit` up to `most` that divides `count`; 0 if none."""
  fits = (n for n in range(unit, min(most, count) + 1, unit) if count % n == 0)
  return max(fits, default=0)


class Rows(NamedTuple):
  """How rows are read.

  Attributes:
    dtype: what is computed in, 'bfloat16' or 'float32'. Rows of float32 are in the order
      of the module's docstring.
    interpret: without the views of memory that only a TPU has, for tests.
  """

  dtype: str
  interpret: bool = False

  @property
  def packed(self) -> bool:
    return self.dtype == 'float32'

  def block(self, rows: int) -> int:
    """Returns how many rows a block needs to hold so many."""
    return round_up(rows, _PAIR) if self.packed else rows

  def columns(self, lanes: int) -> int:
    """Returns in how many blocks, side by side, an input of so many lanes is best read.

    Packed rows by single registers: in a wider block the words of eight rows lie apart,
    and the compiler brings them together through memory.
    """
    return lanes // LANES if self.packed and lanes % LANES == 0 else 1

  def order(self, rows: int) -> np.ndarray:
    """Returns which row each of the R that a block needs for so many is, once loaded."""
    at = np.arange(self.block(rows))
    return np.concatenate([at[::2], at[1::2]]) if self.packed else at

  def load(
    self, refs, lanes: slice = ALL, there=None, rows: slice = ALL, image: int = 0
  ):
    """Returns [R, lanes] of a block [images, R, width].

    Args:
      refs: the block's `columns`, a sequence.
      lanes: whole registers, where there are several columns.
      there: how many rows are real, a number or a traced one: the others, which hold
        anything, become zero. None: all are.
      rows: R of the block's, pairs of registers where they are packed.
      image: which of the block's.
    """
    if len(refs) > 1:
      start, stop, _ = lanes.indices(len(refs) * LANES)
      columns = refs[start // LANES : -(-stop // LANES)]
      parts = [self.load([ref], ALL, there, rows, image) for ref in columns]
      return jnp.concatenate(parts, 1)
    (ref,) = refs
    if not self.packed:
      return self.only(ref[image, rows, lanes], there)
    words = self._words(ref, rows, lanes, image)
    halves = words << 16, words & jnp.uint32(0xFFFF0000)
    x = [lax.bitcast_convert_type(half, jnp.float32) for half in halves]
    return self.only(jnp.concatenate(x, 0), there)

  def only(self, x, there, fill: float = 0.0):
    """Returns x [R, ...] with `fill` in the rows that are not there; None: all are."""
    if there is None or (isinstance(there, int) and there >= len(x)):
      return x
    if not self.packed:
      return _first(x, there, fill)
    half, counts = len(x) // 2, ((there + 1) // 2, there // 2)
    halves = [_first(x[:half], counts[0], fill), _first(x[half:], counts[1], fill)]
    return jnp.concatenate(halves, 0)

  def bias(self, rows: int, there: int):
    """Returns float32 [1, R], 0 for rows that are there, else what exp makes zero of."""
    at = lax.broadcasted_iota(jnp.int32, (1, rows), 1)
    half = rows // 2
    row = jnp.where(at < half, 2 * at, 2 * (at - half) + 1)
    return jnp.where(row < there, 0.0, NEVER)

  def store(self, ref, x, lanes: slice = ALL, rows: slice = ALL, image: int = 0):
    """Writes float32 x [R, lanes] to R rows of a block [images, R, width] of bfloat16."""
    if not self.packed:
      ref[image, rows, lanes] = x.astype(ref.dtype)
      return
    half = len(x) // 2
    if self.interpret:
      pairs = jnp.stack([x[:half], x[half:]], 1)
      ref[image, rows, lanes] = pairs.reshape(x.shape).astype(ref.dtype)
      return
    from jax.experimental.pallas import tpu as pltpu

    words = pltpu.pack_elementwise([x[:half], x[half:]], packed_dtype=ref.dtype)
    ref.bitcast(words.dtype)[image, _pairs(rows), lanes] = words

  def _words(self, ref, rows, lanes, image):
    if not self.interpret:
      return ref.bitcast(jnp.uint32)[image, _pairs(rows), lanes]
    x = ref[image, rows, lanes]
    pairs = x.reshape(len(x) // 2, 2, -1).swapaxes(1, 2)
    return lax.bitcast_convert_type(pairs, jnp.uint32)


def by_columns(kernel, inputs: int, columns: int):
  """Returns a kernel that is given each of its `inputs`, its first ones, in columns."""

  def run(*refs):
    given = inputs * columns
    grouped = (refs[i : i + columns] for i in range(0, given, columns))
    kernel(*grouped, *refs[given:])

  return run


NEVER = -1e30  # a score less any maximum; not -inf, whose differences may be NaN


def _pairs(rows: slice) -> slice:
  return rows if rows == ALL else slice(rows.start // 2, rows.stop // 2)


def _first(x, count, fill):
  """Returns x with `fill` after its first `count` rows; only their registers are touched."""
  whole = max(count, 0) // 8 * 8 if isinstance(count, int) else 0
  row = lax.broadcasted_iota(jnp.int32, x[whole:].shape, 0)
  rest = jnp.where(row < count - whole, x[whole:], jnp.asarray(fill, x.dtype))
  return jnp.concatenate([x[:whole], rest], 0) if whole else rest
