"""Gradients of a batch, in one piece or accumulated over micro-batches."""

import jax
import jax.numpy as jnp


def gradients(loss, params, batch: dict, rng, accum: int):
  """Returns (metrics, gradients) of a batch, computed in `accum` micro-batches.

  Each micro-batch has its own rng, so that dropout masks differ; without dropout the
  sum is the gradient of the whole batch.

  Args:
    loss: as `loss` of a task.
    params: those to differentiate by.
  """

  def micro(rng, part):
    grad = jax.value_and_grad(loss, has_aux=True)
    (_, metrics), grads = grad(params, part, rng)
    return metrics, grads

  if accum == 1:
    return micro(rng, batch)

  def split(x):  # [B, ...] -> [A, B/A, ...], strided: no example leaves its device
    return x.reshape(-1, accum, *x.shape[1:]).swapaxes(0, 1)

  parts = jax.tree.map(split, batch)
  shapes = jax.eval_shape(micro, rng, jax.tree.map(lambda x: x[0], parts))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def add(total, numbered):
    i, part = numbered
    return jax.tree.map(jnp.add, total, micro(jax.random.fold_in(rng, i), part)), None

  return jax.lax.scan(add, zeros, (jnp.arange(accum), parts))[0]
