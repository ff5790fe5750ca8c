"""Multi-head attention with the parameter tree of the published Google files."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.errors import UserError
from vit_jax.kernels import ATTENDED, WEIGHTS
from vit_jax.kernels.attention import attend
from vit_jax.nn.layers import Dense, Dropout, LayerNorm, MlpBlock


class MultiHeadDotProductAttention(nn.Module):
  """Projects to M heads, attends, and projects back."""

  num_heads: int
  dropout: float = 0.0  # of the attention weights
  dtype: jnp.dtype = jnp.float32
  kernel_init: Callable = nn.initializers.xavier_uniform()
  key_bias: bool = True  # Softmax does not see it, where scores are plain products.

  @nn.compact
  def __call__(
    self,
    inputs_q,
    inputs_kv=None,
    *,
    inputs_k=None,
    train=False,
    bias=None,
    mask=None,
    positions=None,
  ):
    """Maps [B, N, D] (attending to [B, S, D], default itself) to [B, N, D].

    Args:
      inputs_k: [B, S, D], the inputs of the keys, where they differ from those of values.
      bias, mask: see `attend`.
      positions: takes query [B, N, M, Dh] and key [B, S, M, Dh]; returns both, changed,
        and a bias or None: see `nn.positions`. Not beside `bias`.
    """
    inputs_kv = inputs_q if inputs_kv is None else inputs_kv
    inputs_k = inputs_kv if inputs_k is None else inputs_k
    width = inputs_q.shape[-1]
    if width % self.num_heads:
      raise UserError(
        f'num_heads={self.num_heads} does not divide the width {width}: each head has '
        'width / num_heads channels.'
      )
    dense = functools.partial(
      Dense, width, kernel_init=self.kernel_init, dtype=self.dtype
    )
    heads = (self.num_heads, width // self.num_heads)
    project = lambda x, name, **kw: dense(outputs=heads, name=name, **kw)(x).reshape(
      *x.shape[:2], *heads
    )
    query = project(inputs_q, 'query')
    key = project(inputs_k, 'key', use_bias=self.key_bias)
    if positions is not None:
      query, key, bias = positions(query, key)
    value = project(inputs_kv, 'value')
    dropout = self.dropout if train else 0.0
    x = attend_in(self, query, key, value, bias, mask=mask, dropout=dropout)
    x = checkpoint_name(x.reshape(inputs_q.shape), ATTENDED)
    return dense(inputs=heads, name='out')(x)


def attend_in(
  module: nn.Module, query, key, value, bias=None, *, mask=None, dropout: float = 0.0
):
  """`attend`, whose weights are variables of the calling compact module.

  Weights [B, M, N, S] are sown as `intermediates/.../attention_weights` when that
  collection is mutable; otherwise they need not exist. A variable
  `perturbations/.../attention_weights` is added to them: the derivative by it, at zero, is
  the derivative by the weights.

  Args:
    dropout: rate at which weights are dropped.
  """
  sown = module.is_mutable_collection('intermediates')
  perturbed = module.has_variable('perturbations', WEIGHTS)
  drop = on_weights = None
  if dropout:
    drop = functools.partial(Dropout(dropout), deterministic=False)
  if sown or perturbed:

    def on_weights(weights):
      if sown:
        module.sow('intermediates', WEIGHTS, weights)
      if perturbed:
        added = module.get_variable('perturbations', WEIGHTS)
        weights = weights + added.astype(weights.dtype)
      return weights

  return attend(query, key, value, bias, mask=mask, dropout=drop, on_weights=on_weights)


class MAPHead(nn.Module):
  """Attention pooling: a learned probe attends to all tokens, [B, N, D] -> [B, D].

  arXiv 2106.04560, section 3.4. The tree is that of big_vision, all in float32.
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
    norm = LayerNorm(eps=self.norm_eps, name='LayerNorm_0')
    mlp = MlpBlock(self.mlp_dim, act=self.act, name='MlpBlock_0')
    x = attention(probe, x)  # [B, 1, D]
    return (x + mlp(norm(x)))[:, 0]
