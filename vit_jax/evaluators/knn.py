"""k-nearest-neighbour classification on frozen features: a probe with nothing to fit."""

from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import jax
import numpy as np

from vit_jax.check import Range, Section, Size, nonempty
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.evaluators import features, neighbours
from vit_jax.evaluators.features import DataSet
from vit_jax.evaluators.metric import Metric


class KNN:
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
    datasets: Annotated[dict[str, Annotated[dict, Section(DataSet)]], nonempty],
    pp: Annotated[str, registry.check],
    batch_size: Size,
    k: Annotated[Sequence[Annotated[int, Range(1, 2**14)]], nonempty] = (10, 20),
    temperature: Annotated[float, Range(0, 1e6, '(]')] | None = 0.07,
    feature: str = 'pre_logits',
  ):
    """Opens the data.

    Args:
      datasets: {name: arguments of `DataSet`}.
      pp: preprocessing of train and test images.
      batch_size: global.
      k: numbers of neighbours. The papers': 10, 20, 100 and 200, of which 20 was best.
      temperature: of the weights; None: each neighbour has one vote.
      feature: name of a [B, D] output of `predict`.

    Raises:
      UserError: for any of these being wrong, or a train split of fewer than k images.
    """
    self.k = tuple(k)
    self.temperature = temperature
    self._mesh, self._check_stop = mesh, check_stop
    self.datasets = features.open_splits(datasets, mesh, pp=pp, batch_size=batch_size)
    for name, splits in self.datasets.items():
      self._check_count(name, splits['train'].num_examples)
    self._features = features.Extractor('knn', feature, mesh, check_stop)

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns {'NAME_20nn': accuracy, a fraction} for every data set and k.

    NaN where features are not finite.
    """
    return {
      f'{name}_{k}nn': accuracy
      for name in self.datasets
      for k, accuracy in self._dataset(name, predict, variables).items()
    }

  def _dataset(self, name, predict, variables) -> dict[int, float]:
    train, test = self.datasets[name].values()
    train_x, train_y = self._features(train, predict, variables)
    self._check_count(name, len(train_y))
    test_x, test_y = self._features(test, predict, variables)
    found = neighbours.nearest(
      train_x, test_x, max(self.k), self._mesh, self._check_stop
    )
    similarities, rows = found
    if not np.isfinite(similarities).all():
      return dict.fromkeys(self.k, np.nan)
    labels = train_y[rows]
    votes = {
      k: neighbours.vote(similarities[:, :k], labels[:, :k], self.temperature)
      for k in self.k
    }
    return {k: float(np.mean(jax.device_get(v) == test_y)) for k, v in votes.items()}

  def _check_count(self, name: str, examples: int) -> None:
    if examples < max(self.k):
      raise UserError(
        f'knn {name}: {max(self.k)} neighbours of {examples} training examples. Ask for '
        f'fewer than k={list(self.k)}, or for another train split.'
      )
