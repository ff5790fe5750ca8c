"""Group normalisation (Wu and He, arXiv 1803.08494)."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError

GROUPS = 32  # of every published model


def group_norm(
  x, name: str, *, eps: float = 1e-6, zero_scale: bool = False, dtype=jnp.float32
):
  """Normalises over space and groups of channels, from within a compact module.

  Statistics in float32, the variance in two passes; `scale` and `bias` are [C].

  Args:
    x: [B, H, W, C].
    name: of the submodule that holds the parameters.
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
