"""Layer and group normalisation; statistics in float32, the variance in two passes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError

GROUPS = 32  # of GroupNorm, in every published model


class LayerNorm(nn.Module):
  """Normalises the last axis (arXiv 1607.06450); parameters `scale` and `bias` [D].

  eps 1e-6 and the two-pass variance are those with which the published files were
  trained.
  """

  dtype: jnp.dtype = jnp.float32
  eps: float = 1e-6

  @nn.compact
  def __call__(self, x):
    """Maps [..., D] to [..., D] of `dtype`."""
    width = x.shape[-1:]
    scale = self.param('scale', nn.initializers.ones_init(), width)
    bias = self.param('bias', nn.initializers.zeros_init(), width)
    return (normalise(x, self.eps) * scale + bias).astype(self.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def normalise(x, eps: float):
  """(x - mean) / sqrt(var + eps) over the last axis, in float32.

  The derivative is written out: what is derived of the formula reads the activations
  several times more.
  """
  return _normalise(x, *_statistics(x, eps))


def _statistics(x, eps):
  wide = x.astype(jnp.float32)
  mean = wide.mean(-1, keepdims=True)
  centred = wide - mean
  return mean, jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)


def _normalise(x, mean, rstd):
  return (x.astype(jnp.float32) - mean) * rstd


@normalise.defjvp
def _normalise_jvp(eps, primals, tangents):
  (x,), (dx,) = primals, tangents
  mean, rstd = _statistics(x, eps)

  def linear(x, mean, rstd, dx):
    y, dx = _normalise(x, mean, rstd), dx.astype(jnp.float32)
    # The normalised vector has no component along 1 and along itself.
    return (
      dx - dx.mean(-1, keepdims=True) - y * (dx * y).mean(-1, keepdims=True)
    ) * rstd

  linear = jax.checkpoint(linear, prevent_cse=False)  # keeps x as it is
  return _normalise(x, mean, rstd), linear(x, mean, rstd, dx)


def group_norm(
  x, name: str, *, eps: float = 1e-6, zero_scale: bool = False, dtype=jnp.float32
):
  """Normalises over space and groups of channels (arXiv 1803.08494), in a module.

  Args:
    x: [B, H, W, C].
    name: of the submodule that holds the parameters, `scale` and `bias` [C].
    zero_scale: `scale` starts at 0: a residual branch that starts as the identity.

  Returns:
    [B, H, W, C] of `dtype`.

  Raises:
    UserError: if the 32 groups do not divide C.
  """
  if x.shape[-1] % GROUPS:
    raise UserError(
      f'{name}: {x.shape[-1]} channels are not a multiple of the {GROUPS} groups of '
      f'GroupNorm. Choose a width (stem_width) that is a multiple of {GROUPS}.'
    )
  init = nn.initializers.zeros_init() if zero_scale else nn.initializers.ones_init()
  return nn.GroupNorm(
    num_groups=GROUPS,
    epsilon=eps,
    use_fast_variance=False,
    scale_init=init,
    dtype=dtype,
    name=name,
  )(x)
