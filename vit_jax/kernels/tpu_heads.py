"""What attention kernels for TPUs do head by head: channels taken, averaged, summed."""

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


def only(x, head: slice, span: slice):
  """Zeroes the channels of x [R, span] that are not the head's."""
  if head == span:
    return x
  lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) + span.start
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

  def add(self, x, head: slice, span: slice):
    """Adds a head's share of a span, zero on the channels of others."""
    for start in range(span.start, span.stop, LANES):
      stop = min(start + LANES, span.stop)
      column = x[:, start - span.start : stop - span.start]
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


def average(scores, v):
  """Returns softmax(scores) v, float32 [N, span].

  Args:
    scores: float32 [N, S]. v: [S, span], in the dtype of products.
  """
  weights = jnp.exp(scores - scores.max(1, keepdims=True))
  total = weights.sum(1, keepdims=True)
  return dot(weights.astype(v.dtype), v, (1, 0)) * _reciprocal(total)


def derivative(scores, v, g):
  """Returns (softmax(scores), the gradient by the scores), float32 [S, N] as the scores.

  Scores lie that way as two of three products with them then need no transposition.

  Args:
    scores: float32 [S, N]. v: [S, span]. g: [N, span], the gradient of `average`.
  """
  weights = jnp.exp(scores - scores.max(0, keepdims=True))
  norm = _reciprocal(weights.sum(0, keepdims=True))
  dweights = dot(v, g, (1, 1))
  mean = (weights * dweights).sum(0, keepdims=True) * norm
  weights *= norm
  return weights, weights * (dweights - mean)


def _reciprocal(total):
  """Returns 1 / total, of at least 1, without the cases of a division: 0 and infinities."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  # JAX 0.10, the last for Python 3.11, has it in `pl`.
  reciprocal = getattr(pltpu, 'reciprocal', None) or pl.reciprocal
  return reciprocal(total, full_range=False)
