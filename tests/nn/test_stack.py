"""Results of a block that its backward pass keeps, for each remat policy."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax.errors import UserError
from vit_jax.nn.stack import remat_policy

X, NARROW, UP, DOWN, EACH = (2, 5, 4), (4, 4), (4, 12), (12, 4), (2, 4, 12)


def block(x, narrow, up, down, each):
  x = jnp.tanh(jnp.tanh(x @ narrow) @ up) @ down
  return jnp.tanh(jnp.einsum('bnd,bdf->bnf', x, each))


def saved_shapes(policy) -> list[tuple[int, ...]]:
  """Returns the shapes of the residuals of `block`, without its arguments."""
  arguments = [jnp.ones(shape) for shape in (X, NARROW, UP, DOWN, EACH)]
  _, pullback = jax.vjp(jax.checkpoint(block, policy=policy), *arguments)
  shapes = [leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.ndim]
  for argument in arguments:
    shapes.remove(argument.shape)
  return sorted(shapes)


@pytest.mark.parametrize(
  ('name', 'scan', 'shapes'),
  [
    # Only the product that widens, to 12 channels: no other dense one, no batched one.
    ('none', True, [(2, 5, 12)]),
    ('dots', True, [(2, 5, 4), (2, 5, 4), (2, 5, 12)]),
    ('dots', False, [(2, 5, 4), (2, 5, 4), (2, 5, 12)]),
    ('full', True, []),
    ('dots_saveable', False, [(2, 5, 4), (2, 5, 4), (2, 5, 12), (2, 5, 12)]),
  ],
)
def test_residuals_of_a_policy(name, scan, shapes):
  assert saved_shapes(remat_policy(name, scan)) == shapes


def test_a_loop_is_left_to_the_compiler():
  assert remat_policy('none') is None
  with pytest.raises(UserError, match=r"'dot'.*dots"):
    remat_policy('dot')
