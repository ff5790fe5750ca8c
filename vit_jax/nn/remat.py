"""Rematerialisation: what of a block is kept for the backward pass, what recomputed."""

import jax

from vit_jax.errors import choose

# name -> member of `jax.checkpoint_policies`; 'none': nothing is recomputed.
REMAT = {
  'none': None,
  'full': 'nothing_saveable',
  'dots': 'dots_with_no_batch_dims_saveable',
  'everything_saveable': 'everything_saveable',
  'nothing_saveable': 'nothing_saveable',
  'dots_saveable': 'dots_saveable',
  'dots_with_no_batch_dims_saveable': 'dots_with_no_batch_dims_saveable',
}


def remat_policy(name: str):
  """Returns the `jax.checkpoint` policy of a key of REMAT, None for 'none'.

  Raises:
    UserError: for any other name.
  """
  member = choose('remat policy', name, REMAT)
  return getattr(jax.checkpoint_policies, member) if member else None
