"""Position embeddings."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError, choose


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


class Learned(nn.Module):
  """Adds a learned embedding [1, N, D] to the tokens, the cls token's row included."""

  @nn.compact
  def __call__(self, x):
    shape = (1, *x.shape[1:])
    table = self.param(
      'pos_embedding', nn.initializers.normal(stddev=0.02), shape, jnp.float32
    )
    return x + table.astype(x.dtype)


POSEMBS = ('learn', 'sincos2d', 'none')


def add_posemb(kind: str, x, grid: tuple[int, int], *, name: str):
  """Adds a position embedding to tokens [B, N, D], from within a compact module.

  Args:
    kind: one of POSEMBS. With 'sincos2d' tokens before the grid's (cls) get none.
    grid: (h, w), the last h * w tokens.
    name: of the submodule that holds the learned table.
  """
  choose('posemb', kind, POSEMBS)
  if kind == 'learn':
    return Learned(name=name)(x)
  if kind == 'sincos2d':
    table = jnp.asarray(sincos2d(*grid, x.shape[-1]), x.dtype)
    extra = x.shape[1] - table.shape[1]
    return x + jnp.pad(table, ((0, 0), (extra, 0), (0, 0)))
  return x
