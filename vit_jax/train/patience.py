"""Early stopping: when the number that chooses the best checkpoint no longer improves."""

import dataclasses
import math

from vit_jax.errors import UserError
from vit_jax.train import metrics


@dataclasses.dataclass(frozen=True)
class Patience:
  """How many evaluations without improvement end a run.

  It depends on the rows up to a step alone: a run that was interrupted stops at the same
  step as one that was not.

  Attributes:
    key: the name of the number, 'test/top1'; None: there is none.
    larger: whether larger ones are better.
    evaluations: None: the run goes to its end.
  """

  key: str | None
  larger: bool
  evaluations: int | None

  @classmethod
  def of(cls, config: dict) -> 'Patience':
    """Returns the patience of a config that `check` has passed."""
    key = config['checkpoint'].get('best')
    larger = metrics.larger_is_better(key, config['evals']) if key else True
    return cls(key, larger, config['checkpoint'].get('patience'))

  def spent(self, rows: list[dict]) -> str:
    """Returns why a run with these rows stops here, or ''."""
    best, at, since = -math.inf, None, 0
    for row in rows:
      if self.key not in row:
        continue
      value = row[self.key] if self.larger else -row[self.key]
      if value > best:  # false of NaN
        best, at, since = value, row['step'], 0
      else:
        since += 1
    if self.evaluations is None or since < self.evaluations:
      return ''
    where = 'was never a number' if at is None else f'was best at step {at}'
    return f'{self.key} {where}; {since} evaluations since were no better.'


def check(config: dict) -> None:
  """Raises UserError for a patience without a number that is evaluated repeatedly."""
  section = config['checkpoint']
  if section.get('patience') is None:
    return
  best = section.get('best')
  if not best:
    raise UserError(
      'config.checkpoint.patience needs config.checkpoint.best, the number that is to '
      'improve.'
    )
  name = best.partition('/')[0]
  if config['evals'].get(name, {}).get('every') is None:
    raise UserError(
      f'config.checkpoint.patience counts evaluations, but {best!r} is evaluated only at '
      f'the end: set config.evals.{name}.every, or another config.checkpoint.best.'
    )
