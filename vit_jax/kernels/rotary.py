"""Rotary positions: queries and keys turned by angles that grow with the position."""

import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError


def angles(
  grid: tuple[int, int], tokens: int, head: int, base: float = 100.0
) -> np.ndarray:
  """Returns the angles of 2-D axial rotary positions, [N, Dh / 2] in float32.

  RoFormer (arXiv 2104.09864, equation 15) along each axis of the image, as "RoPE-Axial"
  of arXiv 2403.13298, equations 5 and 6: Dh / 4 frequencies, base ** (-4 i / Dh), times
  the row of a patch, then times its column, both counted in patches from 0.

  Args:
    grid: (h, w) of the last h * w tokens; those in front of them (cls) have angles of 0.
    tokens: N.
    head: Dh, channels of a head.
    base: of the frequencies; 100, that of arXiv 2403.13298.

  Raises:
    UserError: unless Dh is a multiple of 4.
  """
  if head % 4:
    raise UserError(
      f'posemb rotary needs heads of a multiple of 4 channels, not {head}: choose '
      'another num_heads (each has width / num_heads).'
    )
  h, w = grid
  frequencies = base ** (-np.arange(head // 4) / (head // 4))
  y, x = (np.outer(axis.ravel(), frequencies) for axis in np.mgrid[:h, :w])
  turned = np.concatenate([y, x], axis=1).astype(np.float32)
  return np.pad(turned, ((tokens - h * w, 0), (0, 0)))


def rotate(x, angles: np.ndarray):
  """Turns channels i and i + Dh / 2 as a pair, by angle i.

  Args:
    x: [B, N, M, Dh].
    angles: [N, Dh / 2].

  Returns:
    [B, N, M, Dh] in the dtype of x, computed in float32.
  """
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]  # [N, 1, Dh / 2]
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)
