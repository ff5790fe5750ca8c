"""Optimizers: they map gradients to updates, before weight decay and learning rate.

`moment_dtype` is the dtype of the first moment only. 'bfloat16' halves its memory, as in
the AugReg recipes; the second moment needs float32.

Every `update` takes `good`. Where it is false, because loss or gradient was not finite,
the optimizer keeps its state. Adam and momentum select each moment before the update is
computed from it, because a moment that is selected afterwards exists twice: XLA for CPUs
then copies the moments of the whole model and computes each again for the parameter, and
AdamW of 85 million parameters takes four times as long.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax

from vit_jax.check import Range, Share
from vit_jax.registry import Registry

_Dtype = Literal['float32', 'bfloat16']
_Eps = Annotated[float, Range(0, 1, '(]')]


def select(good, new, old):
  """Selects `new` after a good step and `old` otherwise, bit for bit. Both are trees.

  A leaf of `new` may have a wider dtype than that of `old`, as a moment has before it is
  rounded. Bfloat16 is selected in float32. XLA for TPUs then computes a bfloat16 moment
  together with the parameter and the other moment, in one pass over the gradient. In a pass
  of its own it would take half as long again.

  Args:
    good: a bool array of shape [], or True, which always selects `new`.
  """
  if good is True:
    return new

  def leaf(new, old):
    wide = jnp.float32 if new.dtype == jnp.bfloat16 else new.dtype
    return jnp.where(good, new.astype(wide), old.astype(wide)).astype(new.dtype)

  return jax.tree.map(leaf, new, old)


def adam(
  *,
  b1: Share = 0.9,
  b2: Share = 0.999,
  eps: _Eps = 1e-8,
  moment_dtype: _Dtype | None = None,
):
  """Adam (arXiv 1412.6980), equal to `optax.scale_by_adam` bit for bit.

  The update is computed from the first moment before it is rounded to `moment_dtype`.
  """
  init = optax.scale_by_adam(b1, b2, eps, mu_dtype=moment_dtype).init

  def update(updates, state, params=None, *, good=True, **_):
    del params
    mu = optax.tree.update_moment(updates, state.mu, b1, 1)
    nu = optax.tree.update_moment(updates, state.nu, b2, 2)
    mu, nu = select(good, (mu, nu), (state.mu, state.nu))
    count = optax.safe_increment(state.count)
    direction = jax.tree.map(
      lambda m, v: m / (jnp.sqrt(v) + eps),
      optax.tree.bias_correction(mu, b1, count),
      optax.tree.bias_correction(nu, b2, count),
    )
    state = optax.ScaleByAdamState(
      count=select(good, count, state.count),
      mu=optax.tree.cast(mu, moment_dtype),
      nu=nu,
    )
    return direction, state

  return optax.GradientTransformationExtraArgs(init, update)


def lamb(
  *,
  b1: Share = 0.9,
  b2: Share = 0.999,
  eps: _Eps = 1e-6,
  moment_dtype: _Dtype | None = None,
):
  """LAMB (arXiv 1904.00962): Adam whose steps are as long as their parameters.

  `optim.build` scales the update of each array that decays, decay included, to the norm of
  the array, as in timm. The layers of a scanned stack have one norm together, and so do not
  train as without `scan`.
  """
  return adam(b1=b1, b2=b2, eps=eps, moment_dtype=moment_dtype)


def sgd(
  *,
  momentum: Share = 0.9,
  nesterov: bool = False,
  moment_dtype: _Dtype | None = None,
):
  """Gradient descent with momentum: t = g + momentum t, without dampening, as in PyTorch.

  Equal to `optax.trace` bit for bit. With `nesterov` the update is g + momentum t.
  """
  init = optax.trace(momentum, nesterov, moment_dtype).init

  def update(updates, state, params=None, *, good=True, **_):
    del params
    add = lambda g, t: g + momentum * t
    new = select(good, jax.tree.map(add, updates, state.trace), state.trace)
    updates = jax.tree.map(add, updates, new) if nesterov else new
    return updates, optax.TraceState(optax.tree.cast(new, moment_dtype))

  return optax.GradientTransformationExtraArgs(init, update)


def adafactor(
  *,
  momentum: Share = 0.9,
  decay: Annotated[float, Range(0, 10, '(]')] = 0.8,
  moment_dtype: _Dtype | None = 'bfloat16',
):
  """Adafactor as in "Scaling Vision Transformers" (arXiv 2106.04560, section 3.4).

  The second moment of a kernel is stored as its row and column means; its decay is
  min(1 - step^-decay, 0.999). A first moment, in half precision and without bias
  correction, is added; relative step sizes and update clipping are left out. Kernels whose
  second largest side is below 32 are not factored. The constants are those of the recipe
  in big_vision.
  """

  def rate(step, exponent):
    return jnp.minimum(0.999, 1.0 - jnp.float32(step + 1) ** -exponent)

  tx = optax.scale_by_factored_rms(
    decay_rate=decay, min_dim_size_to_factor=32, decay_rate_fn=rate
  )
  if momentum:
    first = optax.ema(momentum, debias=False, accumulator_dtype=moment_dtype)
    tx = optax.chain(tx, first)

  def update(updates, state, params=None, *, good=True, **_):
    updates, new = tx.update(updates, state, params)
    return updates, select(good, new, state)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def lars():
  """LARS (arXiv 1708.03888) with momentum 0.9 and a trust coefficient of 0.001, as in MAE.

  Gradients of matrices, but not of vectors, are scaled by 0.001 |p| / |g|.
  """
  matrices = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
  scale = optax.scale_by_trust_ratio(trust_coefficient=0.001)
  return optax.chain(optax.masked(scale, matrices), sgd())


OPTIMIZERS = Registry(
  'optimizer',
  {
    'adamw': adam,
    'adam': adam,
    'lamb': lamb,
    'sgd': sgd,
    'adafactor': adafactor,
    'lars': lars,
  },
)
