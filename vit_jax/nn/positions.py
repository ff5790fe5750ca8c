"""Position embeddings, added to tokens or in attention.

Table 8 of the ViT paper compares them; section D.4 defines them.
"""

from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.nn.layers import MlpBlock

# Position embeddings that are added to tokens.
SINES = ('sincos2d', 'sincos2d_mae')
ADDED = ('learn', 'learn2d', *SINES)
# Position embeddings that act on queries and keys in every block.
IN_ATTENTION = ('relative', 'rotary')
POSEMBS = (*ADDED, *IN_ATTENTION, 'none')
WHERE = ('stem', 'every', 'shared')
TOKENS = ('prefix', 'cls', 'patches')
TABLES = ('none', 'layer', 'shared')


class PositionEmbedding(nn.Module):
  """Position embeddings added to the tokens.

  Attributes:
    kind: one of ADDED.
      'learn': a table `pos_embedding` [1, N, D] ("1-D" in the paper). It also has rows for
      tokens outside the grid, such as cls.
      'learn2d': half of the channels depend on the row, `pos_embedding_y` [1, h, D / 2],
      and half on the column, `pos_embedding_x` [1, w, D / 2]. Tokens outside the grid have
      a table of their own, `pos_embedding_cls` [1, N - h w, D].
      'sincos2d', 'sincos2d_mae': see `sincos2d`. Tokens outside the grid have zeros.
    std: standard deviation of the initial values; None: 1 / sqrt(D).
    tokens: which tokens outside the grid have rows: all ('prefix'), the first ('cls'),
      or none ('patches'). The others have zeros.
  """

  kind: str
  std: float | None
  tokens: str = 'prefix'

  @nn.compact
  def __call__(self, x, grid: tuple[int, int]):
    """Returns [1, N, D] in the dtype of the tokens.

    Args:
      x: tokens [B, N, D]. Only their shape and dtype are used.
      grid: (h, w) of the last h * w tokens.

    Raises:
      UserError: if the tables are for another grid.
    """
    (_, N, D), (h, w) = x.shape, grid
    others = {'prefix': N - h * w, 'cls': min(N - h * w, 1), 'patches': 0}[self.tokens]

    def table(name, rows, width):
      check_rows(self, name, rows, axis=1, grid=grid)
      std = D**-0.5 if self.std is None else self.std
      return self.param(name, nn.initializers.normal(std), (1, rows, width))

    if self.kind == 'learn':
      added = table('pos_embedding', others + h * w, D)
    elif self.kind == 'learn2d':
      if D % 2:
        raise UserError(
          f"posemb='learn2d' needs an even width, not {D}: change it, or use 'learn'."
        )
      down = table('pos_embedding_y', h, D // 2)[:, :, None]
      across = table('pos_embedding_x', w, D // 2)[:, None]
      halves = (jnp.broadcast_to(half, (1, h, w, D // 2)) for half in (down, across))
      added = jnp.concatenate([*halves], axis=-1).reshape(1, h * w, D)
      if others:
        outside = table('pos_embedding_cls', others, D)
        added = jnp.concatenate([outside, added], axis=1)
    else:
      added = sincos2d(h, w, D, self.kind)
    if without := N - added.shape[1]:
      others = added.shape[1] - h * w
      outside, added = added[:, :others], added[:, others:]
      added = jnp.pad(added, ((0, 0), (without, 0), (0, 0)))
      added = jnp.concatenate([outside, added], axis=1) if others else added
    return jnp.asarray(added, x.dtype)


class RelativePositions(nn.Module):
  """Relative positions of keys in the sequence of tokens (arXiv 1803.02155).

  The score of a query n for a key s is q_n . (k_s + r_(n-s)) / sqrt(Dh), where r is the
  row of `pos_embedding` [2 N - 1, Dh] for the offset n - s, the same for all heads. Tokens
  are numbered in sequence: cls first, then patches row by row. Section D.4 of the ViT paper
  does not specify this.

  Attributes:
    grid: (h, w) of the patches. Only an error message uses it.
    std: standard deviation of the initial values; None: 1 / sqrt(Dh).
  """

  grid: tuple[int, int]
  std: float | None

  @nn.compact
  def __call__(self, query, key):
    """Returns (query, key, bias [B, M, N, S] float32).

    Args:
      query: [B, N, M, Dh], for the first N of the S tokens.
      key: [B, S, M, Dh].
    """
    (_, N, _, Dh), S = query.shape, key.shape[1]
    std = Dh**-0.5 if self.std is None else self.std
    other = 'train a model with another posemb, as relative ones cannot be resized'
    check_rows(self, 'pos_embedding', 2 * S - 1, axis=-2, grid=self.grid, other=other)
    init = nn.initializers.normal(std)
    table = self.param('pos_embedding', init, (2 * S - 1, Dh))
    # Shift the offsets so that the smallest one is row 0.
    offsets = np.arange(N)[:, None] - np.arange(S) + S - 1
    rows = jnp.take(table.astype(query.dtype), offsets, axis=-2)  # [N, S, Dh]
    bias = jnp.einsum(
      'bnmd,nsd->bmns',
      query * jnp.asarray(Dh**-0.5, query.dtype),
      rows,
      preferred_element_type=jnp.float32,
    )
    return query, key, bias


class TableOfOffsets(nn.Module):
  """A learned bias of scores per head and offset in the grid (BEiT, arXiv 2106.08254).

  The offset (dy, dx) from a key to a query has row (dy + h - 1)(2 w - 1) + dx + w - 1 of
  `table` [R, M]. Three more rows are for pairs with tokens before the patches: a query
  before the patches, a key before them, and both.

  Attributes:
    grid: (h, w) of the patches.
    hidden: width of an MLP that computes the rows from the logarithms of dy and dx, as in
      timm's ViTs with relative positions; the three more rows are then zero. None: the rows
      are parameters.
    train: whether the MLP drops hidden channels, at timm's rate.
  """

  num_heads: int
  grid: tuple[int, int]
  hidden: int | None = None
  train: bool = False

  @nn.compact
  def __call__(self, tokens: int):
    """Returns the bias [1, M, N, N] of N tokens, in float32. Patches are the last tokens."""
    h, w = self.grid
    before, pairs = tokens - h * w, (2 * h - 1) * (2 * w - 1)
    rows = pairs + 3 * bool(before)
    if self.hidden is None:
      check_rows(self, 'table', rows, axis=-2, grid=self.grid)
      table = self.param('table', nn.initializers.zeros_init(), (rows, self.num_heads))
    else:
      offsets = np.stack(np.mgrid[1 - h : h, 1 - w : w], axis=-1).reshape(pairs, 2)
      logs = np.sign(offsets) * np.log1p(np.abs(offsets))
      init, M = nn.initializers.truncated_normal(0.02), self.num_heads
      mlp = MlpBlock(
        self.hidden, 0.125, 'relu', kernel_init=init, outputs=M, name='mlp'
      )
      table = mlp(logs.astype(np.float32), train=self.train)
      table = jnp.pad(table, ((0, rows - pairs), (0, 0)))
    y, x = (n.ravel() for n in np.mgrid[:h, :w])
    index = (y[:, None] - y + h - 1) * (2 * w - 1) + x[:, None] - x + w - 1
    index = np.pad(index, ((before, 0), (before, 0)), constant_values=pairs)
    index[before:, :before] = pairs + 1
    index[:before, :before] = pairs + 2
    return jnp.take(table, index, axis=0).transpose(2, 0, 1)[None]


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
    rows: the expected length of `axis`.
    grid: (h, w) of the patches, for the message.
    other: what the user can do instead of changing the images' size, for the message.
  """
  if not module.has_variable('params', name):
    return
  existing = module.get_variable('params', name).shape[axis]
  if existing != rows:
    raise UserError(
      f'Images of {grid[0]}x{grid[1]} patches need {rows} rows of {name}, but the position '
      f'embeddings have {existing}. Resize the images to the size that the parameters are '
      f'for, or {other}.'
    )


# -- sines and cosines ------------------------------------------------------------------


def sincos2d(h: int, w: int, width: int, kind: str = 'sincos2d') -> np.ndarray:
  """Returns the fixed 2-D sine-cosine embedding [1, h * w, D] in float32.

  It is MoCo v3's (arXiv 2104.02057, section 4), with big_vision's D / 4 frequencies from 1
  to 1 / 10,000. Channels are [sin x, cos x, sin y, cos y]. Positions are in the order of
  rows. With the kind 'sincos2d_mae', the sequence of frequencies ends one step earlier, as
  in MAE (arXiv 2111.06377) and AIMv2.
  """
  if width % 4:
    raise UserError(f'posemb sincos2d needs a width divisible by 4, not {width}.')
  y, x = np.mgrid[:h, :w]
  steps = max(width // 4 - (kind == 'sincos2d'), 1)
  omega = 1.0 / 10_000.0 ** (np.arange(width // 4) / steps)
  x, y = (np.outer(axis.ravel(), omega) for axis in (x, y))
  table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
  return table[None].astype(np.float32)


def sine_of_mask(mask: jax.Array, width: int) -> jax.Array:
  """Returns DETR's embedding of positions within a mask, [B, h, w, D] in float32.

  Rows and columns are counted from 1 and divided by their number without padding. The
  quotient is multiplied by 2 pi, which gives an angle. Rows and columns have D / 4
  frequencies each, in a geometric sequence from 1 to nearly 1 / 10,000. Their channels are
  [sin, cos, sin, ...], those of rows first. arXiv 2005.12872, section A.4, with the
  constants of the authors' code.

  Args:
    mask: bool [B, h, w], False for padding.
    width: D, a multiple of 4.
  """
  if width % 4:
    raise UserError(f'DETR needs a width divisible by 4, not {width}.')
  half = width // 2
  omega = 10_000.0 ** (-2 * (np.arange(half) // 2) / half).astype(np.float32)
  parts = []
  for axis in (1, 2):
    place = jnp.cumsum(mask.astype(jnp.float32), axis)
    last = jax.lax.index_in_dim(place, -1, axis)
    angle = (place / (last + 1e-6) * 2 * np.pi)[..., None] * omega
    parts += [jnp.where(np.arange(half) % 2, jnp.cos(angle), jnp.sin(angle))]
  return jnp.concatenate(parts, -1)


# -- rotary positions -------------------------------------------------------------------


class Kind(NamedTuple):
  """How published models rotate queries and keys by the positions of patches.

  RoFormer (arXiv 2104.09864, equation 15) is applied along both axes of the image. Tokens
  before the patches are not rotated.

  Attributes:
    axes: 'yx' or 'xy': the axis of the first Dh / 4 angles, then that of the second.
    interleaved: whether angle j rotates the channels 2 j and 2 j + 1, as in EVA-02;
      otherwise it rotates the channels j and j + Dh / 2, as in DINOv3.
    base: frequencies are base ** (-k / (Dh / 4)), k = 0, 1, ...
    side: for positions from -1 to 1, the side of the grid that both axes are divided by:
      max, min, or its own for each axis; None: positions are numbers of rows and columns.
  """

  axes: str
  interleaved: bool
  base: float
  side: Literal['own', 'max', 'min'] | None = None


ROPES = {
  # By row and column, from 0: RoPE-Axial of arXiv 2403.13298, equations 5 and 6.
  'rotary': Kind('yx', False, 100.0),
  'axial': Kind('xy', True, 100.0),  # as in the authors' weights
  # RoPE-Mixed of arXiv 2403.13298, equation 7: frequencies of x and y are learned.
  'mixed': Kind('xy', True, 10.0),
  # EVA-02 (arXiv 2303.11331) and Perception Encoder (arXiv 2504.13181).
  'eva': Kind('yx', True, 10_000.0),
  'pe': Kind('xy', True, 10_000.0),
  # DINOv3 (arXiv 2508.10104): positions in [-1, 1], angles of up to 2 pi.
  'dinov3': Kind('yx', False, 100.0, 'own'),
  # The same with the other values of the authors' option `normalize_coords`.
  'dinov3_max': Kind('yx', False, 100.0, 'max'),
  'dinov3_min': Kind('yx', False, 100.0, 'min'),
}


class Rope(nn.Module):
  """Rotates queries and keys by the positions of their patches in a grid.

  Attributes:
    kind: one of ROPES. 'mixed' has parameters `frequencies` [2, M, Dh / 2].
    grid: (h, w) of the last h * w tokens.
    base: the base of the frequencies, or all Dh / 4 periods; None: the kind's own base.
    reference: a grid to whose size the kinds 'eva' and 'pe' scale positions, or None.
    first: index of the first row and column: 0, or 1 for 'pe' with a class token.
    augment: (shift, jitter, rescale), by which positions of 'dinov3' are augmented in
      training; None: no augmentation.
    train: whether to augment positions.
  """

  kind: str
  grid: tuple[int, int]
  base: float | tuple[float, ...] | None = None
  reference: tuple[int, int] | None = None
  first: int = 0
  augment: tuple[float, float, float] | None = None
  train: bool = False

  @nn.compact
  def __call__(self, query, key):
    """Returns (rotated query, rotated key, None). There is no bias.

    Args:
      query: [B, N, M, Dh], for the first N of the S tokens.
      key: [B, S, M, Dh].
    """
    kind, (M, Dh) = ROPES[self.kind], query.shape[2:]
    if Dh % 4:
      raise UserError(
        f'rope and posemb=rotary need a multiple of 4 channels per head, not {Dh}: choose '
        'another num_heads (each head has width / num_heads channels).'
      )
    places = self._places(kind)  # [h w, 2]
    if self.kind == 'mixed':
      by = self.param('frequencies', _random_directions(kind.base), (2, M, Dh // 2))
      angles = jnp.einsum('na,amd->nmd', places, by, precision='highest')
    else:
      angles = self._angles(kind, places, Dh)[:, None]
    before = key.shape[1] - len(angles)
    xp = np if isinstance(angles, np.ndarray) else jnp
    angles = xp.pad(angles, ((before, 0), (0, 0), (0, 0)))  # [S, 1 or M, Dh / 2]
    turn = lambda x: rotate(x, angles[: x.shape[1]], kind.interleaved)
    return turn(query), turn(key), None

  def _places(self, kind: Kind):
    steps = [np.arange(n) + self.first for n in self.grid]
    if kind.side:
      h, w = self.grid
      both = {'own': (h, w), 'max': (max(h, w),) * 2, 'min': (min(h, w),) * 2}
      sides = both[kind.side]
      steps = [2 * (i + 0.5) / n - 1 for i, n in zip(steps, sides, strict=True)]
    elif self.reference is not None:
      sizes = zip(steps, self.grid, self.reference, strict=True)
      steps = [i / n * to for i, n, to in sizes]
    places = dict(zip('yx', np.meshgrid(*steps, indexing='ij'), strict=True))
    places = np.stack([places[axis].ravel() for axis in kind.axes], axis=1)
    if not (self.augment and self.train):
      return places
    # As in DINOv3's released code: shifts per axis, stretches per axis, a stretch of both.
    shift, *stretch = self.augment
    keys = jax.random.split(self.make_rng('dropout'), 3)
    places = places + jax.random.uniform(keys[0], (2,), minval=-shift, maxval=shift)
    for key, most, axes in zip(keys[1:], stretch, (2, 1), strict=True):
      log = jnp.log(most)
      places = places * jnp.exp(
        jax.random.uniform(key, (axes,), minval=-log, maxval=log)
      )
    return places

  def _angles(self, kind: Kind, places, head: int):
    if isinstance(self.base, tuple):
      if len(self.base) != head // 4:
        raise UserError(
          f'rope_base has {len(self.base)} periods, expected {head // 4}.'
        )
      frequencies = 1 / np.asarray(self.base)
    else:
      base = kind.base if self.base is None else self.base
      frequencies = base ** (-np.arange(head // 4) / (head // 4))
    if kind.side:
      frequencies = 2 * np.pi * frequencies
    angles = places[:, :, None] * frequencies
    return angles.reshape(len(places), -1).astype(np.float32)


def _random_directions(base: float):
  """Makes the initial frequencies of RoPE-Mixed, along random axes for each head."""

  def init(key, shape):
    _, M, half = shape
    size = base ** (-jnp.arange(half // 2) / (half // 2))
    turn = jax.random.uniform(key, (M, 1), maxval=2 * jnp.pi)
    along = lambda wave: jnp.concatenate(
      [size * wave(turn), size * wave(turn + jnp.pi / 2)], axis=1
    )
    return jnp.stack([along(jnp.cos), along(jnp.sin)])

  return init


def rotate(x, angles, interleaved: bool = False):
  """Rotates pairs of channels of x [B, N, M, Dh] by angles [N, 1 or M, Dh / 2]."""
  xp = np if isinstance(angles, np.ndarray) else jnp
  cos, sin = xp.cos(angles), xp.sin(angles)
  wide = x.astype(jnp.float32)
  if interleaved:
    wide = wide.reshape(*wide.shape[:-1], -1, 2)
    a, b = wide[..., 0], wide[..., 1]
  else:
    a, b = jnp.split(wide, 2, axis=-1)
  pair = (a * cos - b * sin, a * sin + b * cos)
  if interleaved:
    return jnp.stack(pair, axis=-1).reshape(x.shape).astype(x.dtype)
  return jnp.concatenate(pair, axis=-1).astype(x.dtype)
