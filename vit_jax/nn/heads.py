"""From tokens to one vector per image, and from that to logits."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.nn.attention import MultiHeadDotProductAttention
from vit_jax.nn.layer_norm import LayerNorm
from vit_jax.nn.mlp import MlpBlock


def linear_head(x, num_classes: int | None, bias_init: float = 0.0):
  """Returns logits [B, K] of [B, D], or `x` without classes; a layer named `head`.

  The kernel starts at 0, all logits at `bias_init`; from within a compact module.
  """
  if num_classes is None:
    return x
  return nn.Dense(
    num_classes,
    kernel_init=nn.initializers.zeros_init(),
    bias_init=nn.initializers.constant(bias_init),
    name='head',
  )(x)


class MAPHead(nn.Module):
  """Attention pooling: a learned probe attends to all tokens, [B, N, D] -> [B, D].

  arXiv 2106.04560, section 3.4; the tree is that of big_vision, all in float32.
  """

  num_heads: int
  mlp_dim: int
  act: str = 'gelu_tanh'
  norm_eps: float = 1e-6

  @nn.compact
  def __call__(self, x):
    B, _, D = x.shape
    init = nn.initializers.xavier_uniform()
    probe = jnp.broadcast_to(self.param('probe', init, (1, 1, D)), (B, 1, D))
    attention = MultiHeadDotProductAttention(
      self.num_heads, name='MultiHeadDotProductAttention_0'
    )
    x = attention(probe, x)  # [B, 1, D]
    y = LayerNorm(eps=self.norm_eps, name='LayerNorm_0')(x)
    return (x + MlpBlock(self.mlp_dim, act=self.act, name='MlpBlock_0')(y))[:, 0]
