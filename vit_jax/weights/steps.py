"""The checkpoints of a run, read-only. Importing this module imports Orbax, which is slow."""

import contextlib
import functools
import re
from pathlib import Path

from vit_jax import evaluators, trees
from vit_jax.checkpoint.checkpoints import FROZEN, Checkpoints
from vit_jax.checkpoint.storage import Damaged
from vit_jax.errors import UserError
from vit_jax.tasks.distill import TEACHER


class Steps:
  """The complete steps in a run's folder, in ascending order.

  They are only read, so the run may still be training. `best` is the step at which the metric
  of config.checkpoint.best was best, or None.
  """

  def __init__(self, folder: Path, config: dict):
    self.metric: str | None = config.get('checkpoint', {}).get('best')
    options = {'best': self.metric}
    if self.metric:
      declared = evaluators.find_metric(self.metric, config.get('evals', {}))
      options['larger_is_better'] = declared.larger_is_better
    self.checkpoints = Checkpoints(folder / 'checkpoints', **options)
    self.steps: list[int] = self.checkpoints.steps()

  @functools.cached_property
  def best(self) -> int | None:
    return self.checkpoints.best_step()

  @functools.cached_property
  def _manifests(self) -> dict[int, dict | None]:
    manifests = dict.fromkeys(self.steps)
    for step in self.steps:
      with contextlib.suppress(Damaged):
        manifests[step] = self.checkpoints.manifest(step)
    return manifests

  def _leaves(self, step: int) -> dict[str, list]:
    """Returns {name: its leaf in the manifest}, without a teacher's; {} for a damaged step."""
    body = self._manifests[step] or {'leaves': {}}
    teacher = f'{FROZEN}{TEACHER}'
    return {n: leaf for n, leaf in body['leaves'].items() if not n.startswith(teacher)}

  @property
  def metrics(self) -> dict[int, dict[str, float] | None]:
    """The metrics saved with each step, {step: {name: number}}; None for a damaged step."""
    return {step: body and body['metrics'] for step, body in self._manifests.items()}

  def shapes(self, step: int) -> dict[str, tuple[list[int], bool]]:
    """Returns {parameter: (shape, whether the run stores it)}; {} for a damaged step.

    Parameters that are not stored were not trained: see `checkpoint.checkpoints`. Those of a
    teacher are left out.
    """
    return {
      name.partition('/')[2]: (shape, name.startswith('params/'))
      for name, (shape, *_) in self._leaves(step).items()
      if name.startswith(('params/', FROZEN))
    }

  def own_shapes(self, step: int, key: str) -> dict[str, list[int]]:
    """Returns {name: shape} of a task's own parameters and statistics, those below `key`.

    Names are those of `trees.flatten_variables`. Those of a teacher are left out.
    """
    own = re.compile(rf'(?:params/|{FROZEN})?((?:{trees.STATS}/)?{key}/.*)')
    leaves = self._leaves(step).items()
    matches = ((own.fullmatch(name), shape) for name, (shape, *_) in leaves)
    return {match[1]: shape for match, shape in matches if match}

  def choose(self, source, which: str | None) -> int | None:
    """Returns the step that `RUN@which` means; None for the newest that is not damaged."""
    if which is None:
      return None
    if which == 'best' and self.best is not None:
      return self.best
    if which.isdecimal() and int(which) in self.steps:
      return int(which)
    best = f', and {self.best} is the best' if self.best is not None else ''
    why = f'no step {which!r}'
    if which == 'best':
      why = f'no step has a finite {self.metric!r}'
      if self.metric is None:
        why = 'it was trained without --config.checkpoint.best=EVALUATION/METRIC'
    raise UserError(f'{source}: {why}; steps there: {self.steps or "none"}{best}.')
