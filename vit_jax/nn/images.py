"""A check of the images that models are given."""

import jax.numpy as jnp

from vit_jax.errors import UserError


def check(images) -> None:
  """Raises UserError for images that would give wrong numbers or an obscure error.

  Args:
    images: an array, or a tracer of one: only its shape and dtype are looked at.

  Raises:
    UserError: unless they are floats [B, H, W, C].
  """
  shape, dtype = images.shape, images.dtype
  if len(shape) != 4:
    one = ' One image goes as images[None].' if len(shape) == 3 else ''
    raise UserError(f'Images of shape {shape}: a model takes [B, H, W, C].{one}')
  if shape[1] in (1, 3) and shape[3] > 4:
    raise UserError(
      f'Images of shape {shape} have their channels first: a model takes [B, H, W, C], '
      'images.transpose(0, 2, 3, 1).'
    )
  if not jnp.issubdtype(dtype, jnp.floating):
    raise UserError(
      f'Images of {dtype}: a model takes floats, of most models in [-1, 1]. '
      'vit_jax.preprocess(images, loaded) makes them of pixels, as does the op '
      'value_range in a pipeline.'
    )
