"""Averages of the parameters over training, stored beside them in `State.ema`.

Evaluations with `use_ema` use them.
"""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.check import Period, Range
from vit_jax.optim.schedules import half_cosine


def ema(decay: float, end: float | None = None, total_steps: int = 0) -> Callable:
  """Returns `(average, params, step) -> average`, an exponential moving average.

  Args:
    end: the decay after `total_steps`, see `schedules.half_cosine`; None: it stays the same.
  """
  # The share of the new parameters. 1 - decay would lose digits if it were a float32.
  share = lambda step: 1.0 - decay
  if end is not None:
    share = half_cosine(1.0 - decay, 1.0 - end, total_steps)

  def update(average, params, step):
    # In this form, the average of a parameter that does not change stays the same bit for bit.
    move = lambda a, x: a + share(step) * (x - a)
    return jax.tree.map(move, average, params)

  return update


def swa(
  total_steps: int,
  *,
  start: Annotated[float, Range(0, 1, '[)', 'of the run')] = 0.8,
  every: Period = 1,
) -> Callable:
  """Returns `(average, params, step) -> average` over the last part of training.

  Stochastic weight averaging (arXiv 1803.05407): from `start` on, the mean of the parameters
  after every `every` steps. Until the first of these steps, the average is the parameters
  themselves.

  Args:
    start: the fraction of the run after which averaging starts.
    every: number of steps between two members of the mean. The paper uses an epoch. A float
      is a fraction of the run, 1 / epochs.

  Raises:
    ValueError: if the run ends before the first member.
  """
  if isinstance(every, float):
    # Round at the end, because an epoch may not be a whole number of steps.
    ends = np.arange(start + every, 1 + every + 1e-6, every) * total_steps
    ends = np.unique(np.round(ends).astype(np.int32))
  else:
    first = round(start * total_steps) + every
    ends = np.arange(first, total_steps + every + 1, every, dtype=np.int32)
  if ends[0] > total_steps:
    raise ValueError(
      f'swa averages for the first time after step {ends[0]}, but the run has '
      f'{total_steps}: lower swa.every or swa.start'
    )

  def update(average, params, step):
    count = (step + 1 >= ends).sum()
    # While there is no average yet, follow the parameters.
    follow = count == 0
    take = (step + 1 == ends).any()
    share = jnp.where(follow, 1.0, jnp.where(take, 1.0 / jnp.maximum(count, 1), 0.0))
    return jax.tree.map(
      lambda a, p: jnp.where(follow, p, a + share * (p - a)), average, params
    )

  return update
