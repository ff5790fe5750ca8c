"""From gradients to directions: what an update is before decay and learning rate.

`moment_dtype` is that of the first moment only: 'bfloat16' halves its memory, as in the
AugReg recipes; the second moment needs float32. Where a step is not learned from
(`learns`, see `guard`), each keeps its state.
"""

import math

import jax.numpy as jnp
import optax
from optax import contrib

from vit_jax import trees
from vit_jax.optim import moments
from vit_jax.optim.guard import guarded


def adam(
  b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, moment_dtype: str | None = None
):
  """Adam (arXiv 1412.6980)."""
  return moments.scale_by_adam(b1, b2, eps, moment_dtype)


def sgd(momentum: float = 0.9, nesterov: bool = False, moment_dtype: str | None = None):
  """Gradient descent with momentum, the gradients added up undamped as in PyTorch."""
  return moments.trace(momentum, nesterov, moment_dtype)


def adafactor(
  momentum: float = 0.9,
  decay: float = 0.8,
  b2_cap: float = 0.999,
  min_dim: int = 32,
  moment_dtype: str | None = 'bfloat16',
):
  """Adafactor as in "Scaling Vision Transformers" (arXiv 2106.04560, section 3.4).

  The second moment of a kernel is kept as its row and column means; its decay is
  min(1 - step^-decay, b2_cap). A first moment, in half precision and without bias
  correction, is added; relative step sizes and update clipping are left out. The
  constants are those of the recipe in big_vision.

  Args:
    min_dim: kernels whose second largest side is smaller keep all of it.
  """

  def rate(step, exponent):
    return jnp.minimum(b2_cap, 1.0 - jnp.float32(step + 1) ** -exponent)

  second = optax.scale_by_factored_rms(
    decay_rate=decay, min_dim_size_to_factor=min_dim, decay_rate_fn=rate
  )
  if not momentum:
    return guarded(second)
  first = optax.ema(momentum, debias=False, accumulator_dtype=moment_dtype)
  return guarded(optax.chain(second, first))


def lion(b1: float = 0.9, b2: float = 0.99, moment_dtype: str | None = None):
  """Lion, the sign of a momentum (arXiv 2302.06675); rates a tenth of Adam's."""
  return guarded(optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=moment_dtype))


def lamb(
  b1: float = 0.9, b2: float = 0.999, eps: float = 1e-6, moment_dtype: str | None = None
):
  """LAMB before its trust ratio (arXiv 1904.00962), which follows weight decay."""
  return moments.scale_by_adam(b1, b2, eps, moment_dtype)


def muon(
  momentum: float = 0.95,
  nesterov: bool = True,
  ns_steps: int = 5,
  rms: float = 0.2,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  moment_dtype: str | None = None,
  *,
  family,
):
  """Muon for the blocks' matrices, Adam (b1, b2, eps) for everything else.

  The `family` of the model says which those are: attention's kernels have axes of heads,
  [D, M, Dh] and [M, Dh, D], and are taken as matrices; stacked layers, one by one. A
  matrix's momentum, its singular values brought near 1 by Newton-Schulz iterations
  (K. Jordan, 2024), and scaled by rms * sqrt(max(D_in, D_out)), so that an element is
  as large as Adam's and learning rate and weight decay can be Adam's too (arXiv
  2502.16982, section 2.2).
  """

  def dimensions(tree):
    def numbers(name, _):
      axes = family.matrix_axes(name)
      return contrib.MuonDimensionNumbers(*axes) if axes else None

    return trees.map_named(numbers, tree)

  def kinds(tree):
    kind = lambda name, _: 'muon' if family.matrix_axes(name) else 'adam'
    return trees.map_named(kind, tree)

  orthogonal = optax.chain(
    contrib.scale_by_muon(
      beta=momentum,
      nesterov=nesterov,
      ns_steps=ns_steps,
      mu_dtype=moment_dtype,
      weight_dimension_numbers=dimensions,
    ),
    _scaled_to_rms(rms, family),
  )
  return optax.partition(
    {'muon': guarded(orthogonal), 'adam': adam(b1, b2, eps, moment_dtype)}, kinds
  )


def _scaled_to_rms(rms: float, family) -> optax.GradientTransformation:
  """Scales matrices of singular values 1 so that their elements have this size."""

  def scale(name, x):
    if (matrix := family.matrix_axes(name)) is None:
      return x
    inputs, outputs = (math.prod(x.shape[axis] for axis in axes) for axes in matrix)
    return x * (rms * max(inputs, outputs) ** 0.5)

  return optax.stateless(lambda updates, params: trees.map_named(scale, updates))


def schedule_free(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8):
  """The Adam without momentum that `averages.schedule_free` wraps; b1 is the wrapper's."""
  del b1
  return optax.scale_by_adam(b1=0.0, b2=b2, eps=eps)


OPTIMIZERS = {
  'adamw': adam,
  'adam': adam,
  'sgd': sgd,
  'adafactor': adafactor,
  'lion': lion,
  'lamb': lamb,
  'muon': muon,
  'schedule_free': schedule_free,
}
