"""Group normalisation."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError

GROUPS = 32  # in every published model


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
