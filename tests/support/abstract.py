"""Shapes of a model's parameters, without computing them."""

from vit_jax import models


def abstract_params(model, size: int = 224):
  """Returns the params for images of `size` x `size` pixels, as ShapeDtypeStructs."""
  return models.shapes_of(model, (size, size, 3))['params']
