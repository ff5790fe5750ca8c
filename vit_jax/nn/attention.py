"""Multi-head attention with the parameter tree of the published Google files."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.errors import UserError
from vit_jax.kernels.attention import WEIGHTS, attend
from vit_jax.nn.dense import Dense
from vit_jax.nn.dropout import Dropout
from vit_jax.nn.remat import ATTENDED


class MultiHeadDotProductAttention(nn.Module):
  """Projections to M heads, `attend_within`, and the projection back."""

  num_heads: int
  dropout: float = 0.0  # on the attention weights; 0 in every recipe of the paper
  fused: bool = True  # whether fused kernels may be used: see `attend`
  dtype: jnp.dtype = jnp.float32
  kernel_init: Callable = nn.initializers.xavier_uniform()
  key_bias: bool = True  # softmax does not see it, where scores are plain products

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
      inputs_k: [B, S, D], what keys are of where values are of other inputs.
      bias, mask: see `attend`.
      positions: called with query [B, N, M, Dh] and key [B, S, M, Dh]; it returns both,
        changed, and a bias or None: see `nn.positions`. Not beside `bias`.
    """
    inputs_kv = inputs_q if inputs_kv is None else inputs_kv
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
    split = lambda x, name, **kw: dense(outputs=heads, name=name, **kw)(x).reshape(
      *x.shape[:2], *heads
    )
    query = split(inputs_q, 'query')
    inputs_k = inputs_kv if inputs_k is None else inputs_k
    key = split(inputs_k, 'key', use_bias=self.key_bias)
    if positions is not None:
      query, key, bias = positions(query, key)
    x = attend_within(
      self,
      query,
      key,
      split(inputs_kv, 'value'),
      bias=bias,
      mask=mask,
      dropout=self.dropout if train else 0.0,
      fused=self.fused,
    )
    x = checkpoint_name(x.reshape(inputs_q.shape), ATTENDED)
    return dense(inputs=heads, name='out')(x)


def attend_within(
  module: nn.Module, query, key, value, *, dropout: float = 0.0, **options
):
  """`attend`, whose weights are variables of the calling compact module.

  Weights [B, M, N, S] are sown as `intermediates/.../attention_weights` when that
  collection is mutable, and are not computed on their own otherwise. Where there is a
  variable `perturbations/.../attention_weights`, it is added to them: the derivative by
  it, at zero, is that by the weights.

  Args:
    dropout: rate at which weights are dropped.
    **options: of `attend`, as are the arrays.
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

  return attend(query, key, value, dropout=drop, on_weights=on_weights, **options)
