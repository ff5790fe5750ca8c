"""What attention kernels for TPUs do head by head: channels taken, multiplied, summed."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from vit_jax.kernels.tpu_rows import LANES, Rows, round_up


def heads(head: int, lanes: int) -> Iterator[tuple[slice, slice]]:
  """Yields each head's channels, and the whole registers that hold them.

  A head that does not fill its registers is not cut out of them, which would shift lanes:
  one operand of every product is zero on the other channels, which costs nothing as
  the matrix units are as wide as a register.
  """
  for start in range(0, lanes, head):
    stop = start + head
    yield (
      slice(start, stop),
      slice(start // LANES * LANES, min(round_up(stop, LANES), lanes)),
    )


def only(x, head: slice, window: slice):
  """Zeroes the channels of a window that are not the head's."""
  if head == window:
    return x
  lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) + window.start
  return jnp.where((lane >= head.start) & (lane < head.stop), x, jnp.zeros_like(x))


class Sum:
  """The sum over heads of [rows, lanes], written to a block as soon as it is complete.

  Attributes:
    rows: how to write to ref, [images, rows, lanes], at `image`.
    scale: what the sum is multiplied with.
    total: None, or float32 [rows, lanes], what blocks of queries before this one came to.
  """

  def __init__(self, rows: Rows, ref, scale: float = 1.0, total=None, image: int = 0):
    self.rows, self.ref, self.scale, self.total = rows, ref, scale, total
    self.image = image
    self._columns: dict[int, jax.Array] = {}  # of registers, by their first lane

  def add(self, x, head: slice, window: slice):
    """Adds a head's share of a window, zero on the channels of others."""
    for start in range(window.start, window.stop, LANES):
      stop = min(start + LANES, window.stop)
      column = x[:, start - window.start : stop - window.start]
      if start in self._columns:
        column = self._columns.pop(start) + column
      if stop <= head.stop:
        self._write(slice(start, stop), column)
      else:
        self._columns[start] = column

  def _write(self, lanes: slice, column):
    from jax.experimental import pallas as pl

    if self.scale != 1.0:
      column *= self.scale
    if self.total is not None:
      column += jnp.where(pl.program_id(2) > 0, self.total[:, lanes], 0.0)
      self.total[:, lanes] = column
    self.rows.store(self.ref, column, lanes, image=self.image)


def dot(a, b, over: tuple[int, int]):
  """Returns the float32 product of two matrices, summed over an axis of each."""
  return lax.dot_general(
    a, b, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32
  )


def reciprocal(total):
  """Returns 1 / total, of at least 1, without the cases of a division: 0 and infinities."""
  from jax.experimental import pallas as pl

  return pl.reciprocal(total, full_range=False)
