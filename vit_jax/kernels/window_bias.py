"""A bias of attention within windows, which are shifted in every second block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class WindowBias(NamedTuple):
  """What is added to the scores of tokens in the same window.

  Attributes:
    windows: n, of an image.
    positions: float32 [M, N, N], by the places of query and key in a window.
    apart: bool [n, N, N], for each of the n: the pairs that lie together only because
      windows were shifted in a circle; None: there are none.
    masked: what is added for those, a number that bfloat16 holds.
  """

  windows: int
  positions: jax.Array
  apart: jax.Array | None = None
  masked: float = 0.0

  def scores(self, batch: int) -> jax.Array:
    """Returns what broadcasts to the scores of a batch of windows, [B n, M, N, N]."""
    bias = self.positions[None]
    if self.apart is None:
      return bias
    # For every image as booleans, to be read where scores are: a bias [B n, M, N, N] in
    # float32 would be written to memory, 8 % of two blocks on a v5e.
    every = (batch // self.windows, *self.apart.shape)
    apart = jnp.broadcast_to(self.apart, every).reshape(-1, 1, *self.apart.shape[1:])
    return bias + jnp.where(apart, self.masked, 0.0)
