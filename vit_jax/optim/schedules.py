"""The learning rate as a function of the step."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp

from vit_jax.check import INT32, Count, Fraction, Range, bind
from vit_jax.errors import UserError
from vit_jax.registry import Registry

Steps = Annotated[int, Range(0, INT32)]
_Part = Annotated[float, Range(0, 1, '(]', 'of the decay')]

# Each function below returns a function of (progress in [0, 1], number of steps since
# warmup), which returns the factor for the peak rate.


def _constant():
  return lambda progress, step: jnp.ones(())


def _cosine(*, end: Fraction = 0.0):
  return lambda progress, step: end + (1 - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


def _linear(*, end: Fraction = 0.0):
  return lambda progress, step: end + (1 - end) * (1 - progress)


def _rsqrt(*, timescale: Annotated[float, Range(0, 1e12, '(]')] = 10_000):
  return lambda progress, step: jnp.sqrt(timescale / (timescale + step))


def _multistep(
  *,
  at: Sequence[Annotated[float, Range(0, 1, '()', 'of the decay')]] = (0.3, 0.6, 0.9),
  factor: _Part = 0.1,
):
  return lambda progress, step: factor ** sum(jnp.where(progress > x, 1, 0) for x in at)


DECAYS = Registry(
  'decay',
  {
    'constant': _constant,
    'cosine': _cosine,
    'linear': _linear,
    'rsqrt': _rsqrt,
    'multistep': _multistep,
  },
)


def half_cosine(start: float, end: float, total_steps: int) -> Callable:
  """Returns `step -> value`, from `start` at step 0 to `end` after `total_steps`."""

  def value(step):
    progress = jnp.asarray(step, jnp.float32) / total_steps
    return end + (start - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))

  return value


def warmup_steps(warmup: float, total_steps: int) -> int:
  """Returns the steps of a warmup, which is a number of steps or, as a float, a share."""
  return round(warmup * total_steps) if isinstance(warmup, float) else warmup


def make_schedule(
  lr: float,
  total_steps: int,
  *,
  decay: str = 'cosine',
  warmup: Steps | Fraction = 0,
  early_peak: bool = False,
  cooldown: Steps = 0,
  staircase: Count | None = None,
  decay_until: _Part = 1.0,
  **options,
) -> Callable[[jax.Array], jax.Array]:
  """Returns `step -> learning rate`, where step is the number of updates already made.

  Update n (from 1) uses step n - 1, as in both reference codebases. So with warmup the first
  update has rate 0, and the last one does not quite reach the end value.

  Args:
    lr: the peak rate.
    decay: how the rate falls from the end of warmup to `total_steps`. 'cosine' and 'linear'
      fall to `end`, a fraction of the peak (default 0). 'rsqrt' multiplies the rate by
      sqrt(timescale / (timescale + steps since warmup)) (arXiv 2106.04560, section 3.5).
      'multistep' multiplies the rate by `factor` (default 0.1) after each of the fractions
      `at` of the decay. 'constant' does not fall.
    warmup: number of steps in which the rate rises linearly from 0, or their share of the
      run, a fraction such as 0.1.
    early_peak: whether the last step of warmup already has the peak rate, as in DINO, so that
      two steps have it.
    cooldown: number of steps at the end in which the rate also falls linearly to 0.
    staircase: number of equal intervals within which the rate is constant, for example the
      number of epochs; None: the rate changes at every step. Only for cosine and linear.
    decay_until: the fraction of the decay after which the rate stays constant. Only for
      cosine and linear.
    **options: options of the decay: `end`, `timescale`, or `at` and `factor`.

  Raises:
    ValueError: for more warmup and cooldown than steps.
  """
  factor = DECAYS[decay](**options)
  warmup = warmup_steps(warmup, total_steps)
  if warmup + cooldown > total_steps:
    raise ValueError(
      f'schedule: warmup {warmup} + cooldown {cooldown} exceed the {total_steps} steps of '
      'the run (images x epochs / batch): train longer, or shorten them: warmup=N among '
      'the arguments of a config that has it (--config=NAME:warmup=N), otherwise '
      '--config.optim.schedule.warmup=N'
    )

  def rate(step):
    step = jnp.asarray(step, jnp.float32)
    after = jnp.maximum(step - warmup, 0.0)
    progress = jnp.clip(after / max(total_steps - warmup, 1), 0.0, 1.0)
    if staircase:
      # Multiply before dividing. A quotient might be rounded to just below the edge of a
      # stair, and would then fall on the stair before.
      progress = jnp.floor(after * staircase / max(total_steps - warmup, 1)) / staircase
    value = lr * factor(jnp.minimum(progress, decay_until), after)
    if warmup:
      value *= jnp.minimum(1.0, step / max(warmup - early_peak, 1))
    if cooldown:
      value *= jnp.clip((total_steps - step) / cooldown, 0.0, 1.0)
    return value

  return rate


def check_schedule(where: str, schedule: dict, section) -> None:
  """Checks a section `schedule`, whose keys are those of `make_schedule` and of the decay."""
  decay = schedule.get('decay', 'cosine')
  options = DECAYS.signature(decay).parameters
  keys = options | inspect.signature(make_schedule).parameters
  run = {'lr', 'total_steps', 'options'}
  if decay not in ('cosine', 'linear'):
    run |= {'staircase', 'decay_until'}
  parameters = [p.replace(kind=p.KEYWORD_ONLY) for k, p in keys.items() if k not in run]
  bind(where, schedule, inspect.Signature(parameters))
  if (at := schedule.get('at')) and list(at) != sorted(set(at)):
    raise UserError(f'{where}.at={at}: expected rising fractions of the decay.')
