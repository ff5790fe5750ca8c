"""Multi-head attention with the parameter tree of the published Google files."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  dropout: Callable[[jax.Array], jax.Array] | None = None,
  see_weights: Callable[[jax.Array], None] | None = None,
) -> jax.Array:
  """Scaled dot-product attention, softmax(q k' / sqrt(Dh)) v, softmax in float32.

  The one function through which all sequence attention goes; it picks the
  implementation: the fused cuDNN kernel on a GPU in half precision, unless weights are
  asked for or dropped or there is one query only, with no N x S weights to save; else
  two matrix products with the batch dimensions in front.

  Args:
    query: [B, N, M, Dh]; key and value: [B, S, M, Dh]; one dtype.
    dropout: applied to the weights [B, M, N, S].
    see_weights: called with the weights [B, M, N, S] in float32, before dropout.

  Returns:
    [B, N, M, Dh] in the dtype of `value`.
  """
  half = query.dtype in (jnp.bfloat16, jnp.float16)
  plain = dropout or see_weights or query.shape[1] == 1
  if half and jax.default_backend() == 'gpu' and not plain:
    return jax.nn.dot_product_attention(query, key, value, implementation='cudnn')
  query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))  # [B, M, N, Dh]
  scores = jnp.einsum('bmnd,bmsd->bmns', query, key, preferred_element_type=jnp.float32)
  weights = jax.nn.softmax(scores, axis=-1)
  if see_weights:
    see_weights(weights)
  weights = weights.astype(value.dtype)
  if dropout:
    weights = dropout(weights)
  return jnp.einsum('bmns,bmsd->bmnd', weights, value).swapaxes(1, 2)


class MultiHeadDotProductAttention(nn.Module):
  """Projections to M heads, `attend`, and the projection back.

  Weights [B, M, N, S] are sown as `intermediates/.../attention_weights` when that
  collection is mutable, and are not computed on their own otherwise.
  """

  num_heads: int
  dropout: float = 0.0  # on the attention weights; 0 in every recipe of the paper
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, inputs_q, inputs_kv=None, *, train: bool = False):
    """Maps [B, N, D] (attending to [B, S, D], default itself) to [B, N, D]."""
    inputs_kv = inputs_q if inputs_kv is None else inputs_kv
    width = inputs_q.shape[-1]
    if width % self.num_heads:
      raise UserError(
        f'num_heads={self.num_heads} does not divide the width {width}: each head has '
        'width / num_heads channels.'
      )

    # Projections see [B N, D], one matrix product each: as contractions of [B, N, D]
    # their backward pass transposes the activations.
    def project(name, x):  # [B, N, D] -> [B, N, M, Dh]
      heads = (self.num_heads, width // self.num_heads)
      y = nn.DenseGeneral(
        heads,
        kernel_init=nn.initializers.xavier_uniform(),
        dtype=self.dtype,
        name=name,
      )(x.reshape(-1, x.shape[-1]))
      return y.reshape(*x.shape[:2], *heads)

    dropout = None
    if self.dropout and train:
      dropout = nn.Dropout(self.dropout, deterministic=False)
    see_weights = None
    if self.is_mutable_collection('intermediates'):

      def see_weights(weights):
        self.sow('intermediates', 'attention_weights', weights)

    x = attend(
      project('query', inputs_q),
      project('key', inputs_kv),
      project('value', inputs_kv),
      dropout=dropout,
      see_weights=see_weights,
    )
    y = nn.DenseGeneral(
      width,
      axis=(-2, -1),
      kernel_init=nn.initializers.xavier_uniform(),
      dtype=self.dtype,
      name='out',
    )(x.reshape(-1, *x.shape[2:]))
    return y.reshape(*x.shape[:2], width)
