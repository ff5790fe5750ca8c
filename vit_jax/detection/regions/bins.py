"""RoIAlign along one axis: where its samples lie, and the weight of each cell in a bin."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Samples of an adaptive bin are more than half a cell apart, so at most five of them lie
# within one cell of a given row. One more allows for rounding.
_NEAR = 6


class Axis(NamedTuple):
  """The samples of boxes along one axis of a map, float32 [...], in cells.

  Attributes:
    start: start of the first bin.
    width: width of a bin.
    step: distance between two samples.
    per_step: 1 / step, or 0.
    number: samples in a bin.
    share: 1 / number.
  """

  start: jax.Array
  width: jax.Array
  step: jax.Array
  per_step: jax.Array
  number: jax.Array
  share: jax.Array

  @classmethod
  def divide(cls, low, high, size: int, samples: int, aligned: bool) -> 'Axis':
    """Divides boxes from `low` to `high` into bins; arguments as in `bin_weights`."""
    start, length = (low - 0.5, high - low) if aligned else (low, high - low)
    length = length if aligned else jnp.maximum(length, 1)
    # `0 * length` hides `size` from XLA, which would multiply by 1 / size instead. The product
    # may be off in the last bit, and a sample on the map's edge then falls outside.
    width = length / (size + 0 * length)
    # ceil(length / size), computed without relying on the division: if a multiple of `size`
    # rounded up, every bin would get one more sample.
    whole = jnp.maximum(jnp.floor(width), 0)
    number = whole + (length > whole * size) + (length > (whole + 1) * size)
    number = jnp.full_like(width, samples) if samples else number
    share = 1 / jnp.maximum(number, 1)
    step = width * share
    per_step = jnp.where(step == 0, 0, 1 / jnp.where(step == 0, 1, step))
    return cls(start, width, step, per_step, number, share)

  def weights(self, bins, cell, cells: int, samples: int):
    """Returns the weight of each cell in each bin.

    A sample up to one cell outside of the map takes the outermost cell; one further away
    counts as 0.

    Args:
      bins, cell: float32 indices of bins and cells, which broadcast with the boxes.
      samples: samples in a bin; 0 if it depends on the box.
    """
    start = self.start + bins * self.width
    first = 0.0
    if not samples:
      first = jnp.maximum(jnp.floor((cell - 1 - start) * self.per_step - 0.5), 0)
    total = 0.0
    for i in range(samples or _NEAR):
      place = start + (first + i + 0.5) * self.step
      counts = (place >= -1) & (place <= cells) & (first + i < self.number)
      hat = 1 - jnp.abs(jnp.clip(place, 0, cells - 1) - cell)
      total += jnp.where(counts, jnp.maximum(hat, 0), 0)
    return total * self.share


def bin_weights(
  low: jax.Array,
  high: jax.Array,
  cells: int | jax.Array,
  size: int,
  samples: int = 0,
  aligned: bool = True,
  length: int | None = None,
) -> jax.Array:
  """Returns float32 [..., size, length]: the weight of each cell in each bin of one axis.

  Args:
    low, high: float32 [...], the ends of the boxes, in cells.
    cells: the number of cells of the map, or of each box's map, int [...].
    size, samples, aligned: as in `roi_align`.
    length: the cells to return weights of, those of the largest map; None: `cells`.
  """
  length = cells if length is None else length
  cells = jnp.asarray(cells)[..., None, None]
  axis = Axis.divide(
    low[..., None, None], high[..., None, None], size, samples, aligned
  )
  bins = jnp.arange(size, dtype=jnp.float32)[:, None]
  return axis.weights(bins, jnp.arange(length, dtype=jnp.float32), cells, samples)
