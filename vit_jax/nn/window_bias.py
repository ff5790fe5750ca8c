"""Biases of attention within windows, by the offsets of tokens, of both versions of Swin."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.nn.dense import Dense
from vit_jax.nn.windows import from_table

_INIT = nn.initializers.truncated_normal(0.02)


class TableBias(nn.Module):
  """A learned bias of each offset in the window and head, a `table` (V1)."""

  @nn.compact
  def __call__(self, query, key, window):
    """Returns (query, key, bias [M, N, N]); see `MultiHeadDotProductAttention`."""
    h, w = window
    shape = (2 * h - 1, 2 * w - 1, query.shape[-2])
    if self.has_variable('params', 'table'):  # images of another size: windows cut off
      shape = self.get_variable('params', 'table').shape
    table = self.param('table', _INIT, shape)
    return query, key, from_table(table, window)


class CosineBias(nn.Module):
  """Scores are cosines times a learned factor, their bias an MLP of log offsets (V2).

  Attributes:
    pretrained: the side of the windows on whose scale offsets are; 0: of their own.
  """

  pretrained: int

  @nn.compact
  def __call__(self, query, key, window):
    """Returns (query, key, bias [M, N, N]); see `MultiHeadDotProductAttention`."""
    *_, M, Dh = query.shape
    start = nn.initializers.constant(math.log(10.0))
    scale = self.param('logit_scale', start, (M,), jnp.float32)
    scale = jnp.exp(jnp.minimum(scale, math.log(100.0)))
    # `attend` divides the products by sqrt(Dh).
    query, key = _unit(query, scale[:, None] * math.sqrt(Dh)), _unit(key, 1.0)
    reach = [np.arange(1 - n, n) / max((self.pretrained or n) - 1, 1) for n in window]
    offsets = 8 * np.stack(np.meshgrid(*reach, indexing='ij'), -1)
    offsets = np.sign(offsets) * np.log2(np.abs(offsets) + 1) / np.log2(8)
    x = Dense(512, kernel_init=_INIT, name='Dense_0')(offsets.astype(np.float32))
    x = Dense(M, use_bias=False, kernel_init=_INIT, name='Dense_1')(nn.relu(x))
    # Less 8, which softmax does not see, so that 0 is neutral: the bias of tokens that
    # were added to a window and have no place in it.
    return query, key, 16 * nn.sigmoid(from_table(x, window)) - 8


def _unit(x, scale):
  """Returns vectors of length `scale`, computed in float32, zeros where they are zero."""
  wide = x.astype(jnp.float32)
  squares = (wide * wide).sum(-1, keepdims=True)
  nonzero = squares > 1e-24  # a padded key is zero: its derivatives are, not infinite
  inverse = jnp.where(nonzero, jax.lax.rsqrt(jnp.where(nonzero, squares, 1.0)), 0.0)
  return (wide * inverse * scale).astype(x.dtype)
