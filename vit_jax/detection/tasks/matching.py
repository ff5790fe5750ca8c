"""Bipartite matching: assigns objects to queries at the least total cost."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

# Replaces costs that are not finite, as when a model diverges, so that the search ends.
_WORST = 1e6


def match(cost: jax.Array, valid: jax.Array) -> jax.Array:
  """Matches each target with a query; returns int32 [..., N], -1 for no query.

  The matching has the least possible sum of costs. A query has at most one target. The
  device computes it, with `optax.assignment.hungarian_algorithm`; there is no gradient.

  Args:
    cost: float [..., Q, N], the cost of each query for each target, N <= Q. If there are
      several leading axes, the first is the batch, which a mesh may split.
    valid: bool or 0/1 [..., N]; 0 marks padding, which gets no query.

  Raises:
    ValueError: there are more targets than queries.
  """
  Q, N = cost.shape[-2:]
  if N > Q:
    raise ValueError(f'{N} targets for {Q} queries: each target needs one')
  cost = jax.lax.stop_gradient(cost).astype(jnp.float32)
  function = _match
  for _ in cost.shape[:-2]:
    function = jax.vmap(function)
  return _run_per_device(function)(cost, jnp.asarray(valid, bool))


def _match(cost, valid):
  Q, N = cost.shape
  cost = jnp.nan_to_num(cost, nan=_WORST, posinf=_WORST, neginf=-_WORST).T  # [N, Q]
  most, least = jnp.max(cost), jnp.min(cost)
  # Each target gets an extra column of its own after the queries. Padding takes it in one
  # step of the search. Without it, padding would try the queries one after another, because
  # their costs are equal (100 queries, 10 of 100 targets valid: 15 to 20 times as long on
  # CPU). A valid target never takes it, because it costs more than any exchange could save.
  dear = most + N * (most - least + 1)
  padding = jnp.where(jnp.eye(N, dtype=bool), 0.0, 1.0)
  cost = jnp.where(
    valid[:, None],
    jnp.concatenate([cost, jnp.full((N, N), dear)], 1),
    jnp.concatenate([jnp.ones((N, Q)), padding], 1),
  )
  target, place = optax.assignment.hungarian_algorithm(cost)
  query = jnp.full(N, -1, jnp.int32).at[target].set(place.astype(jnp.int32))
  return jnp.where(valid & (query < Q), query, -1)


def _run_per_device(function):
  """Makes each device run a function on its own part of the batch.

  Otherwise all devices would have to agree, after every step of the search, whether it is
  done.
  """

  def run(*args):
    mesh = jax.sharding.get_abstract_mesh()
    axes = ('data', 'fsdp')
    if not set(axes) <= set(mesh.axis_names) or args[0].ndim < 3:
      return function(*args)
    if len(args[0]) % (mesh.shape['data'] * mesh.shape['fsdp']):
      return function(*args)
    spec = PartitionSpec(axes)
    mapped = jax.shard_map(
      function, in_specs=(spec,) * len(args), out_specs=spec, check_vma=False
    )
    return mapped(*args)

  return run
