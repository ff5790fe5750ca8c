"""Parameters of a scanned model from those of an unscanned one."""

import jax
import jax.numpy as jnp


def stacked(params, depth):
  """Stacks Transformer/encoderblock_{i} into Transformer/encoderblock [L, ...]."""
  encoder = dict(params['Transformer'])
  blocks = [encoder.pop(f'encoderblock_{i}') for i in range(depth)]
  encoder['encoderblock'] = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
  return {**params, 'Transformer': encoder}
