"""k-nearest-neighbour classification on frozen features, a probe without fitting."""

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from vit_jax import sharding
from vit_jax.check import Range, nonempty
from vit_jax.errors import UserError
from vit_jax.evaluators.base import Metric
from vit_jax.evaluators.probe import Probe

# Maximum numbers of queries and of similarities that a device computes at a time. They do not
# depend on the mesh, so that every mesh computes the same products.
QUERIES, SIMILARITIES = 256, 2**26


class KNN(Probe):
  """Test accuracy of a vote of the most similar training examples.

  The protocol of DINO (arXiv 2104.14294) and Wu et al. (arXiv 1805.01978, section 3.4):
  similarity is the cosine of features, a neighbour's vote has the weight
  exp(similarity / temperature), and the class with the largest sum wins. The search is
  exact. All training features lie on every device: 3.9 GB for ImageNet at width 768.
  """

  METRICS: ClassVar = {r'.+_\d+nn': Metric(percent=True, larger_is_better=True)}

  def __init__(
    self,
    mesh,
    check_stop,
    model=None,
    *,
    k: Annotated[Sequence[Annotated[int, Range(1, 2**14)]], nonempty] = (10, 20),
    temperature: Annotated[float, Range(0, 1e6, '(]')] | None = 0.07,
    **options,
  ):
    """Opens the data; `options` are those of `Probe`.

    Args:
      k: numbers of neighbours. The papers use 10, 20, 100 and 200; 20 was best.
      temperature: the temperature of the votes' weights; None: each neighbour has one vote.
    """
    self.k, self.temperature = tuple(k), temperature
    super().__init__(mesh, check_stop, model, **options)
    for name, splits in self.datasets.items():
      self._check_count(name, splits['train'].num_examples)

  def measure(self, name, splits, extract) -> dict[str, float]:
    """Returns {'20nn': accuracy as a fraction}; NaN if features are not finite."""
    train_x, train_y = extract(splits['train'])
    self._check_count(name, len(train_y))
    test_x, test_y = extract(splits['test'])
    similarities, rows = nearest(
      train_x, test_x, max(self.k), self.mesh, self.check_stop
    )
    if not np.isfinite(similarities).all():
      return {f'{k}nn': np.nan for k in self.k}
    labels, metrics = train_y[rows], {}
    for k in self.k:
      votes = vote(similarities[:, :k], labels[:, :k], self.temperature)
      metrics[f'{k}nn'] = float(np.mean(jax.device_get(votes) == test_y))
    return metrics

  def _check_count(self, name: str, examples: int) -> None:
    if examples < max(self.k):
      raise UserError(
        f'knn {name}: k={list(self.k)} asks for more neighbours than the {examples} training '
        f'examples: set k=[{examples}] or less (evaluate: --set).'
      )


def nearest(
  keys: np.ndarray,
  queries: np.ndarray,
  k: int,
  mesh,
  check_stop: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, np.ndarray]:
  """Finds the k keys most similar to each query, in float32 at highest precision.

  Args:
    keys: [N, D] float32, the same on every host; N >= k.
    queries: [n, D] float32.

  Returns:
    (similarities, rows of the keys), both [n, k]. The most similar keys come first, and ties
    are in the order of rows. The similarity with a row that is not finite is inf, and with a
    row of zeros 0.
  """
  place = lambda x, s: jax.make_array_from_callback(x.shape, s, x.__getitem__)
  keys, queries = _normalize(keys), _normalize(queries)
  placed = place(keys, sharding.replicated_sharding(mesh))
  rows = min(QUERIES, max(1, SIMILARITIES // len(keys))) * sharding.batch_divisor(mesh)
  parts = []
  for first in range(0, len(queries), rows):
    check_stop()
    part = queries[first : first + rows]
    part = np.pad(part, [(0, rows - len(part)), (0, 0)])
    part = place(part, sharding.batch_sharding(mesh))
    parts.append(jax.device_get(_nearest(part, placed, k, mesh)))
  values, columns = (
    np.concatenate(x)[: len(queries)] for x in zip(*parts, strict=True)
  )
  return values, columns


def _normalize(x: np.ndarray) -> np.ndarray:
  """Scales rows to norm 1. Rows of zeros stay; rows that are not finite become NaN."""
  norm = np.sqrt(np.einsum('nd,nd->n', x, x, dtype=np.float64))[:, None]
  with np.errstate(invalid='ignore'):  # inf / inf is NaN
    return x / np.where(norm == 0, 1, norm).astype(np.float32)


@functools.partial(jax.jit, static_argnames=('k', 'mesh'))
def _nearest(queries, keys, k, mesh):
  def mine(queries, keys):
    s = jnp.dot(queries, keys.T, precision='highest')
    return jax.lax.top_k(jnp.where(jnp.isnan(s), jnp.inf, s), k)

  batch, shared = sharding.batch_sharding(mesh).spec, PartitionSpec()
  best = jax.shard_map(mine, mesh=mesh, in_specs=(batch, shared), out_specs=batch)
  return jax.lax.with_sharding_constraint(
    best(queries, keys), sharding.replicated_sharding(mesh)
  )


@jax.jit
def vote(similarities, labels, temperature: float | None):
  """Returns the class [n] for which the neighbours of each query vote.

  Of classes with equal sums, the lowest number wins.

  Args:
    similarities: [n, k], the largest first.
    labels: int [n, k], the classes of the neighbours.
  """

  def winner(neighbours):
    s, y = neighbours  # [k], [k]
    # Weights are relative to the nearest neighbour, because exp(1 / temperature) may overflow.
    weights = (
      jnp.ones_like(s) if temperature is None else jnp.exp((s - s[0]) / temperature)
    )
    # For each neighbour, the total weight of its class.
    sums = jnp.where(y[:, None] == y[None, :], weights, 0).sum(-1)
    return jnp.where(sums == sums.max(), y, jnp.iinfo(y.dtype).max).min()

  # Compare at most 2**22 pairs of neighbours at a time.
  at_once = max(1, 2**22 // similarities.shape[1] ** 2)
  return jax.lax.map(winner, (similarities, labels), batch_size=at_once)
