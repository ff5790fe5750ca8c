"""Rematerialisation: what of a block is kept for the backward pass, what recomputed."""

import math

import jax

from vit_jax.errors import choose
from vit_jax.kernels.attention import WEIGHTS
from vit_jax.kernels.depthwise import CONVOLVED

ATTENDED = 'attended'  # the name that attention gives its result

# name -> member of `jax.checkpoint_policies`; 'none': no product is recomputed.
REMAT = {
  'none': None,
  'full': 'nothing_saveable',
  'dots': 'dots_with_no_batch_dims_saveable',
  'everything_saveable': 'everything_saveable',
  'nothing_saveable': 'nothing_saveable',
  'dots_saveable': 'dots_saveable',
  'dots_with_no_batch_dims_saveable': 'dots_with_no_batch_dims_saveable',
}


def remat_policy(name: str, scan: bool = False):
  """Returns the `jax.checkpoint` policy of a key of REMAT; None to leave it to XLA.

  A scan keeps whatever the derivative reads, as XLA cannot look across its steps, where
  in a loop it recomputes what is elementwise: 'none' is a policy of its own there.

  Raises:
    UserError: for any other name.
  """
  member = choose('remat policy', name, REMAT)
  policies = jax.checkpoint_policies
  if member == 'dots_saveable':  # convolutions as well, as JAX has it
    return policies.save_from_both_policies(
      policies.dots_saveable, policies.save_only_these_names(CONVOLVED)
    )
  if member:
    return getattr(policies, member)
  return _products if scan else None


def _products(primitive, *avals, **params) -> bool:
  """Keeps products that widen, convolutions and attention; all else is recomputed.

  A scan stacks what it keeps. By the cost model of TPUs to move the result of a product
  [D, D] into that stack and out again takes longer than to compute it twice: without those
  of queries, keys, values and outputs ViT-B/16 takes fewer cycles and a quarter less memory
  (benchmarks/NOTES.md).
  """
  if primitive.name == 'dot_general':
    return _widens(*avals, **params)
  named = jax.checkpoint_policies.save_only_these_names(WEIGHTS, ATTENDED, CONVOLVED)
  # The latter is cuDNN's attention, which keeps more than its result for the backward pass.
  more = ('conv_general_dilated', 'dot_product_attention_fwd')
  return primitive.name.startswith(more) or named(primitive, *avals, **params)


def _widens(x, kernel, *, dimension_numbers, **_) -> bool:
  """Whether a product [..., D] x [D, F] has F > D; not one with batch dimensions."""
  (contracted, _), (batch, _) = dimension_numbers
  width = math.prod(x.shape[axis] for axis in contracted)
  return not batch and kernel.size > width**2
