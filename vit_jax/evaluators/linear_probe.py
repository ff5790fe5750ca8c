"""A linear classifier on frozen features; a validation split chooses its penalty."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np

from vit_jax import distributed
from vit_jax.check import Count, Range, Section, nonempty
from vit_jax.errors import UserError
from vit_jax.evaluators import logistic, probe
from vit_jax.evaluators.base import Metric

# Penalties to choose from. They are relative to sums over examples, so that one list suits
# small and large data sets.
L2 = tuple(10.0**exponent for exponent in range(-4, 6))
# The part of the train split that is held out if there is no validation split, as in VTAB.
HELD_OUT = 0.2
_Penalty = Annotated[float, Range(0, 1e30, '(]')]


@dataclasses.dataclass(frozen=True)
class DataSet(probe.DataSet):
  """A data set of a linear probe.

  Without `val`, a part of `train` is held out to choose the penalty.
  """

  val: str | None = None


class LinearProbe(probe.Probe):
  """Test accuracy of a linear classifier that is fitted to a train split.

  The classifier is a multinomial logistic regression, see `logistic`. It is fitted once per
  penalty. The penalty with the best accuracy on the validation split wins, or the strongest
  of equally good ones. The classifier is then fitted to train and validation together with
  that penalty, and tested. With a single penalty nothing is held out.
  """

  DATA = DataSet
  METRICS: ClassVar = {
    r'.+_top1': Metric(percent=True, larger_is_better=True),
    r'.+_top1_val': Metric(percent=True, larger_is_better=True, detail=True),
    r'.+_l2': Metric(),
    r'.+_(gradient|iterations)': Metric(detail=True),
  }

  def __init__(
    self,
    mesh,
    check_stop,
    model=None,
    *,
    datasets: Annotated[dict[str, Annotated[dict, Section(DataSet)]], nonempty],
    l2: Annotated[Sequence[_Penalty], nonempty] = L2,
    standardize: bool = True,
    max_iterations: Count = 1000,
    **options,
  ):
    """Opens the data; `options` are those of `Probe`.

    Args:
      datasets: {name of a data set: fields of `DATA`, such as source, train and test}.
      l2: penalties to choose from. The loss is a sum over examples and not their mean, so
        scikit-learn's C is 1 / l2.
      standardize: whether to scale every feature to mean 0 and standard deviation 1 on the
        images that are fitted, so that one list of penalties suits features of any scale.
        False reproduces protocols without it, such as CLIP's.
      max_iterations: maximum number of iterations of L-BFGS, for each penalty.
    """
    self.l2 = sorted(set(l2), reverse=True)
    self.standardize, self.max_iterations = standardize, max_iterations
    super().__init__(mesh, check_stop, model, datasets=datasets, **options)
    for name, splits in self.datasets.items():
      if 'val' not in splits:
        # This raises now if there are too few examples to hold out.
        self._choose_validation(name, *[splits['train'].num_examples] * 2)

  def measure(self, name, splits, extract) -> dict[str, float]:
    """Returns the accuracies of one data set, and facts about the fit.

    `top1` is the accuracy on the test split, `l2` the chosen penalty, and `top1_val` its
    accuracy on the validation split. `iterations` and `gradient`, the largest derivative of
    the mean loss, are those of the last fit. `top1` is NaN if squares of features are not
    finite.
    """
    parts = {split: extract(batches) for split, batches in splits.items()}
    classes = splits['test'].num_classes
    test = logistic.Rows(*parts.pop('test'), classes, self.mesh)
    x, y = map(np.concatenate, zip(*parts.values(), strict=True))
    held_out = self._choose_validation(name, len(y), len(parts['train'][1]))
    rows = logistic.Rows(x, y, classes, self.mesh)
    del parts, x
    if not logistic.usable(rows.x) or not logistic.usable(test.x):
      return {'top1': np.nan}
    fit = functools.partial(
      logistic.fit,
      rows,
      standardize=self.standardize,
      max_iterations=self.max_iterations,
      check_stop=self.check_stop,
    )
    best, start, metrics, gradients = self.l2[0], None, {}, {}
    if len(self.l2) > 1:
      fits, on_val = {}, []
      for l2 in self.l2:
        # Start from the solution of the next stronger penalty.
        start = fits[l2] = fit(~held_out, l2, start=start)
        on_val.append(logistic.count_right(rows, start, held_out) / held_out.sum())
      gradients = {l2: f.gradient for l2, f in fits.items()}
      # The strongest penalties come first, and win ties.
      best = self.l2[int(np.argmax(on_val))]
      metrics, start = {'top1_val': float(max(on_val))}, fits[best]
    last = fit(np.ones(rows.num_rows), best, start=start)
    gradients[best] = max(last.gradient, gradients.get(best, 0))
    self._warn(name, gradients)
    return {
      'top1': logistic.count_right(test, last) / test.num_rows,
      **metrics,
      'l2': best,
      'iterations': last.iterations,
      'gradient': last.gradient,
    }

  def _choose_validation(self, name: str, examples: int, train: int) -> np.ndarray:
    """Returns the validation mask, bool [N]: the examples that choose the penalty."""
    # The validation split comes last if there is one.
    if len(self.l2) == 1 or examples > train:
      return np.arange(examples) >= train
    chosen = np.random.default_rng(0).permutation(train)
    count = round(HELD_OUT * train)
    if not 0 < count < train:
      raise UserError(
        f'linear probe {name}: {train} training examples are too few to hold out '
        f'{HELD_OUT:.0%}: set the split val, or a single l2.'
      )
    return np.isin(np.arange(train), chosen[:count])

  def _warn(self, name: str, gradients: dict[float, float]) -> None:
    above = {l2: g for l2, g in gradients.items() if not g <= logistic.TOLERANCE}
    if above:
      distributed.say(
        f'warning: linear probe {name}: L-BFGS has not converged for l2='
        f'{", ".join(f"{l2:g}" for l2 in above)}: derivatives up to '
        f'{max(above.values()):.1e} exceed {logistic.TOLERANCE:g}; raise '
        f'max_iterations={self.max_iterations}.'
      )
