"""Batch normalisation."""

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from vit_jax.errors import UserError
from vit_jax.trees import STATS


class BatchNorm(nn.Module):
  """Normalises each channel over batch and space (arXiv 1502.03167).

  Training uses the mean and variance of the whole batch, on any number of devices. It
  averages them into the running statistics if the collection `batch_stats` is mutable.
  Evaluation uses the running statistics. Parameters `scale` and `bias` [C] and statistics
  `mean` and `var` [C] are float32 for every `dtype`.

  Attributes:
    zero_scale: whether `scale` starts at 0, so that a residual block is the identity.
    momentum: share of the running statistics that is kept in a step. PyTorch calls 1 minus
      this share the momentum.
    frozen: whether to normalise by the running statistics even in training. `scale` and
      `bias` are then statistics too, not parameters.
    affine: whether there are `scale` and `bias`; without, they are 1 and 0.
    eps: added to the variance; 1e-5 in PyTorch and in nearly all published files.
    dtype: dtype of the result.
  """

  zero_scale: bool = False
  momentum: float = 0.9
  frozen: bool = False
  affine: bool = True
  eps: float = 1e-5
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x, *, train: bool = False, mask=None):
    """Maps [B, ..., C] to [B, ..., C] of `dtype`.

    Args:
      mask: bool, the leading axes of x; False leaves elements out of the statistics. If it is
        False everywhere, nothing is left out.

    Raises:
      UserError: in training, if a channel has only one value, whose variance is 0.
    """
    C = x.shape[-1:]
    mean = self.variable(STATS, 'mean', jnp.zeros, C, jnp.float32)
    var = self.variable(STATS, 'var', jnp.ones, C, jnp.float32)
    if not self.affine:
      scale, bias = 1.0, 0.0
    elif self.frozen:
      scale = self.variable(STATS, 'scale', jnp.ones, C, jnp.float32).value
      bias = self.variable(STATS, 'bias', jnp.zeros, C, jnp.float32).value
    else:
      zeros, ones = nn.initializers.zeros_init(), nn.initializers.ones_init()
      scale = self.param('scale', zeros if self.zero_scale else ones, C, jnp.float32)
      bias = self.param('bias', zeros, C, jnp.float32)
    if not train or self.frozen:
      return self._normalise(x, mean.value, var.value, scale, bias)
    number = x.size // x.shape[-1]
    if number < 2:
      raise UserError(
        f'{"/".join(self.path)}: images {x.shape} have one value per channel, whose '
        'variance is 0. Train on larger images, or on larger batches.'
      )
    if mask is not None:
      mask = jnp.expand_dims(mask | ~mask.any(), tuple(range(mask.ndim, x.ndim)))
      number = jnp.maximum(mask.sum() * (number / mask.size), 2)
    now, spread = _moments(x, mask)
    if self.is_mutable_collection(STATS) and not self.is_initializing():
      # As in PyTorch, a batch is normalised by its own variance, but the running variance
      # averages the unbiased estimate.
      unbiased = spread * (number / (number - 1))
      for running, new in ((mean, now), (var, unbiased)):
        running.value = self.momentum * running.value + (1 - self.momentum) * new
    return self._normalise(x, now, spread, scale, bias)

  def _normalise(self, x, mean, var, scale, bias):
    factor = scale * lax.rsqrt(var + self.eps)
    return ((x.astype(jnp.float32) - mean) * factor + bias).astype(self.dtype)


def _moments(x, mask):
  """Returns the mean and variance [C] over all axes but the last, in float32.

  The variance is E[x^2] - E[x]^2, which takes one pass over x instead of two.
  """
  axes = tuple(range(x.ndim - 1))
  x = x.astype(jnp.float32)
  mean = jnp.mean(x, axes, where=mask)
  square = jnp.mean(lax.square(x), axes, where=mask)
  return mean, jnp.maximum(square - lax.square(mean), 0.0)
