"""Where a token is in the image: position embeddings, added or in attention.

Table 8 of the ViT paper compares them; section D.4 says what they are.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax import resample
from vit_jax.errors import UserError, choose
from vit_jax.kernels import rotary
from vit_jax.kernels.sincos import sincos2d

ADDED = ('learn', 'learn2d', 'sincos2d')  # to tokens
IN_ATTENTION = ('relative', 'rotary')  # of queries and keys, in every block
POSEMBS = (*ADDED, *IN_ATTENTION, 'none')
WHERE = ('stem', 'every', 'shared')


def check(kind: str, where: str, per_head: bool) -> None:
  """Raises UserError for an unknown kind, or an option that this kind does not have."""
  choose('posemb', kind, POSEMBS)
  choose('posemb_where', where, WHERE)
  if where != 'stem' and kind not in ADDED:
    raise UserError(
      f'posemb_where={where!r} is for positions that are added to tokens, and those of '
      f'posemb={kind!r} are not: leave it out, or choose a posemb of {list(ADDED)}.'
    )
  if per_head and kind != 'relative':
    raise UserError(
      f"posemb_per_head is for posemb='relative', not for {kind!r}: leave it out."
    )


class PositionEmbedding(nn.Module):
  """What is added to tokens for their place.

  Attributes:
    kind: 'learn': a table `pos_embedding` [1, N, D] ("1-D" in the paper), rows of other
      tokens than the grid's (cls) included; 'learn2d': half of the channels by row,
      half by column, `pos_embedding_y` [1, h, D / 2] and `pos_embedding_x` [1, w, D / 2],
      with `pos_embedding_cls` [1, N - h w, D] for other tokens, if there are any;
      'sincos2d': see there, other tokens get none.
    std: of the tables' initial values; None: 1 / sqrt(D).
  """

  kind: str
  std: float | None

  @nn.compact
  def __call__(self, x, grid: tuple[int, int]):
    """Returns [1, N, D] in the dtype of the tokens.

    Args:
      x: tokens [B, N, D], read for their shape and dtype alone.
      grid: (h, w), of the last h * w tokens.

    Raises:
      UserError: for another grid than the tables are for.
    """
    (_, N, D), (h, w) = x.shape, grid
    std = D**-0.5 if self.std is None else self.std
    others = N - h * w
    if self.kind == 'learn':
      table = self._table('pos_embedding', (N, D), std, grid)
    elif self.kind == 'learn2d':
      if D % 2:
        raise UserError(
          f"posemb='learn2d' needs an even width, not {D}: change it, or take 'learn'."
        )
      down = self._table('pos_embedding_y', (h, D // 2), std, grid)[:, :, None]
      across = self._table('pos_embedding_x', (w, D // 2), std, grid)[:, None]
      halves = (jnp.broadcast_to(half, (1, h, w, D // 2)) for half in (down, across))
      table = jnp.concatenate([*halves], axis=-1).reshape(1, h * w, D)
      if others:
        of_others = self._table('pos_embedding_cls', (others, D), std, grid)
        table = jnp.concatenate([of_others, table], axis=1)
    else:
      table = np.pad(sincos2d(h, w, D), ((0, 0), (others, 0), (0, 0)))
    return jnp.asarray(table, x.dtype)

  def _table(self, name: str, shape: tuple[int, int], std: float, grid):
    check_rows(self, name, shape[0], axis=1, grid=grid)
    return self.param(name, nn.initializers.normal(std), (1, *shape))


class ResizedPositions(nn.Module):
  """A learned table of another grid, `pos_embedding`, resized to that of the tokens.

  Bicubic as PyTorch has it, whenever it is used: images may be of any size.

  Attributes:
    grid: (h, w) of the table.
    class_row: whether it begins with a row of a class token, which is not read.
  """

  grid: tuple[int, int]
  class_row: bool

  @nn.compact
  def __call__(self, x):
    """Returns [1, h, w, D] for a map [B, h, w, D], in its dtype."""
    _, *grid, width = x.shape
    rows = self.class_row + self.grid[0] * self.grid[1]
    init = nn.initializers.normal(0.02)
    table = self.param('pos_embedding', init, (1, rows, width))
    table = table[0, int(self.class_row) :].reshape(*self.grid, width)
    if self.grid != tuple(grid):
      for axis, (old, new) in enumerate(zip(self.grid, grid, strict=True)):
        resize = resample.bicubic_of_edges(old, new).astype(np.float32)
        table = jnp.moveaxis(
          jnp.tensordot(resize, table, (1, axis), precision='highest'), 0, axis
        )
    return table[None].astype(x.dtype)


class RelativePositions(nn.Module):
  """Relative positions along the sequence of tokens, arXiv 1803.02155, of keys alone.

  The score of a query n for a key s gets q_n . r_(n-s) / sqrt(Dh) besides
  q_n . k_s / sqrt(Dh), r the row of `pos_embedding` for the offset n - s: [2 N - 1, Dh],
  or for each head [M, 2 N - 1, Dh]. Tokens count in their order, cls first, patches row
  by row; the paper (D.4) says neither this nor whether heads share the table.

  Attributes:
    grid: (h, w) of the patches, for the error.
    per_head: whether each head has a table of its own.
    std: of the initial values; None: 1 / sqrt(Dh).
  """

  grid: tuple[int, int]
  per_head: bool
  std: float | None

  @nn.compact
  def __call__(self, query, key):
    """Returns (query, key, bias [B, M, N, S] float32).

    Args:
      query: [B, N, M, Dh], of the first N of the S tokens.
      key: [B, S, M, Dh].
    """
    (_, N, M, Dh), S = query.shape, key.shape[1]
    std = Dh**-0.5 if self.std is None else self.std
    shape = (M, 2 * S - 1, Dh) if self.per_head else (2 * S - 1, Dh)
    other = 'train a model with another posemb, as relative ones cannot be resized'
    check_rows(self, 'pos_embedding', 2 * S - 1, axis=-2, grid=self.grid, other=other)
    table = self.param('pos_embedding', nn.initializers.normal(std), shape)
    offsets = np.arange(N)[:, None] - np.arange(S) + S - 1  # from 0
    rows = jnp.take(table.astype(query.dtype), offsets, axis=-2)  # [(M,) N, S, Dh]
    bias = jnp.einsum(
      'bnmd,mnsd->bmns' if self.per_head else 'bnmd,nsd->bmns',
      query * jnp.asarray(Dh**-0.5, query.dtype),
      rows,
      preferred_element_type=jnp.float32,
    )
    return query, key, bias


def rotate(grid: tuple[int, int]):
  """Returns the function that turns queries and keys by where their patches are.

  Its arguments are a query [B, N, M, Dh], of the first N of S tokens, and a key
  [B, S, M, Dh]; it returns (query, key, None): see `kernels.rotary`.
  """

  def turn(query, key):
    angles = rotary.angles(grid, key.shape[1], key.shape[-1])
    return (
      rotary.rotate(query, angles[: query.shape[1]]),
      rotary.rotate(key, angles),
      None,
    )

  return turn


_RESIZED = 'fit these: vit_jax.load(..., image_size=(H, W))'


def check_rows(
  module,
  name: str,
  rows: int,
  *,
  axis: int,
  grid: tuple[int, int],
  other: str = _RESIZED,
):
  """Raises UserError if a module's table is there and has another number of rows.

  Args:
    module: a bound Linen module.
    name: of its parameter.
    rows: wanted along `axis`.
    grid: (h, w) of the patches, for the message.
    other: what to do besides changing the images, for the message.
  """
  if not module.has_variable('params', name):
    return  # they are being made, for this size
  known = module.get_variable('params', name).shape[axis]
  if known != rows:
    raise UserError(
      f'Images of {grid[0]}x{grid[1]} patches need {rows} rows of {name}: the position '
      f'embeddings have {known}. Make the images of the size that the parameters are '
      f'for, or {other}.'
    )
