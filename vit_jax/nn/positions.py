"""Position embeddings, added to tokens or in attention.

Table 8 of the ViT paper compares them; section D.4 defines them.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError, choose

ADDED = ('learn', 'learn2d', 'sincos2d')  # added to tokens
IN_ATTENTION = ('relative', 'rotary')  # in queries and keys, in every block
POSEMBS = (*ADDED, *IN_ATTENTION, 'none')
WHERE = ('stem', 'every', 'shared')


class Posemb(NamedTuple):
  """The positions of a Transformer; `models.vit.ViT` documents the fields."""

  kind: str
  where: str
  std: float | None
  cls: bool

  def check(self) -> None:
    """Raises UserError for an unknown kind or place, or a place that excludes the kind."""
    choose('posemb', self.kind, POSEMBS)
    choose('posemb_where', self.where, WHERE)
    if self.where != 'stem' and self.kind not in ADDED:
      raise UserError(
        f'posemb_where={self.where!r} is for positions that are added to tokens, a posemb '
        f'of {list(ADDED)}, not {self.kind!r}: leave it out.'
      )

  def embedding(self) -> 'PositionEmbedding':
    """Returns the module of positions that are added to tokens."""
    return PositionEmbedding(self.kind, self.std, self.cls, name='posembed_input')

  def in_attention(self, grid: tuple[int, int]):
    """Returns the `positions` of `MultiHeadDotProductAttention`, or None."""
    if self.kind == 'relative':
      return RelativePositions(grid, self.std, name='posembed_relative')
    return rotary(grid) if self.kind == 'rotary' else None


class PositionEmbedding(nn.Module):
  """Position embeddings added to the tokens.

  Attributes:
    kind: 'learn': a table `pos_embedding` [1, N, D] ("1-D" in the paper), with rows for
      tokens outside the grid (cls); 'learn2d': half of the channels by row, half by
      column, `pos_embedding_y` [1, h, D / 2] and `pos_embedding_x` [1, w, D / 2], with
      `pos_embedding_cls` [1, N - h w, D] for tokens outside the grid; 'sincos2d': see
      `sincos2d`, zero for tokens outside the grid.
    std: standard deviation of the initial values; None: 1 / sqrt(D).
    cls: whether tokens outside the grid have rows too; if not, theirs is zero.
  """

  kind: str
  std: float | None
  cls: bool

  @nn.compact
  def __call__(self, x, grid: tuple[int, int]):
    """Returns [1, N, D] in the dtype of the tokens.

    Args:
      x: tokens [B, N, D], of which only shape and dtype are read.
      grid: (h, w) of the last h * w tokens.

    Raises:
      UserError: for another grid than that of the tables.
    """
    (_, N, D), (h, w) = x.shape, grid
    others = N - h * w if self.cls else 0

    def table(name, rows, width):
      check_rows(self, name, rows, axis=1, grid=grid)
      std = D**-0.5 if self.std is None else self.std
      return self.param(name, nn.initializers.normal(std), (1, rows, width))

    if self.kind == 'learn':
      added = table('pos_embedding', others + h * w, D)
    elif self.kind == 'learn2d':
      if D % 2:
        raise UserError(
          f"posemb='learn2d' needs an even width, not {D}: change it, or take 'learn'."
        )
      down = table('pos_embedding_y', h, D // 2)[:, :, None]
      across = table('pos_embedding_x', w, D // 2)[:, None]
      halves = (jnp.broadcast_to(half, (1, h, w, D // 2)) for half in (down, across))
      added = jnp.concatenate([*halves], axis=-1).reshape(1, h * w, D)
      if others:
        outside = table('pos_embedding_cls', others, D)
        added = jnp.concatenate([outside, added], axis=1)
    else:
      added = sincos2d(h, w, D)
    if without := N - added.shape[1]:
      added = jnp.pad(added, ((0, 0), (without, 0), (0, 0)))
    return jnp.asarray(added, x.dtype)


class RelativePositions(nn.Module):
  """Relative positions in the sequence of tokens (arXiv 1803.02155, for keys only).

  The score of a query n for a key s is q_n . (k_s + r_(n-s)) / sqrt(Dh), where r is the
  row of `pos_embedding` [2 N - 1, Dh] for the offset n - s, the same for all heads. Tokens
  are numbered in sequence, cls first, then patches row by row; D.4 leaves this open.

  Attributes:
    grid: (h, w) of the patches, for the error.
    std: standard deviation of the initial values; None: 1 / sqrt(Dh).
  """

  grid: tuple[int, int]
  std: float | None

  @nn.compact
  def __call__(self, query, key):
    """Returns (query, key, bias [B, M, N, S] float32).

    Args:
      query: [B, N, M, Dh], of the first N of the S tokens.
      key: [B, S, M, Dh].
    """
    (_, N, _, Dh), S = query.shape, key.shape[1]
    std = Dh**-0.5 if self.std is None else self.std
    other = 'train a model with another posemb, as relative ones cannot be resized'
    check_rows(self, 'pos_embedding', 2 * S - 1, axis=-2, grid=self.grid, other=other)
    init = nn.initializers.normal(std)
    table = self.param('pos_embedding', init, (2 * S - 1, Dh))
    offsets = np.arange(N)[:, None] - np.arange(S) + S - 1  # from 0
    rows = jnp.take(table.astype(query.dtype), offsets, axis=-2)  # [N, S, Dh]
    bias = jnp.einsum(
      'bnmd,nsd->bmns',
      query * jnp.asarray(Dh**-0.5, query.dtype),
      rows,
      preferred_element_type=jnp.float32,
    )
    return query, key, bias


def check_rows(
  module,
  name: str,
  rows: int,
  *,
  axis: int,
  grid: tuple[int, int],
  other: str = 'fit these: vit_jax.load(..., image_size=(H, W))',
):
  """Raises UserError if a module has a table `name` with another number of rows.

  Args:
    module: a bound Linen module. Its table may not exist yet.
    rows: expected length of `axis`.
    grid: (h, w) of the patches, for the message.
    other: the alternative to other images, for the message.
  """
  if not module.has_variable('params', name):
    return
  existing = module.get_variable('params', name).shape[axis]
  if existing != rows:
    raise UserError(
      f'Images of {grid[0]}x{grid[1]} patches need {rows} rows of {name}: the position '
      f'embeddings have {existing}. Make the images of the size that the parameters are '
      f'for, or {other}.'
    )


# -- sines and cosines ------------------------------------------------------------------


def sincos2d(h: int, w: int, width: int, temperature: float = 10_000.0) -> np.ndarray:
  """Returns the fixed 2-D sine-cosine embedding [1, h * w, D] in float32.

  From MoCo v3 (arXiv 2104.02057, section 4), with big_vision's D / 4 frequencies, from 1
  to 1 / temperature. Channels are [sin x, cos x, sin y, cos y]; positions go row by row.
  """
  if width % 4:
    raise UserError(f'posemb sincos2d needs a width divisible by 4, not {width}.')
  y, x = np.mgrid[:h, :w]
  steps = max(width // 4 - 1, 1)
  omega = 1.0 / temperature ** (np.arange(width // 4) / steps)
  x, y = (np.outer(axis.ravel(), omega) for axis in (x, y))
  table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
  return table[None].astype(np.float32)


def sine_of_mask(
  mask: jax.Array, width: int, temperature: float = 10_000.0
) -> jax.Array:
  """Returns DETR's embedding [B, h, w, D] in float32, of positions within a mask.

  Rows and columns are counted from 1 and divided by their number, so that a position is a
  share of the image without its padding, as an angle of up to 2 pi. Each has D / 4
  frequencies, geometric from 1 to nearly 1 / temperature, in channels [sin, cos, sin, ...];
  rows come first. arXiv 2005.12872, section A.4, with the constants of the authors' code.

  Args:
    mask: bool [B, h, w], False for padding.
    width: D, a multiple of 4.
  """
  if width % 4:
    raise UserError(f'DETR needs a width divisible by 4, not {width}.')
  half = width // 2
  omega = temperature ** (-2 * (np.arange(half) // 2) / half).astype(np.float32)
  parts = []
  for axis in (1, 2):
    place = jnp.cumsum(mask.astype(jnp.float32), axis)
    last = jax.lax.index_in_dim(place, -1, axis)
    angle = (place / (last + 1e-6) * 2 * np.pi)[..., None] * omega
    parts += [jnp.where(np.arange(half) % 2, jnp.cos(angle), jnp.sin(angle))]
  return jnp.concatenate(parts, -1)


def angles(
  grid: tuple[int, int], tokens: int, head: int, base: float = 100.0
) -> np.ndarray:
  """Returns the angles of 2-D axial rotary positions, [N, Dh / 2] in float32.

  RoFormer (arXiv 2104.09864, equation 15) along each axis of the image, as "RoPE-Axial"
  of arXiv 2403.13298, equations 5 and 6. The Dh / 4 frequencies, base ** (-4 i / Dh), are
  multiplied by a patch's row in the first half and by its column in the second, from 0.

  Args:
    grid: (h, w) of the last h * w tokens. Tokens before them (cls) have angles of 0.
    tokens: N.
    head: Dh, channels of a head, a multiple of 4.
    base: base of the frequencies; 100 in arXiv 2403.13298.
  """
  if head % 4:
    raise UserError(
      f'posemb rotary needs heads of a multiple of 4 channels, not {head}: choose '
      'another num_heads (each has width / num_heads).'
    )
  h, w = grid
  frequencies = base ** (-np.arange(head // 4) / (head // 4))
  y, x = (np.outer(axis.ravel(), frequencies) for axis in np.mgrid[:h, :w])
  both = np.concatenate([y, x], axis=1).astype(np.float32)
  return np.pad(both, ((tokens - h * w, 0), (0, 0)))


def rotate(x, angles: np.ndarray):
  """Rotates channels i and i + Dh / 2 of x [B, N, M, Dh], as a pair, by angles[:, i]."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]  # [N, 1, Dh / 2]
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def rotary(grid: tuple[int, int]):
  """Returns the `positions` of `MultiHeadDotProductAttention` that rotate by `angles`."""

  def positions(query, key):
    by = angles(grid, key.shape[1], key.shape[-1])
    return rotate(query, by[: query.shape[1]]), rotate(key, by), None

  return positions
