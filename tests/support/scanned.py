"""Parameters of a scanned model from those of an unscanned one."""

import jax
import jax.numpy as jnp


def stacked(params, depth):
  """Stacks encoderblock_{i} or MixerBlock_{i}, wherever they are, into one [L, ...]."""
  tree = {
    key: stacked(v, depth) if isinstance(v, dict) else v for key, v in params.items()
  }
  for name in ('encoderblock', 'MixerBlock'):
    if f'{name}_0' in tree:
      blocks = [tree.pop(f'{name}_{i}') for i in range(depth)]
      tree[name] = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
  return tree
