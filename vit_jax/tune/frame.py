"""Prompts around the image, for models that take images of any size."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.tune.tuned import Added


def _uniform(rng, shape, dtype):
  return jax.random.uniform(rng, shape, dtype, -1, 1)  # as the images


class Frame(Added):
  """A frame of `pixels` learned pixels on each side (VPT, section 4.3, 'pad').

  Parameters `rows` [2 p, W + 2 p, C], above and below, and `columns` [H, 2 p, C], at the
  left and right.
  """

  pixels: int

  @nn.compact
  def images(self, images):
    B, H, W, C = images.shape
    p = self.pixels
    rows = self.param('rows', _uniform, (2 * p, W + 2 * p, C), jnp.float32)
    columns = self.param('columns', _uniform, (H, 2 * p, C), jnp.float32)
    each = lambda x: jnp.broadcast_to(x.astype(images.dtype), (B, *x.shape))
    left, right, above, below = map(
      each, (columns[:, :p], columns[:, p:], rows[:p], rows[p:])
    )
    images = jnp.concatenate([left, images, right], axis=2)
    return jnp.concatenate([above, images, below], axis=1)
