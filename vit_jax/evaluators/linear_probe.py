"""A linear classifier of frozen features, its penalty chosen on a validation split."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import jax
import numpy as np

from vit_jax import distributed
from vit_jax.check import Choice, Count, Range, Section, Seed, Size, nonempty
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.evaluators import features, logistic, lsr
from vit_jax.evaluators.base import Metric

# {solver: the penalties that it chooses from}. They are penalties of sums over examples,
# so that one list serves small and large data sets.
SOLVERS = {
  'lbfgs': tuple(10.0**exponent for exponent in range(-4, 6)),
  'ridge': lsr.SWEEP_L2,
}
TOLERANCE, MAX_ITERATIONS = 1e-5, 1000
_Penalty = Annotated[float, Range(0, 1e30, '(]')]


@dataclasses.dataclass(frozen=True)
class DataSet(features.DataSet):
  """A data set of a linear probe.

  Without `val`, a part of `train` is held out to choose the penalty.
  """

  val: str | None = None


class LinearProbe(features.Probe):
  """Accuracy on a test split of a linear classifier fitted to a train split.

  It is fitted with each penalty; the one with the best accuracy on the validation split
  (the strongest of equally good ones) is fitted again to train and validation together,
  and that is tested. With a single penalty nothing is chosen and nothing held out.

  Solver 'lbfgs': multinomial logistic regression, see `logistic`. Solver 'ridge': least
  squares in closed form, as in few-shot evaluation, see `lsr`; on one device.
  """

  METRICS: ClassVar = {
    r'.+_top1': Metric(percent=True, larger_is_better=True),
    r'.+_top1_val': Metric(percent=True, larger_is_better=True, detail=True),
    r'.+_l2': Metric(),
    r'.+_(gradient|iterations)': Metric(detail=True),
  }

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    check_stop: Callable[[], None],
    *,
    datasets: Annotated[dict[str, Annotated[dict, Section(DataSet)]], nonempty],
    pp: Annotated[str, registry.check],
    batch_size: Size,
    solver: Annotated[str, Choice(SOLVERS)] = 'lbfgs',
    l2: Annotated[Sequence[_Penalty], nonempty] | None = None,
    standardize: bool = True,
    val_share: Annotated[float, Range(0, 1, '()')] = 0.2,
    seed: Seed = 0,
    tolerance: Annotated[float, Range(0, 1e6, '(]')] = TOLERANCE,
    max_iterations: Count = MAX_ITERATIONS,
    feature: str = 'pre_logits',
  ):
    """Opens the data; arguments not named here are those of `Probe`.

    Args:
      solver: 'lbfgs' or 'ridge'.
      l2: penalties to choose from, of the sum over examples; scikit-learn's C is 1 / l2.
        None: 1e-4, 1e-3, ... 1e5; with 'ridge' 2^-10, 2^-9, ... 2^19.
      standardize: give every feature mean 0 and standard deviation 1 on the images that
        are fitted to, so that one list of penalties fits features of any scale. False to
        reproduce protocols without it, such as CLIP's.
      val_share: of the train split, held out of data sets without `val`; 0.2 as in VTAB.
      seed: of the choice of held-out examples.
      tolerance: of the largest derivative of the mean loss, at which 'lbfgs' ends; a
        tenth of scikit-learn's by default.
      max_iterations: of 'lbfgs', for each penalty.
    """
    self.solver = solver
    self.l2 = sorted(set(SOLVERS[solver] if l2 is None else l2), reverse=True)
    self.standardize, self.val_share, self.seed = standardize, val_share, seed
    self.tolerance, self.max_iterations = tolerance, max_iterations
    kind, splits = DataSet, ('train', 'val', 'test')
    super().__init__(mesh, check_stop, datasets, pp, batch_size, feature, kind, splits)
    for name, splits in self.datasets.items():
      if 'val' not in splits:  # raises at once if it is impossible
        self._held_out(name, *[splits['train'].num_examples] * 2)

  def measure(self, name, splits, extract) -> dict[str, float]:
    """Returns the accuracies of one data set, and facts about the fit.

    `top1` is on the test split, `top1_val` that of the chosen penalty `l2` on the
    validation split. With 'lbfgs' also `iterations` and `gradient`, the largest derivative
    of the mean loss where the last fit ended. NaN where squares of features are not finite.
    """
    parts = {split: extract(batches) for split, batches in splits.items()}
    test, classes = parts.pop('test'), splits['test'].num_classes
    fitted = tuple(map(np.concatenate, zip(*parts.values(), strict=True)))
    held_out = self._held_out(name, len(fitted[1]), len(parts['train'][1]))
    del parts
    solve = {'lbfgs': self._lbfgs, 'ridge': self._ridge}[self.solver]
    return solve(name, fitted, held_out, test, classes)

  def _held_out(self, name: str, examples: int, train: int) -> np.ndarray:
    """Returns which examples, bool [N], choose the penalty; the others are fitted to."""
    if len(self.l2) == 1 or examples > train:  # the named validation split comes last
      return np.arange(examples) >= train
    chosen = np.random.default_rng(self.seed).permutation(train)
    count = round(self.val_share * train)
    if not 0 < count < train:
      raise UserError(
        f'linear probe {name}: val_share={self.val_share} of {train} training examples '
        'leaves a part empty; name a split val, or a single l2.'
      )
    return np.isin(np.arange(train), chosen[:count])

  def _ridge(self, name, fitted, held_out, test, num_classes) -> dict[str, float]:
    x, y = fitted
    accuracies = functools.partial(
      lsr.accuracies_alone,
      num_classes=num_classes,
      device=lsr.one_device(self.mesh),
      standardize=self.standardize,
    )
    best, metrics = self.l2[0], {}
    if len(self.l2) > 1:
      fit_to, choose_by = ((x[rows], y[rows]) for rows in (~held_out, held_out))
      best, metrics = self._choose(accuracies(fit_to, choose_by, self.l2))
    self.check_stop()
    (top1,) = jax.device_get(accuracies(fitted, test, [best]))
    return {'top1': float(top1), **metrics, 'l2': best}

  def _lbfgs(self, name, fitted, held_out, test, num_classes) -> dict[str, float]:
    rows = logistic.Rows(*fitted, num_classes, self.mesh)
    test = logistic.Rows(*test, num_classes, self.mesh)
    if not logistic.usable(rows.x) or not logistic.usable(test.x):
      return {'top1': np.nan}
    fit = functools.partial(
      logistic.fit,
      rows,
      standardize=self.standardize,
      tolerance=self.tolerance,
      max_iterations=self.max_iterations,
      check_stop=self.check_stop,
    )
    best, start, metrics, gradients = self.l2[0], None, {}, {}
    if len(self.l2) > 1:
      fits, on_val = {}, []
      for l2 in self.l2:  # each from the solution of the stronger penalty before it
        start = fits[l2] = fit(~held_out, l2, start=start)
        on_val.append(logistic.count_right(rows, start, held_out) / held_out.sum())
      gradients = {l2: f.gradient for l2, f in fits.items()}
      best, metrics = self._choose(on_val)
      start = fits[best]
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

  def _choose(self, on_val) -> tuple[float, dict[str, float]]:
    """Returns the best penalty and metrics; the strongest come first, and win ties."""
    best = int(np.argmax(jax.device_get(on_val)))
    return self.l2[best], {'top1_val': float(on_val[best])}

  def _warn(self, name: str, gradients: dict[float, float]) -> None:
    above = {l2: g for l2, g in gradients.items() if not g <= self.tolerance}
    if above:
      distributed.say(
        f'warning: linear probe {name}: L-BFGS has not converged for l2='
        f'{", ".join(f"{l2:g}" for l2 in above)}: derivatives up to '
        f'{max(above.values()):.1e} exceed tolerance={self.tolerance:g}; raise '
        f'max_iterations={self.max_iterations}.'
      )
