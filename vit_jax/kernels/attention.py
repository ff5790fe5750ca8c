"""Scaled dot-product attention.

`attend` chooses the program, and `_plain` has the mathematics. Below them stand the softmax,
a bias that is a sum of two terms, and the programs for CPUs and NVIDIA GPUs.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from vit_jax.kernels import WEIGHTS, allows, place, tpus


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: 'jax.Array | GridBias | None' = None,
  *,
  mask: jax.Array | None = None,
  dropout: Callable[[jax.Array], jax.Array] | None = None,
  on_weights: Callable[[jax.Array], jax.Array | None] | None = None,
) -> jax.Array:
  """Scaled dot-product attention, softmax(q k^T / sqrt(Dh) + bias) v.

  All attention over sequences goes through this function. In bfloat16 and float16 a fused
  kernel may compute it. A kernel keeps the scores on chip and has no forward-mode derivative.
  XLA computes attention with a mask, with `dropout` or `on_weights`, or with a bias other
  than a `GridBias`.

  Args:
    query: [B, N, M, Dh].
    key, value: [B, S, M, Dh], in the dtype of `query`.
    bias: added to the scores before softmax, broadcastable to [B, M, N, S].
    mask: bool, broadcastable to [B, M, N, S]; False hides a key from a query. A query
      from which all keys are hidden attends to all keys equally.
    dropout: applied to the weights [B, M, N, S].
    on_weights: a function that is called with the weights [B, M, N, S] before dropout. If
      it returns an array, that replaces the weights.

  Returns:
    [B, N, M, Dh] in the dtype of `value`.
  """
  bare = mask is None and not dropout and not on_weights
  if bare and (kernel := _kernel(query, key, value, bias)):
    return kernel(query, key, value)
  return _plain(query, key, value, bias, mask, dropout, on_weights)


def _plain(query, key, value, bias=None, mask=None, dropout=None, on_weights=None):
  scale = query.shape[-1] ** -0.5
  # Scores are many more than queries, but a query of fewer bits would be rounded again.
  scales_query = query.dtype == jnp.float32
  if scales_query:
    query = query * jnp.float32(scale)
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))  # [B, M, N, Dh]
  scores = jnp.einsum('bmnd,bmsd->bmns', query, key, preferred_element_type=jnp.float32)
  if not scales_query:
    scores *= scale
  if isinstance(bias, GridBias):
    bias = bias.scores(*scores.shape[2:])
  if bias is not None:
    scores += bias
  if mask is not None:
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
  if dropout or on_weights:
    x = _average(scores, value, dropout, on_weights)
  else:
    # The same result, but faster on CPUs, which divide last.
    x = weighted_average(scores, value)
  return x.swapaxes(1, 2)


def _average(scores, value, dropout=None, on_weights=None):
  """Returns softmax(scores) @ value: [B, M, N, S] and [B, M, S, Dh] -> [B, M, N, Dh]."""
  weights = checkpoint_name(softmax(scores, value.dtype), WEIGHTS)
  if on_weights and (changed := on_weights(weights)) is not None:
    weights = changed
  if dropout:
    weights = dropout(weights)
  return jnp.einsum('bmns,bmsd->bmnd', weights, value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(scores, dtype):
  """Softmax over the last axis, computed in float32 and returned in `dtype`."""
  return jax.nn.softmax(scores.astype(jnp.float32)).astype(dtype)


@softmax.defjvp
def _softmax_jvp(dtype, primals, tangents):
  weights = softmax(*primals, dtype)
  return weights, _softmax_tangent(weights, *tangents)


# The backward pass stores only the weights, in their own dtype. All layers share this one
# function, so that JAX traces it once per shape and not once per layer.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _softmax_tangent(weights, dscores):
  wide = weights.astype(jnp.float32)
  dweights = wide * dscores
  dweights -= wide * dweights.sum(-1, keepdims=True)
  return dweights.astype(weights.dtype)


class GridBias(NamedTuple):
  """A bias for keys that form a map: one number for the key's row plus one for its column.

  The last h w keys are the map, row by row, and the last n queries have the bias. Earlier
  queries and keys, such as a class token, have no bias.

  Attributes:
    rows: float32 [B, n, M, h].
    columns: float32 [B, n, M, w].
  """

  rows: jax.Array
  columns: jax.Array

  def scores(self, queries: int, keys: int) -> jax.Array:
    """Returns the bias [B, M, N, S] for this many queries and keys."""
    rows, columns = (x.swapaxes(1, 2) for x in self)  # [B, M, n, h]
    bias = rows[..., :, None] + columns[..., None, :]
    bias = bias.reshape(*rows.shape[:3], -1)
    before = [(n - m, 0) for n, m in zip((queries, keys), bias.shape[2:], strict=True)]
    return jnp.pad(bias, [(0, 0), (0, 0), *before]) if any(map(any, before)) else bias


# -- platforms --------------------------------------------------------------------------


def _kernel(query, key, value, bias) -> Callable | None:
  """Returns the fused kernel for arrays of these shapes, or None."""
  if query.dtype not in (jnp.bfloat16, jnp.float16) or query.shape[1] == 1:
    return None  # A single query has no N x S weights that a kernel would save.
  arrays = (query, key, value, bias)
  if isinstance(bias, GridBias | None) and tpus(query.shape[0]) is not None:
    from vit_jax.kernels import tpu_attention

    plan = tpu_attention.plan(query, key, bias)
    if plan and allows('tpu_attention', attend, *arrays):
      return functools.partial(tpu_attention.attend, bias=bias, plan=plan)
    return None
  head = query.shape[-1]
  # cuDNN supports these head sizes on every GPU.
  supported = bias is None and head % 8 == 0 and head <= 128 and _can_write(cudnn)
  if supported and allows('cudnn_attention', attend, *arrays):
    return functools.partial(lax.platform_dependent, cuda=cudnn, default=_plain)
  return None


@jax.custom_jvp
def weighted_average(scores, value):
  """Returns `_average(scores, value)`. Without a derivative, CPUs divide by the sums last.

  XLA for CPUs passes a softmax and the product after it to YNNPACK, which computes the
  product in one thread. Here XLA itself computes the product exp(scores) value, which is then
  divided by the sums of exp(scores).
  """
  return lax.platform_dependent(scores, value, cpu=_divide_last, default=_average)


@weighted_average.defjvp
def _weighted_average_jvp(primals, tangents):
  return jax.jvp(_average, primals, tangents)


def _divide_last(scores, value):
  weights = jnp.exp(scores - scores.max(-1, keepdims=True))
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  x = product('bmns,bmsd->bmnd', weights.astype(value.dtype), value)
  return (x / weights.sum(-1, keepdims=True)).astype(value.dtype)


def _pad_to_even_length(query, key, value):
  """Calls cuDNN's attention; pads an odd length with one masked token."""
  B, N, S = *query.shape[:2], key.shape[1]
  if N % 2 == 0 and S % 2 == 0:
    return _cudnn_of(query, key, value)
  even = lambda x: jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
  # The lengths are split like the batch: each device has the lengths of its own examples.
  full = lambda length: place(jnp.full((B, 1, 1), length, jnp.int32))[:, 0, 0]
  lengths = {'query_seq_lengths': full(N), 'key_value_seq_lengths': full(S)}
  return _cudnn_of(even(query), even(key), even(value), **lengths)[:, :N]


def _cudnn_of(query, key, value, **lengths):
  return jax.nn.dot_product_attention(
    query, key, value, implementation='cudnn', **lengths
  )


# JAX 0.10.2 to 0.12.0 raise an error if cuDNN's attention of an odd length, such as 197
# tokens, is differentiated. Without a derivative it takes any length.
cudnn = jax.custom_vjp(_cudnn_of)
cudnn.defvjp(
  lambda *arrays: jax.vjp(_pad_to_even_length, *arrays),
  lambda vjp, gradient: vjp(gradient),
)


@functools.cache
def _can_write(kernel: Callable) -> bool:
  """Whether JAX's CUDA plugin is installed, so that programs can contain cuDNN's kernel."""
  x = jax.ShapeDtypeStruct((1, 2, 1, 64), jnp.bfloat16)
  try:
    jax.eval_shape(kernel, x, x, x)
  except RuntimeError:
    return False
  return True
