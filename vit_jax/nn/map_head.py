"""Multi-head attention pooling (Set Transformer; Scaling Vision Transformers)."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.nn.attention import MultiHeadDotProductAttention
from vit_jax.nn.layer_norm import LayerNorm
from vit_jax.nn.mlp import MlpBlock


class MAPHead(nn.Module):
  """A learned probe attends to all tokens: [B, N, D] -> [B, D].

  arXiv 2106.04560, section 3.4; the tree is that of big_vision.
  """

  num_heads: int
  mlp_dim: int
  act: str = 'gelu_tanh'
  norm_eps: float = 1e-6
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x):
    B, _, D = x.shape
    probe = self.param(
      'probe', nn.initializers.xavier_uniform(), (1, 1, D), jnp.float32
    )
    probe = jnp.broadcast_to(probe.astype(x.dtype), (B, 1, D))
    x = MultiHeadDotProductAttention(
      self.num_heads, dtype=self.dtype, name='MultiHeadDotProductAttention_0'
    )(probe, x)  # [B, 1, D]
    y = LayerNorm(self.dtype, self.norm_eps, name='LayerNorm_0')(x)
    y = MlpBlock(self.mlp_dim, act=self.act, dtype=self.dtype, name='MlpBlock_0')(y)
    return (x + y)[:, 0]
