"""Positions of maps of any size: a resized table, and relative positions in attention."""

import functools

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax import resample
from vit_jax.kernels.attention import GridBias

Pair = tuple[int, int]


class ResizedPositions(nn.Module):
  """A learned table `pos_embedding`, resized from its own grid to the grid of the tokens.

  Every call resizes it, by a bicubic method of PyTorch, so images may have any size.

  Attributes:
    grid: (h, w) of the table.
    class_row: whether the table begins with a row for a class token, which is not used.
    antialias: whether PyTorch's method is the antialiased one, which differs for larger
      grids, too.
  """

  grid: Pair
  class_row: bool
  antialias: bool = False

  @nn.compact
  def __call__(self, x):
    """Returns [1, h, w, D] for a map [B, h, w, D], in its dtype."""
    _, *grid, width = x.shape
    rows = self.class_row + self.grid[0] * self.grid[1]
    init = nn.initializers.normal(0.02)
    table = self.param('pos_embedding', init, (1, rows, width))
    table = table[0, int(self.class_row) :].reshape(*self.grid, width)
    if self.grid != tuple(grid):
      matrix = resample.bicubic_of_edges
      if self.antialias:
        matrix = functools.partial(resample.matrix, method='bicubic', antialias=True)
      for axis, (old, new) in enumerate(zip(self.grid, grid, strict=True)):
        resize = matrix(old, new).astype(np.float32)
        resized = jnp.tensordot(resize, table, (1, axis), precision='highest')
        table = jnp.moveaxis(resized, 0, axis)
    return table[None].astype(x.dtype)


class DecomposedPositions(nn.Module):
  """Adds q . rows[dy] + q . columns[dx] to scores; (dy, dx) is the offset from key to query.

  "MViTv2", arXiv 2112.01526, section 4.1, equation 4; ViTDet has them too. Parameters are
  `rows` [2 h - 1, Dh] and `columns` [2 w - 1, Dh], where h x w is the size of the larger
  map. Offsets are counted in its pixels. For maps of another size the parameters are
  resized linearly.

  Attributes:
    std: standard deviation of the initial values.
  """

  std: float = 0.02

  @nn.compact
  def __call__(self, query, key, grid: Pair, keys: Pair):
    """Returns (query, key, GridBias); see `MultiHeadDotProductAttention`.

    Args:
      query: [B, N, M, Dh]. The last queries are a map, row by row. Others get no bias.
      key: [B, S, M, Dh]. The last keys are a map, row by row.
      grid, keys: sizes (h, w) of the queries' map and of the keys' map.
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
    """Returns vectors [n, k, Dh], one for each query and key along one axis."""
    length = needed = 2 * max(n, k) - 1
    # An existing parameter may belong to another image size.
    if self.has_variable('params', name):
      length = self.get_variable('params', name).shape[0]
    start = nn.initializers.truncated_normal(self.std)
    table = self.param(name, start, (length, Dh), jnp.float32)
    if length != needed:
      matrix = resample.matrix(length, needed, 'bilinear', antialias=False)
      table = jnp.matmul(jnp.asarray(matrix, jnp.float32), table, precision='highest')
    # Offsets are computed in float32 and truncated to integers, as in the reference codes.
    steps = [np.float32(max(a / b, 1.0)) for a, b in ((k, n), (n, k))]
    at_query, at_key = (
      np.arange(m) * step for m, step in zip((n, k), steps, strict=True)
    )
    offsets = at_query[:, None] + at_key[::-1]
    return jnp.take(table, offsets.astype(int), axis=0)
