"""Shapes of a model's parameters, without computing them."""


def abstract_params(model, size: int = 224):
  """Returns the params for images of `size` x `size` pixels, as ShapeDtypeStructs."""
  return model.shapes((size, size, 3))['params']
