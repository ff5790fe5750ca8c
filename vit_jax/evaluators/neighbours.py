"""Exact nearest neighbours by cosine similarity, and their vote: no data, no model.

The classifier of Wu et al. (arXiv 1805.01978, section 3.4) and DINO (arXiv 2104.14294):
a class has the sum of exp(similarity / temperature) over its examples among the k nearest
training examples, and the largest sum wins.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from vit_jax import sharding
from vit_jax.evaluators.features import spread

# Queries and keys whose similarities a device holds in memory at once. The sizes do not
# depend on the mesh, so that every mesh computes the same products.
QUERIES, KEYS = 256, 16_384
_ROWS = PartitionSpec(('data', 'fsdp'))


def nearest(
  keys: np.ndarray,
  queries: np.ndarray,
  k: int,
  mesh,
  check_stop: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the k keys most similar to each query: similarities and rows, both [n, k].

  The most similar come first, ties in the order of rows. Queries are spread over the
  devices, keys pass through them in chunks. In float32 at highest precision. The
  similarity of a row that is not finite is inf, and that of a row of zeros is 0.

  Args:
    keys: [N, D] float32, on the host; N >= k. queries: [n, D] float32.
  """
  size = max(k, min(KEYS, len(keys)))
  placed = spread(queries, QUERIES, mesh)
  best = (
    spread(np.full((len(queries), k), -np.inf, np.float32), QUERIES, mesh),
    spread(np.zeros((len(queries), k), np.int32), QUERIES, mesh),
  )
  for first in range(0, len(keys), size):
    check_stop()
    chunk = keys[first : first + size]
    place = np.int32(first), np.int32(len(chunk))
    chunk = np.pad(chunk, [(0, size - len(chunk)), (0, 0)])
    best, before = _updated(best, placed, chunk, *place, mesh), best
    jax.block_until_ready(before)  # no more than two chunks are on their way
  whole = jax.device_get(jax.device_put(best, sharding.replicated(mesh)))
  similarities, rows = (x[: len(queries)] for x in whole)
  return similarities, rows


@functools.partial(jax.jit, static_argnames='mesh')
def _updated(best, queries, keys, first, count, mesh):
  """Merges a chunk of keys into the best so far, each device for its queries."""
  shared = PartitionSpec()
  specs = (_ROWS, _ROWS, shared, shared, shared)
  merge = jax.shard_map(_merge, mesh=mesh, in_specs=specs, out_specs=_ROWS)
  return merge(best, queries, keys, first, count)


def _merge(best, queries, keys, first, count):
  """Merges for this device: best ([n, k], [n, k]); keys [size, D], `count` of them real."""
  keys = _normalized(keys)
  k = best[0].shape[1]

  def tile(args):
    (best, best_rows), queries = args
    s = jnp.dot(_normalized(queries), keys.T, precision='highest')
    s = jnp.where(jnp.isnan(s), jnp.inf, s)
    s = jnp.where(jnp.arange(len(keys)) < count, s, -jnp.inf)
    values, columns = jax.lax.top_k(s, k)
    # Lower rows come first: `top_k` prefers the first of equal values.
    values = jnp.concatenate([best, values], axis=1)
    rows = jnp.concatenate([best_rows, first + columns], axis=1)
    values, columns = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(rows, columns, axis=1)

  tiles = jax.tree.map(lambda x: x.reshape(-1, QUERIES, x.shape[-1]), (best, queries))
  merged = jax.lax.map(tile, tiles)
  return jax.tree.map(lambda x: x.reshape(-1, k), merged)


def _normalized(x):
  """Returns rows of norm 1, or 0; NaN where a row is not finite."""
  largest = jnp.abs(x).max(-1, keepdims=True)
  # Squares of numbers up to 1 neither over- nor underflow.
  x = x / jnp.where(largest == 0, 1, largest)
  norm = jnp.sqrt((x * x).sum(-1, keepdims=True))
  return x / jnp.maximum(norm, 1)  # a norm is 1 or more, except that of zeros


@jax.jit
def vote(similarities, labels, temperature: float | None):
  """Returns the class [n] that the neighbours of each query choose.

  The lowest of classes with equal sums wins.

  Args:
    similarities: [n, k], the largest first.
    labels: int [n, k], the neighbours' classes.
    temperature: of the weights; None: each neighbour has one vote.
  """

  def winner(neighbours):
    s, y = neighbours  # [k], [k]
    # Relative to the nearest: exp(1 / temperature) may overflow.
    weights = (
      jnp.ones_like(s) if temperature is None else jnp.exp((s - s[0]) / temperature)
    )
    # For each neighbour the total weight of its class.
    sums = jnp.where(y[:, None] == y[None, :], weights, 0).sum(-1)
    return jnp.where(sums == sums.max(), y, jnp.iinfo(y.dtype).max).min()

  at_once = max(1, 2**22 // similarities.shape[1] ** 2)  # comparisons of neighbours
  return jax.lax.map(winner, (similarities, labels), batch_size=at_once)
