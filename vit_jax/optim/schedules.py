"""The learning rate as a function of the step."""

import inspect
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from vit_jax import config_check
from vit_jax.errors import UserError, choose

# Each gives the factor of the peak rate after warmup, from the progress in [0, 1] and
# the steps since warmup.


def _constant():
  return lambda progress, step: jnp.ones(())


def _cosine(end: float = 0.0):
  return lambda progress, step: end + (1 - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


def _linear(end: float = 0.0):
  return lambda progress, step: end + (1 - end) * (1 - progress)


def _rsqrt(timescale: float = 10_000):
  return lambda progress, step: jnp.sqrt(timescale / (timescale + step))


def _multistep(at: Sequence[float] = (0.3, 0.6, 0.9), factor: float = 0.1):
  if list(at) != sorted(set(at)) or not all(0 < x < 1 for x in at) or not factor > 0:
    raise UserError(
      f'config.optim.schedule: at={at}, factor={factor}: expected rising fractions '
      'between 0 and 1, and a factor above 0.'
    )
  return lambda progress, step: factor ** sum(jnp.where(progress > x, 1, 0) for x in at)


DECAYS = {
  'constant': _constant,
  'cosine': _cosine,
  'linear': _linear,
  'rsqrt': _rsqrt,
  'multistep': _multistep,
}


def make_schedule(
  lr: float,
  total_steps: int,
  *,
  decay: str = 'cosine',
  warmup: int = 0,
  cooldown: int = 0,
  staircase: int | None = None,
  decay_until: float = 1.0,
  **options,
) -> Callable[[jax.Array], jax.Array]:
  """Returns `step -> learning rate`, step being the number of updates already made.

  Update n (from 1) uses step n - 1, as in both reference codebases: with warmup the
  first update has rate 0, and the last does not quite reach the end value.

  Args:
    lr: the peak rate.
    decay: from the end of warmup to `total_steps`. cosine and linear fall to `end`, a
      fraction of the peak (default 0); rsqrt is sqrt(timescale / (timescale + steps
      since warmup)) (arXiv 2106.04560, section 3.5). multistep multiplies the rate by
      `factor` (default 0.1) after each of the fractions `at` of the decay.
    warmup: steps of linear rise from 0.
    cooldown: the last steps, over which the rate falls linearly to 0 besides.
    staircase: the rate changes only this many times, at equal distances, as where it is
      set once an epoch; None: every step. Of cosine and linear.
    decay_until: the progress, a fraction of the decay, from which the rate stays as it is.
    **options: `end`, `timescale`, or `at` and `factor`, of the decay.

  Raises:
    UserError: for an unknown decay, a value out of range, or more warmup and cooldown
      than steps.
  """
  factor = choose('decay', decay, DECAYS)(**options)
  for key, value in dict(warmup=warmup, cooldown=cooldown, staircase=staircase).items():
    if value is not None and value < (key == 'staircase'):
      least = '1 or more' if key == 'staircase' else '0 or more'
      raise UserError(f'config.optim.schedule.{key}={value}: expected {least}.')
  if not 0 < decay_until <= 1:
    raise UserError(
      f'config.optim.schedule.decay_until={decay_until}: expected more than 0, up to 1.'
    )
  if decay not in ('cosine', 'linear') and (staircase or decay_until < 1):
    raise UserError(
      f'config.optim.schedule: staircase and decay_until are of cosine and linear, not {decay}.'
    )
  if warmup + cooldown > total_steps:
    raise UserError(
      f'config.optim.schedule: warmup {warmup} + cooldown {cooldown} exceed the '
      f'{total_steps} steps of the run (images x epochs / batch). Train longer, or shorten '
      'them: warmup=N among the arguments of a config that has it '
      '(--config=NAME:warmup=N), else --config.optim.schedule.warmup=N.'
    )

  def rate(step):
    step = jnp.asarray(step, jnp.float32)
    after = jnp.maximum(step - warmup, 0.0)
    progress = jnp.clip(after / max(total_steps - warmup, 1), 0.0, 1.0)
    if staircase:
      # In whole steps: a quotient just below a stair's edge would be the stair before.
      progress = jnp.floor(after * staircase / max(total_steps - warmup, 1)) / staircase
    value = lr * factor(jnp.minimum(progress, decay_until), after)
    if warmup:
      value *= jnp.minimum(1.0, step / warmup)
    if cooldown:
      value *= jnp.clip((total_steps - step) / cooldown, 0.0, 1.0)
    return value

  return rate


def default_decay(optimizer: str) -> str:
  """Returns the decay of a schedule that names none."""
  return 'constant' if optimizer == 'schedule_free' else 'cosine'


def check(where: str, schedule: dict, optim: dict) -> None:
  """Refuses what `make_schedule` does not take; see `config.bind`.

  Args:
    optim: the section in which the schedule stands.
  """
  decay = schedule.get('decay', default_decay(optim['name']))
  of_decay = choose(f'{where}.decay', decay, DECAYS)
  parameters = inspect.signature(make_schedule).parameters | (
    inspect.signature(of_decay).parameters
  )
  for name in ('lr', 'total_steps', 'options'):
    del parameters[name]
  known = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values()]
  config_check.bind(where, schedule, inspect.Signature(known))
