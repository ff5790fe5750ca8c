"""Shapes of a model's parameters, without computing them."""

import jax
import jax.numpy as jnp


def abstract_params(model, size: int = 224):
  """Returns the params for images of `size` x `size` pixels, as ShapeDtypeStructs."""
  images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  return jax.eval_shape(model.init, jax.random.key(0), images)['params']
