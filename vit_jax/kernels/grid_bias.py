"""A bias of attention that is the sum of one for the key's row and one for its column."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.kernels.tpu_rows import LANES


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

  def width(self, head: int) -> int:
    """Returns the channels that `folded` gives heads: whole registers of a TPU."""
    needed = head + self.rows.shape[-1] + self.columns.shape[-1]
    return -(-needed // LANES) * LANES

  def folded(self, query, key, value) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns wider (query, key, value) whose attention has the bias in its products.

    A query's further channels are its bias for each row and for each column, a key's are
    1 at its own row and column, and a value's are zero, as is what they attend to.

    Args:
      query: [B, N, M, Dh]; key and value: [B, S, M, Dh].
    """
    (B, N, M, Dh), S = query.shape, key.shape[1]
    h, w = self.rows.shape[-1], self.columns.shape[-1]
    width, dtype = self.width(Dh), query.dtype
    bias = jnp.concatenate(self, axis=-1) * width**0.5  # by which scores are divided
    bias = jnp.pad(
      bias, ((0, 0), (N - bias.shape[1], 0), (0, 0), (0, width - Dh - h - w))
    )
    query = query.astype(jnp.float32) * (width / Dh) ** 0.5
    query = jnp.concatenate([query, bias], axis=-1).astype(dtype)
    places = np.zeros((S, width - Dh), np.float32)
    rows, columns = np.divmod(np.arange(h * w), w)
    of_map = np.arange(S - h * w, S)
    places[of_map, rows] = places[of_map, h + columns] = 1
    places = jnp.broadcast_to(
      jnp.asarray(places, dtype)[None, :, None], (B, S, M, width - Dh)
    )
    key = jnp.concatenate([key, places], axis=-1)
    value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, width - Dh)))
    return query, key, value
