"""Relative positions of two maps, decomposed into rows and columns.

"MViTv2", arXiv 2112.01526, section 4.1, equation 4; ViTDet has them too.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax import resample
from vit_jax.kernels.grid_bias import GridBias

Pair = tuple[int, int]


class DecomposedPositions(nn.Module):
  """Adds q . rows[dy] + q . columns[dx] to the scores, for offsets between two maps.

  Parameters `rows` [2 h - 1, Dh] and `columns` [2 w - 1, Dh], h x w the larger of the two
  maps: offsets are counted in its pixels. Those of other maps are resized, linearly.

  Attributes:
    std: of the initial values.
  """

  std: float = 0.02

  @nn.compact
  def __call__(self, query, key, grid: Pair, keys: Pair):
    """Returns (query, key, GridBias); see `MultiHeadDotProductAttention`.

    Args:
      query: [B, N, M, Dh], the last of them a map, row by row; others get no bias.
      key: [B, S, M, Dh], alike.
      grid, keys: (h, w) of the map of the queries, and of that of the keys.
    """
    B, N, M, Dh = query.shape
    others = N - grid[0] * grid[1]
    x = query[:, others:].reshape(B, *grid, M, Dh)
    rows, columns = (
      self._between(name, n, k, Dh).astype(query.dtype)
      for name, n, k in zip(('rows', 'columns'), grid, keys, strict=True)
    )
    wide = dict(preferred_element_type=jnp.float32)
    rows = jnp.einsum('bhwmd,hkd->bhwmk', x, rows, **wide)
    columns = jnp.einsum('bhwmd,wkd->bhwmk', x, columns, **wide)
    flat = lambda x: x.reshape(B, -1, M, x.shape[-1])
    return query, key, GridBias(flat(rows), flat(columns))

  def _between(self, name: str, n: int, k: int, Dh: int):
    """Returns the vectors [n, k, Dh] of every query and key along one axis."""
    wanted = 2 * max(n, k) - 1
    length = wanted
    if self.has_variable('params', name):  # of images of another size
      length = self.get_variable('params', name).shape[0]
    start = nn.initializers.truncated_normal(self.std)
    table = self.param(name, start, (length, Dh), jnp.float32)
    if length != wanted:
      matrix = resample.matrix(length, wanted, 'bilinear', antialias=False)
      table = jnp.matmul(jnp.asarray(matrix, jnp.float32), table, precision='highest')
    # In float32 and cut to whole numbers, as the references do.
    steps = [np.float32(max(a / b, 1.0)) for a, b in ((k, n), (n, k))]
    at_query, at_key = (
      np.arange(m) * step for m, step in zip((n, k), steps, strict=True)
    )
    offsets = at_query[:, None] + at_key[::-1]
    return jnp.take(table, offsets.astype(int), axis=0)
