"""Results of a block that its backward pass keeps, and branches that are dropped."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax.errors import UserError
from vit_jax.nn.stack import remat_policy

X, NARROW, UP, DOWN, EACH = (2, 5, 4), (4, 4), (4, 12), (12, 4), (2, 4, 12)


def block(x, narrow, up, down, each):
  x = jnp.tanh(jnp.tanh(x @ narrow) @ up) @ down
  return jnp.tanh(jnp.einsum('bnd,bdf->bnf', x, each))


def kept(policy) -> list[tuple[int, ...]]:
  """Returns the shapes of what is kept of the block, but for its arguments."""
  arguments = [jnp.ones(shape) for shape in (X, NARROW, UP, DOWN, EACH)]
  _, pullback = jax.vjp(jax.checkpoint(block, policy=policy), *arguments)
  found = [leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.ndim]
  for argument in arguments:
    found.remove(argument.shape)
  return sorted(found)


@pytest.mark.parametrize(
  ('name', 'scan', 'shapes'),
  [
    # Of the products, that to twelve channels; not that to as many, nor one of batches.
    ('none', True, [(2, 5, 12)]),
    ('dots', True, [(2, 5, 4), (2, 5, 4), (2, 5, 12)]),
    ('dots', False, [(2, 5, 4), (2, 5, 4), (2, 5, 12)]),
    ('full', True, []),
    ('dots_saveable', False, [(2, 5, 4), (2, 5, 4), (2, 5, 12), (2, 5, 12)]),
  ],
)
def test_what_is_kept(name, scan, shapes):
  assert kept(remat_policy(name, scan)) == shapes


def test_a_loop_is_left_to_the_compiler():
  assert remat_policy('none') is None
  with pytest.raises(UserError, match=r"'dot'.*dots"):
    remat_policy('dot')
