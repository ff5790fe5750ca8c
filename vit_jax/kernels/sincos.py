"""Positions as sines and cosines."""

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
