"""What a step that is not learned from leaves as it was."""

import jax
import jax.numpy as jnp
import optax


def kept(learns, new, old):
  """Returns `new`, or `old` where the step does not learn, to the bit; trees alike.

  A leaf `new` may be wider than `old`: a moment, before it is rounded to what is kept.
  Bfloat16 is selected in float32: XLA for TPUs then computes a bfloat16 moment beside the
  parameter and the other moment, in one pass over the gradient. On its own it takes half
  as long again.

  Args:
    learns: a bool array of shape [], or True: always `new`.
  """
  if learns is True:
    return new
  return jax.tree.map(lambda new, old: _kept(learns, new, old), new, old)


def _kept(learns, new, old):
  wide = jnp.float32 if new.dtype == jnp.bfloat16 else new.dtype
  return jnp.where(learns, new.astype(wide), old.astype(wide)).astype(new.dtype)


def guarded(tx) -> optax.GradientTransformationExtraArgs:
  """Returns `tx`, whose `update` takes `learns` and keeps the state where that is false.

  Its updates are then of no use: whoever applies them keeps the parameters.
  """
  tx = optax.with_extra_args_support(tx)

  def update(updates, state, params=None, *, learns=True, **extra):
    updates, new = tx.update(updates, state, params, **extra)
    return updates, kept(learns, new, state)

  return optax.GradientTransformationExtraArgs(tx.init, update)
