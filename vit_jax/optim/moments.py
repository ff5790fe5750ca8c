"""Adam and momentum, optax's to the bit, whose moments a bad step leaves as they were.

They take `learns` as `guard.guarded` does, but select a moment before the update is
computed from it: one that is selected afterwards exists twice. XLA for CPUs then copies
the moments of the whole model, and computes each again for the parameter: AdamW of 85
million parameters takes four times as long (benchmarks/NOTES.md).
"""

import jax
import jax.numpy as jnp
import optax

from vit_jax.optim.guard import kept


def scale_by_adam(b1: float, b2: float, eps: float, mu_dtype: str | None = None):
  """Returns `optax.scale_by_adam` (arXiv 1412.6980), whose `update` takes `learns`.

  Args:
    b1, b2: decays of the first and the second moment. eps: added to the second's root.
    mu_dtype: of the first moment as it is kept; None: the parameters'. The update is
      computed from it before it is rounded.
  """
  adam = optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)

  def update(updates, state, params=None, *, learns=True, **_):
    del params
    mu = optax.tree.update_moment(updates, state.mu, b1, 1)
    nu = optax.tree.update_moment(updates, state.nu, b2, 2)
    mu, nu = kept(learns, (mu, nu), (state.mu, state.nu))
    count = optax.safe_increment(state.count)
    direction = jax.tree.map(
      lambda m, v: m / (jnp.sqrt(v) + eps),
      optax.tree.bias_correction(mu, b1, count),
      optax.tree.bias_correction(nu, b2, count),
    )
    state = optax.ScaleByAdamState(
      count=kept(learns, count, state.count), mu=optax.tree.cast(mu, mu_dtype), nu=nu
    )
    return direction, state

  return optax.GradientTransformationExtraArgs(adam.init, update)


def trace(decay: float, nesterov: bool = False, accumulator_dtype: str | None = None):
  """Returns `optax.trace`, t = g + decay t, whose `update` takes `learns`.

  Args:
    nesterov: the update is g + decay t, not t.
    accumulator_dtype: of t as it is kept; None: the parameters'.
  """
  momentum = optax.trace(decay, nesterov, accumulator_dtype)

  def update(updates, state, params=None, *, learns=True, **_):
    del params
    add = lambda g, t: g + decay * t
    new = kept(learns, jax.tree.map(add, updates, state.trace), state.trace)
    updates = jax.tree.map(add, updates, new) if nesterov else new
    return updates, optax.TraceState(optax.tree.cast(new, accumulator_dtype))

  return optax.GradientTransformationExtraArgs(momentum.init, update)
