"""The steps that a run keeps, and which of them `RUN@best` and `RUN@STEP` mean."""

import contextlib
import functools
import math
import re
from pathlib import Path

from vit_jax import evaluators
from vit_jax.checkpoint.checkpoints import FROZEN, Checkpoints
from vit_jax.checkpoint.storage import Damaged
from vit_jax.errors import UserError

BEST = 'best'


class Kept:
  """The steps in a run's folder, read-only: safe while the run goes on.

  Args:
    folder: of the run.
    config: of the run, as `run_config.read` returns it.

  Attributes:
    steps: those that are complete, ascending.
    metric: the one whose best step is kept, config.checkpoint.best, or None.
  """

  def __init__(self, folder: Path, config: dict):
    self._saved = Checkpoints(folder / 'checkpoints')
    self._evals = config.get('evals', {})
    self.steps: list[int] = self._saved.steps()
    self.metric: str | None = config.get('checkpoint', {}).get('best')

  @functools.cached_property
  def _bodies(self) -> dict[int, dict | None]:
    """Step -> what is saved beside its arrays; None where that is damaged."""
    found = {}
    for step in self.steps:
      found[step] = None
      with contextlib.suppress(Damaged):
        found[step] = self._saved.manifest(step)
    return found

  @property
  def metrics(self) -> dict[int, dict[str, float] | None]:
    """Step -> {name: number}, saved with it; None where that cannot be read."""
    return {step: body and body['metrics'] for step, body in self._bodies.items()}

  def shapes(self, step: int) -> dict[str, tuple[list[int], bool]]:
    """Returns {parameter: (shape, whether the run stores it)}; {} if damaged.

    Parameters that are not stored were not trained: see `checkpoint.checkpoints`.
    """
    found = {}
    for name, (shape, *_) in (self._bodies[step] or {'leaves': {}})['leaves'].items():
      item, _, parameter = name.partition('/')
      if item == 'params' or name.startswith(FROZEN):
        found[parameter] = (shape, item == 'params')
    return found

  @functools.cached_property
  def best(self) -> int | None:
    """The step where `metric` was best, the later of two that are equal, or None."""
    if self.metric is None:
      return None
    larger = evaluators.declared(self.metric, self._evals).larger_is_better
    sign = 1 if larger else -1
    values = {
      step: sign * (metrics or {}).get(self.metric, math.nan)
      for step, metrics in self.metrics.items()
    }
    known = [(value, step) for step, value in values.items() if math.isfinite(value)]
    return max(known)[1] if known else None

  def _could_be_best_by(self) -> str:
    """Returns a metric of the run that one value of is better: 'val/top1'."""
    for name, section in self._evals.items():
      for metric, declared in evaluators.metrics(section['type']).items():
        if declared.larger_is_better is not None and re.fullmatch(r'\w+', metric):
          return f'{name}/{metric}'
    return 'train/loss'

  def choose(self, source, wanted: str | None) -> int | None:
    """Returns the step that `RUN@wanted` means; None: the newest that is not damaged.

    Raises:
      UserError: for a step that is not there; it lists those that are.
    """
    if wanted is None:
      return None
    best = f', and {self.best} is the best' if self.best is not None else ''
    there = f'steps there: {self.steps or "none"}{best}'
    if wanted == BEST:
      if self.metric is None:
        metric = self._could_be_best_by()
        raise UserError(
          f'{source}: the run names no metric to be best by; {there}. The newest is the '
          'run without @best; to keep the best too, train with '
          f'--config.checkpoint.best={metric}.'
        )
      if self.best is None:
        raise UserError(f'{source}: no step has a finite {self.metric!r}; {there}.')
      return self.best
    if not wanted.isdecimal() or int(wanted) not in self.steps:
      raise UserError(f'{source}: no step {wanted!r}; {there}.')
    return int(wanted)
