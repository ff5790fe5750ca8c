"""Positions as sines and cosines."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError


def sincos2d(h: int, w: int, width: int, temperature: float = 10_000.0) -> np.ndarray:
  """Returns the fixed 2-D sine-cosine embedding [1, h * w, D] in float32.

  From MoCo v3 (arXiv 2104.02057, section 4), frequencies as big_vision computes them:
  D / 4 of them, from 1 to 1 / temperature; [sin x, cos x, sin y, cos y], rows first.
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
  """Returns DETR's embedding [B, h, w, D] in float32, of places within what a mask shows.

  Rows, then columns, counted from 1 and divided by their number: angles of up to 2 pi,
  so that positions are shares of the image, whatever its padding. Of each, D / 4
  frequencies, geometric from 1 to nearly 1 / temperature, [sin, cos, sin, cos, ...]:
  arXiv 2005.12872, section A.4, constants of the authors' code.

  Args:
    mask: bool [B, h, w], False for padding.
    width: D.

  Raises:
    UserError: for a width that 4 does not divide.
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
