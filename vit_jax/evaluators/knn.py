"""k-nearest-neighbour classification on frozen features: a probe with nothing to fit."""

from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import jax
import numpy as np

from vit_jax.check import Range, Size, nonempty
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.evaluators import neighbours
from vit_jax.evaluators.base import Metric
from vit_jax.evaluators.features import DataSets, Probe


class KNN(Probe):
  """Accuracy on a test split of a vote of the most similar training examples.

  The protocol of DINO (arXiv 2104.14294; Wu et al., arXiv 1805.01978): similarity is the
  cosine of features, a neighbour's vote has the weight exp(similarity / temperature).
  The search is exact.
  """

  METRICS: ClassVar = {r'.+_\d+nn': Metric(percent=True, larger_is_better=True)}

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    check_stop: Callable[[], None],
    *,
    datasets: DataSets,
    pp: Annotated[str, registry.check],
    batch_size: Size,
    k: Annotated[Sequence[Annotated[int, Range(1, 2**14)]], nonempty] = (10, 20),
    temperature: Annotated[float, Range(0, 1e6, '(]')] | None = 0.07,
    feature: str = 'pre_logits',
  ):
    """Opens the data; arguments not named here are those of `Probe`.

    Args:
      k: numbers of neighbours. The papers': 10, 20, 100 and 200, of which 20 was best.
      temperature: of the weights; None: each neighbour has one vote.
    """
    self.k, self.temperature = tuple(k), temperature
    super().__init__(mesh, check_stop, datasets, pp, batch_size, feature)
    for name, splits in self.datasets.items():
      self._check_count(name, splits['train'].num_examples)

  def measure(self, name, splits, extract) -> dict[str, float]:
    """Returns {'20nn': accuracy, a fraction}; NaN where features are not finite."""
    train_x, train_y = extract(splits['train'])
    self._check_count(name, len(train_y))
    test_x, test_y = extract(splits['test'])
    similarities, rows = neighbours.nearest(
      train_x, test_x, max(self.k), self.mesh, self.check_stop
    )
    if not np.isfinite(similarities).all():
      return {f'{k}nn': np.nan for k in self.k}
    labels, metrics = train_y[rows], {}
    for k in self.k:
      votes = neighbours.vote(similarities[:, :k], labels[:, :k], self.temperature)
      metrics[f'{k}nn'] = float(np.mean(jax.device_get(votes) == test_y))
    return metrics

  def _check_count(self, name: str, examples: int) -> None:
    if examples < max(self.k):
      raise UserError(
        f'knn {name}: k={list(self.k)} neighbours of {examples} training examples.'
      )
