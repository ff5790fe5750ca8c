"""Fixed positions as the learned table that other libraries read."""

import numpy as np

from vit_jax.models.family import Family
from vit_jax.nn.positions import sincos2d


def learned(
  flat: dict[str, np.ndarray], fields: dict, family: Family, image_size: tuple[int, int]
) -> tuple[dict[str, np.ndarray], dict]:
  """Returns (parameters, fields) of a model with a learned table, of equal outputs.

  Sine-cosine positions become a table that holds their numbers, for images of this size:
  for another size a library would resize the table, where the sines and cosines were
  computed anew. Models with other positions, or that add them before every block, come
  back as they are.

  Args:
    flat: parameters under our names, blocks not stacked.
    fields: all fields of the model.
    family: of the model.
    image_size: (H, W) in pixels.
  """
  if (fields.get('posemb'), fields.get('posemb_where')) != ('sincos2d', 'stem'):
    return flat, fields
  (H, W), (down, across) = image_size, family.stride(fields)
  table = sincos2d(H // down, W // across, fields['width'])
  if fields['classifier'] == 'token':  # the class token has no position
    table = np.pad(table, ((0, 0), (1, 0), (0, 0)))
  return {**flat, family.position: table}, {**fields, 'posemb': 'learn'}
