"""Masks of patches made of rectangles: BEiT (arXiv 2106.08254), as in iBOT and DINOv2.

Half of the crops of a batch are masked. Shares, sizes and tries are those of the authors' code,
facebookresearch/dinov2. All randomness follows from a key, so that the number of devices does
not change the result.
"""

import functools
import math

import jax
import jax.numpy as jnp

# The number of crops among which shares are dealt, at most. The authors deal them among the
# crops of a device, 128 or 64.
GROUP = 64
# The share of crops that are masked.
SHARE = 0.5
# The smallest and the largest share of patches that are masked in such a crop.
RATIO = (0.1, 0.5)
# The least number of patches of a rectangle, unless fewer are left to be masked.
LEAST = 4
# The least height / width of a rectangle; the largest is 1 / ASPECT.
ASPECT = 0.3
# The number of rectangles in a row that may not fit.
TRIES = 10


def draw_masks(key, crops: int, grid: tuple[int, int]):
  """Returns bool [crops, h * w], the masked patches.

  In each group of consecutive crops, each masked one has its own slice of `RATIO`, in random
  order. Rectangles that do not fit leave a crop with fewer patches than its share, as in the
  authors' code.
  """
  order_key, ratio_key, key = jax.random.split(key, 3)
  groups, _ = count_groups(crops, math.prod(grid))
  masked = int(crops // groups * SHARE)
  ranks = jnp.tile(jnp.arange(crops // groups), (groups, 1))
  ranks = jax.random.permutation(order_key, ranks, axis=1, independent=True)
  rank = ranks.ravel()
  low, high = RATIO
  place = (rank + jax.random.uniform(ratio_key, (crops,))) / max(masked, 1)
  share = jnp.where(rank < masked, low + (high - low) * place, 0.0)
  targets = (math.prod(grid) * share).astype(jnp.int32)
  draw = functools.partial(draw_mask, grid=grid)
  return jax.vmap(draw)(jax.random.split(key, crops), targets)


def count_groups(crops: int, patches: int) -> tuple[int, int]:
  """Returns the number of groups, and the most patches that are masked in one of them."""
  size = math.gcd(crops, GROUP)
  masked, (low, high) = int(size * SHARE), RATIO
  shares = (low + (high - low) * (i + 1) / masked for i in range(masked))
  return crops // size, sum(math.ceil(patches * share) for share in shares)


def draw_mask(key, target, grid: tuple[int, int]):
  """Returns bool [h * w], with at most `target` patches masked by rectangles.

  It ends when `TRIES` rectangles in a row do not fit.
  """
  h, w = grid
  rows, columns = jnp.arange(h)[:, None], jnp.arange(w)
  log = math.log(ASPECT)

  def more(state):
    mask, failed, _ = state
    return (mask.sum() < target) & (failed < TRIES)

  def add(state):
    mask, failed, i = state
    u = jax.random.uniform(jax.random.fold_in(key, i), (4,))
    most = jnp.minimum(target - mask.sum(), int(h * w * RATIO[1]))
    area = LEAST + u[0] * (most - LEAST)
    aspect = jnp.exp(log - 2 * log * u[1])
    height = jnp.round(jnp.sqrt(area * aspect))
    width = jnp.round(jnp.sqrt(area / aspect))
    top, left = jnp.floor(u[2] * (h - height + 1)), jnp.floor(u[3] * (w - width + 1))
    box = (rows >= top) & (rows < top + height)
    box &= (columns >= left) & (columns < left + width)
    new = (box & ~mask).sum()
    fits = (height < h) & (width < w) & (new > 0) & (new <= most)
    return mask | (box & fits), jnp.where(fits, 0, failed + 1), i + 1

  start = jnp.zeros(grid, bool), jnp.int32(0), jnp.int32(0)
  mask, _, _ = jax.lax.while_loop(more, add, start)
  return mask.ravel()
