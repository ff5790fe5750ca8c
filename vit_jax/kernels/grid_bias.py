"""A bias of attention that is the sum of one for the key's row and one for its column."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


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

  def factors(self, queries: int, keys: int, dtype) -> tuple[jax.Array, jax.Array]:
    """Returns (bias [B, M, N, h + w], places [S, h + w]), whose product is `scores`.

    The bias is zero for queries before those of the map; places are 1 at a key's own row and
    at its own column, and zero for keys before those of the map.

    Args:
      queries, keys: N and S.
      dtype: of both.
    """
    bias = jnp.concatenate([x.swapaxes(1, 2) for x in self], axis=-1).astype(dtype)
    if before := queries - bias.shape[2]:
      bias = jnp.pad(bias, ((0, 0), (0, 0), (before, 0), (0, 0)))
    h, w = self.rows.shape[-1], self.columns.shape[-1]
    places = np.zeros((keys, h + w), np.float32)
    rows, columns = np.divmod(np.arange(h * w), w)
    of_map = np.arange(keys - h * w, keys)
    places[of_map, rows] = places[of_map, h + columns] = 1
    return bias, jnp.asarray(places, dtype)
