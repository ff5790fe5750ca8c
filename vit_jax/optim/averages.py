"""Averages of the parameters over training.

EMA and SWA are kept beside the parameters (`State.ema`), for evaluations with
`use_ema`. Schedule-free learning has its average inside: it is the parameters.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from vit_jax.errors import UserError


def ema(decay: float) -> Callable:
  """Returns `(average, params, step) -> average`, an exponential moving average.

  Raises:
    UserError: unless 0 < decay < 1.
  """
  if not 0 < decay < 1:
    raise UserError(f'config.optim.ema={decay}: expected a decay between 0 and 1.')
  return lambda average, params, step: optax.incremental_update(
    params, average, 1.0 - decay
  )


def swa(total_steps: int, *, start: float = 0.8, every: int = 1) -> Callable:
  """Returns `(average, params, step) -> average` of the last part of training.

  Stochastic weight averaging (arXiv 1803.05407): the mean of the parameters after every
  `every` steps from `start`, a fraction of the run, on. Until the first of them the
  average is the parameters themselves.

  Args:
    every: steps between two of the parameters averaged: an epoch in the paper.

  Raises:
    UserError: for values out of range, or if nothing would be averaged.
  """
  if not 0 <= start < 1 or every < 1:
    raise UserError(
      f'config.optim.swa is start={start}, every={every}: expected 0 <= start < 1 and '
      'every of 1 step or more.'
    )
  first = round(start * total_steps)
  if first + every > total_steps:
    raise UserError(
      f'config.optim.swa averages after steps {first + every}, {first + 2 * every}, '
      f'...: the run has {total_steps}. Lower swa.every or swa.start.'
    )

  def update(average, params, step):
    done = step + 1 - first  # steps since the start, this one included
    count = done // every
    follow = done < every  # no average yet
    take = (done % every == 0) & ~follow
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

  return optax.GradientTransformationExtraArgs(inner.init, update)


def gradient_point(params, state):
  """Returns y, where the gradient of schedule-free learning is taken."""
  return jax.tree.map(lambda x, z: state.b1 * x + (1 - state.b1) * z, params, state.z)
