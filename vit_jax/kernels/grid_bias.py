"""A bias of attention that is the sum of one for the key's row and one for its column."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class GridBias(NamedTuple):
  """What is added to the scores of the last h w keys, a map, by the last queries.

  Attributes:
    rows: float32 [B, n, M, h], for keys in each row.
    columns: float32 [B, n, M, w], for keys in each column.
  """

  rows: jax.Array
  columns: jax.Array

  def scores(self, queries: int, keys: int) -> jax.Array:
    """Returns [B, M, N, S], zero for queries and keys before those of the maps."""
    rows, columns = (x.swapaxes(1, 2) for x in self)  # [B, M, n, h]
    bias = rows[..., :, None] + columns[..., None, :]
    bias = bias.reshape(*rows.shape[:3], -1)
    before = [
      (0, 0),
      (0, 0),
      *((n - m, 0) for n, m in zip((queries, keys), bias.shape[2:], strict=True)),
    ]
    return jnp.pad(bias, before) if before[2:] != [(0, 0)] * 2 else bias
