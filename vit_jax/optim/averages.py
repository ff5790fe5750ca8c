"""Averages of the parameters over training.

EMA and SWA are kept beside the parameters (`State.ema`), for evaluations with
`use_ema`. Schedule-free learning has its average inside: it is the parameters.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from vit_jax.errors import UserError
from vit_jax.optim.guard import guarded


def ema(decay: float) -> Callable:
  """Returns `(average, params, step) -> average`, an exponential moving average.

  Raises:
    UserError: unless 0 < decay < 1.
  """
  if not 0 < decay < 1:
    raise UserError(f'config.optim.ema={decay}: expected a decay between 0 and 1.')
  # Written so that what does not change stays as it is, bit for bit.
  move = lambda a, x: a + (1.0 - decay) * (x - a)
  return lambda average, params, step: jax.tree.map(move, average, params)


def swa(total_steps: int, *, start: float = 0.8, every: int | float = 1) -> Callable:
  """Returns `(average, params, step) -> average` of the last part of training.

  Stochastic weight averaging (arXiv 1803.05407): the mean of the parameters after every
  `every` steps from `start`, a fraction of the run, on. Until the first of them the
  average is the parameters themselves.

  Args:
    every: steps between two of the parameters averaged, an epoch in the paper; a float
      is a fraction of the run: 1 / epochs.

  Raises:
    UserError: for values out of range, or if nothing would be averaged.
  """
  if not 0 <= start < 1 or every <= 0:
    raise UserError(
      f'config.optim.swa is start={start}, every={every}: expected 0 <= start < 1 and '
      'every of 1 step or more, or a fraction of the run.'
    )
  if isinstance(every, float):
    # Rounded last: an epoch need not be a whole number of steps.
    ends = np.arange(start + every, 1 + every + 1e-6, every) * total_steps
    ends = np.unique(np.round(ends).astype(np.int32))
  else:
    first = round(start * total_steps) + every
    ends = np.arange(first, total_steps + every + 1, every, dtype=np.int32)
  if ends[0] > total_steps:
    raise UserError(
      f'config.optim.swa averages for the first time after step {ends[0]}: the run has '
      f'{total_steps}. Lower swa.every or swa.start.'
    )

  def update(average, params, step):
    count = (step + 1 >= ends).sum()
    follow = count == 0  # no average yet
    take = (step + 1 == ends).any()
    share = jnp.where(follow, 1.0, jnp.where(take, 1.0 / jnp.maximum(count, 1), 0.0))
    return jax.tree.map(
      lambda a, p: jnp.where(follow, p, a + share * (p - a)), average, params
    )

  return update


def schedule_free(tx, rate: Callable, b1: float):
  """Wraps a transformation that ends in `-rate * direction` (arXiv 2405.15682).

  The run's parameters are the paper's x, the average to evaluate. z is in the state;
  the gradient is taken at y = b1 x + (1 - b1) z, see `gradient_point`.
  """
  inner = contrib.schedule_free(tx, rate, b1=b1)

  def update(grads, state, params, **extra):
    y = gradient_point(params, state)
    updates, new = inner.update(grads, state, y, **extra)
    x = contrib.schedule_free_eval_params(new, optax.apply_updates(y, updates))
    return jax.tree.map(jnp.subtract, x, params), new

  return guarded(optax.GradientTransformationExtraArgs(inner.init, update))


def gradient_point(params, state):
  """Returns y, where the gradient of schedule-free learning is taken."""
  return jax.tree.map(lambda x, z: state.b1 * x + (1 - state.b1) * z, params, state.z)
