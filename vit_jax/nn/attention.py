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
  implementation: explicit weights where someone asks for them, the fused cuDNN kernel
  on a GPU in half precision, else `jax.nn.dot_product_attention` as XLA compiles it.

  Args:
    query: [B, N, M, Dh]; key and value: [B, S, M, Dh]; one dtype.
    dropout: applied to the weights [B, M, N, S].
    see_weights: called with the weights [B, M, N, S] in float32, before dropout.

  Returns:
    [B, N, M, Dh] in the dtype of `value`.
  """
  if dropout is None and see_weights is None:
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    fused = 'cudnn' if half and jax.default_backend() == 'gpu' else 'xla'
    return jax.nn.dot_product_attention(query, key, value, implementation=fused)
  scale = query.shape[-1] ** -0.5
  scores = jnp.einsum('bnmd,bsmd->bmns', query, key, preferred_element_type=jnp.float32)
  weights = jax.nn.softmax(scores * scale, axis=-1)
  if see_weights is not None:
    see_weights(weights)
  weights = weights.astype(value.dtype)
  if dropout is not None:
    weights = dropout(weights)
  return jnp.einsum('bmns,bsmd->bnmd', weights, value)


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
        raise UserError

    def project(name, x):  # [B, N, D] -> [B, N, M, Dh]
      return nn.DenseGeneral(
        (self.num_heads, width // self.num_heads),
        kernel_init=nn.initializers.xavier_uniform(),
        dtype=self.dtype,
        name=name,
      )(x)

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
    return nn.DenseGeneral(
      width,
      axis=(-2, -1),
      kernel_init=nn.initializers.xavier_uniform(),
      dtype=self.dtype,
      name='out',
    )(x)
