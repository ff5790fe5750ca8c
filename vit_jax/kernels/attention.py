"""Scaled dot-product attention."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from vit_jax.kernels import tpu_attention, tpu_attention_plan, tpu_window_attention
from vit_jax.kernels.grid_bias import GridBias
from vit_jax.kernels.placement import place
from vit_jax.kernels.window_bias import WindowBias

WEIGHTS = 'attention_weights'  # their name for policies of `jax.checkpoint`


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  bias: jax.Array | GridBias | WindowBias | None = None,
  mask: jax.Array | None = None,
  dropout: Callable[[jax.Array], jax.Array] | None = None,
  on_weights: Callable[[jax.Array], jax.Array | None] | None = None,
  fused: bool = True,
) -> jax.Array:
  """Scaled dot-product attention, softmax(q k' / sqrt(Dh) + bias) v.

  The one function through which all sequence attention goes. In half precision it is left
  to fused kernels, which keep the scores on chip: `tpu_attention` where the mesh
  (`jax.set_mesh`) is of TPUs; cuDNN's on NVIDIA GPUs, chosen when the program is lowered.
  Not with a mask or a bias, of which TPUs take a `GridBias` and a `WindowBias`, nor where
  weights are dropped or asked for, nor for a single query, with no N x S weights to save:
  then, and in float32, by `_plain`.

  Args:
    query: [B, N, M, Dh]; key and value: [B, S, M, Dh]; one dtype.
    bias: added to the scores; broadcastable to [B, M, N, S], or one of those.
    mask: bool, broadcastable to [B, M, N, S]: which keys a query attends to. A query
      without any attends to all alike.
    dropout: applied to the weights [B, M, N, S].
    on_weights: called with the weights [B, M, N, S], before dropout; what it returns,
      unless None, takes their place.
    fused: False for no fused kernels, which have no forward-mode derivative.

  Returns:
    [B, N, M, Dh] in the dtype of `value`.
  """
  plain = functools.partial(_plain, dropout=dropout, on_weights=on_weights)
  bare = mask is None and not dropout and not on_weights
  half = query.dtype in (jnp.bfloat16, jnp.float16)
  if not (fused and bare and half) or query.shape[1] == 1:
    return plain(query, key, value, bias, mask)
  if isinstance(bias, GridBias):
    added = bias.rows.shape[-1] + bias.columns.shape[-1]
    if plan := tpu_attention_plan.plan_by_head(query, key, added):
      factors = bias.factors(query.shape[1], key.shape[1], query.dtype)
      query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
      x = tpu_attention.attend_by_head(query, key, value, *factors, plan)
      return x.swapaxes(1, 2)
  if isinstance(bias, WindowBias) and (
    plan := tpu_attention_plan.plan_windows(query, bias.windows)
  ):
    return tpu_window_attention.attend(query, key, value, bias, plan)
  if bias is not None:
    return plain(query, key, value, bias)
  if plan := tpu_attention_plan.plan(query, key):
    return tpu_attention.attend(query, key, value, plan)
  if not _cudnn_takes(query):
    return plain(query, key, value)
  return lax.platform_dependent(query, key, value, cuda=_cudnn, default=plain)


def _plain(query, key, value, bias=None, mask=None, dropout=None, on_weights=None):
  query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))  # [B, M, N, Dh]
  scores = jnp.einsum('bmnd,bmsd->bmns', query, key, preferred_element_type=jnp.float32)
  if isinstance(bias, GridBias):
    bias = bias.scores(*scores.shape[2:])
  if isinstance(bias, WindowBias):
    bias = bias.scores(scores.shape[0])
  if bias is not None:
    scores += bias
  if mask is not None:
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
  if dropout or on_weights:
    x = _divided_first(scores, value, dropout, on_weights)
  else:
    x = weighted_average(scores, value)
  return x.swapaxes(1, 2)


def _divided_first(scores, value, dropout=None, on_weights=None):
  weights = checkpoint_name(softmax(scores, value.dtype), WEIGHTS)
  if on_weights and (changed := on_weights(weights)) is not None:
    weights = changed
  if dropout:
    weights = dropout(weights)
  return jnp.einsum('bmns,bmsd->bmnd', weights, value)


@jax.custom_jvp
def weighted_average(scores, value):
  """Returns softmax(scores) times `value`, the softmax in float32.

  On CPUs, where no derivative is taken, the product is divided by the sum of the weights, not
  each weight before it: XLA would hand softmax and product to YNNPACK as one, which does the
  product in one thread. (Divided last it takes a TPU 1.12 to 1.15 times the cycles.)

  Args:
    scores: float32 [B, M, N, S]. value: [B, M, S, Dh].

  Returns:
    [B, M, N, Dh] in the dtype of `value`.
  """
  return lax.platform_dependent(
    scores, value, cpu=_divided_last, default=_divided_first
  )


@weighted_average.defjvp
def _weighted_average_jvp(primals, tangents):
  return jax.jvp(_divided_first, primals, tangents)


def _divided_last(scores, value):
  weights = jnp.exp(scores - scores.max(-1, keepdims=True))
  x = jnp.einsum(
    'bmns,bmsd->bmnd',
    weights.astype(value.dtype),
    value,
    preferred_element_type=jnp.float32,
  )
  return (x / weights.sum(-1, keepdims=True)).astype(value.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(scores, dtype):
  """Softmax over the last axis, computed in float32; `dtype` is what is kept of it."""
  return jax.nn.softmax(scores.astype(jnp.float32)).astype(dtype)


@softmax.defjvp
def _softmax_jvp(dtype, primals, tangents):
  weights = softmax(*primals, dtype)
  return weights, _softmax_tangent(weights, *tangents)


# Keeps the weights as they are. A function of its own, so that JAX traces and transposes it
# once for each shape, not for each layer.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _softmax_tangent(weights, dscores):
  wide = weights.astype(jnp.float32)
  dweights = wide * dscores
  dweights -= wide * dweights.sum(-1, keepdims=True)
  return dweights.astype(weights.dtype)


def _cudnn(query, key, value):
  B, N, S = *query.shape[:2], key.shape[1]
  queries = keys = None
  if N % 2 or S % 2:
    # JAX refuses to differentiate odd lengths, such as 197 tokens: cuDNN's limit with a
    # bias, which JAX 0.10.2 to 0.12.0 apply to every call. So a token is added, and the
    # kernel is told the true lengths, which mask it.
    even = lambda x: jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
    query, key, value = even(query), even(key), even(value)
    # Sharded like the batch: each device's kernel takes the lengths of its own examples.
    full = lambda length: place(jnp.full((B, 1, 1), length, jnp.int32), 'batch')
    queries, keys = full(N)[:, 0, 0], full(S)[:, 0, 0]
  lengths = {'query_seq_lengths': queries, 'key_value_seq_lengths': keys}
  attend = functools.partial(jax.nn.dot_product_attention, implementation='cudnn')
  return attend(query, key, value, **lengths)[:, :N]


def _cudnn_takes(query) -> bool:
  """Whether cuDNN supports this head size on every GPU, and JAX's plugin is installed."""
  head = query.shape[-1]
  return head % 8 == 0 and head <= 128 and _has_cudnn()


@functools.cache
def _has_cudnn() -> bool:
  """Whether JAX can write cuDNN's kernel into a program: CUDA's plugin is installed."""
  x = jax.ShapeDtypeStruct((1, 2, 1, 64), jnp.bfloat16)
  try:
    jax.eval_shape(_cudnn, x, x, x)
  except RuntimeError:
    return False
  return True
