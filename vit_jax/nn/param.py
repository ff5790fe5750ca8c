"""Parameters of layers."""

from collections.abc import Callable

import flax.errors
import flax.linen as nn
import jax


def param(
  module: nn.Module,
  name: str,
  init: Callable[[jax.Array], jax.Array],
  shape: tuple[int, ...],
) -> jax.Array:
  """`module.param(name, init)` of a known shape.

  To check the shape of a parameter that is there, `Module.param` traces its initialiser,
  which is half of the time that it takes to trace a ViT; here `shape` is what it is
  compared with.

  Args:
    init: makes the array from a key.

  Raises:
    flax.errors.ScopeParamShapeError: the parameter has another shape.
  """
  if module.is_initializing() or not module.has_variable('params', name):
    return module.param(name, init)
  value = module.get_variable('params', name)
  if value.shape != shape:
    path = module.scope.path_text
    raise flax.errors.ScopeParamShapeError(name, path, value.shape, shape)
  return value
