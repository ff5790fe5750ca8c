"""A computation that suits the platform, with a derivative that does not pay for the others."""

import functools
from collections.abc import Callable

import jax
from jax import lax


def by_platform(**branches: Callable) -> Callable:
  """Returns a function that is one of `branches`, chosen when the program is lowered.

  Differentiated as it stands, a choice keeps what any of its branches would for the
  backward pass: here it keeps its arguments alone, and computes the rest again.

  Make it once for all layers, not in each: JAX then traces and transposes it once for each
  shape.

  Args:
    branches: by platform, 'cpu', 'cuda', 'rocm' or 'tpu', and 'default', as of
      `lax.platform_dependent`; they take the same arguments and give the same shapes.
  """
  choice = functools.partial(lax.platform_dependent, **branches)
  return jax.checkpoint(choice, prevent_cse=False)
