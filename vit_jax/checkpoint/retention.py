"""Which steps of a run are kept, and which of them was the best."""

import contextlib
import math
from collections.abc import Callable, Iterable

from vit_jax.checkpoint.manifest import Damaged
from vit_jax.errors import UserError


class Retention:
  """The rule by which older steps are kept.

  Args:
    latest: number of newest steps to keep.
    every: multiples of this many steps are kept for good; None: none are.
    best: name of the metric whose best step is kept, or None.
    larger_is_better: of that metric.
    steps: () -> the steps that are complete.
    read: step -> the body of its manifest; raises `Damaged`.

  Raises:
    UserError: for a number below 1.
  """

  def __init__(
    self,
    *,
    latest: int,
    every: int | None,
    best: str | None,
    larger_is_better: bool,
    steps: Callable[[], Iterable[int]],
    read: Callable[[int], dict],
  ):
    for name, number in (('keep_latest', latest), ('keep_every', every)):
      if number is not None and number < 1:
        raise UserError(f'checkpoint.{name} is {number}; it must be at least 1.')
    self._latest, self._every = latest, every
    self._metric, self._sign = best, 1 if larger_is_better else -1
    self._steps, self._read = steps, read
    self._scores: dict[int, float] | None = None  # step -> larger is better

  def kept(self, steps: list[int]) -> set[int]:
    """Returns those of `steps` that are kept."""
    kept = set(sorted(steps)[-self._latest :])
    kept |= {s for s in steps if self._every and s % self._every == 0}
    return kept | {s for s in steps if s == self.best(steps)}

  def best(self, steps: Iterable[int]) -> int | None:
    """Returns the one of `steps` with the best finite metric; ties go to the last."""
    scores = self._known()
    known = [(scores[step], step) for step in steps if step in scores]
    return max(known)[1] if known else None

  def saved(self, body: dict) -> None:
    """Notes the metric of a step from the body of its manifest."""
    self._known().update(self._score(body))

  def _known(self) -> dict[int, float]:
    if self._scores is None:  # a resumed run: those of the saved steps
      self._scores = {}
      for step in self._steps() if self._metric else ():
        with contextlib.suppress(Damaged):
          self._scores |= self._score(self._read(step))
    return self._scores

  def _score(self, body: dict) -> dict[int, float]:
    score = body['metrics'].get(self._metric, math.nan)
    if not math.isfinite(score):
      return {}
    return {body['step']: self._sign * score}
