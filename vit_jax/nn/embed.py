"""Patches to vectors."""

import math

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.kernels.patches import embed
from vit_jax.nn.param import param


def patch_embed(images, width: int, patch_size, *, name: str, dtype, stride: int = 1):
  """Splits images into patches and projects each (equation 1 of the ViT paper).

  A convolution whose stride is its kernel, with the parameters
  `{name}/kernel` [ph, pw, C, D] and `{name}/bias` [D]; from within a compact module.

  Args:
    images: [B, H, W, C].
    patch_size: (ph, pw).
    stride: of a stem before it, pixels per position, for the error.

  Returns:
    [B, h, w, D].

  Raises:
    UserError: if patches do not tile the image.
  """
  H, W = images.shape[1:3]
  ph, pw = patch_size
  if H % ph or W % pw:
    H, W, ph, pw = (n * stride for n in (H, W, ph, pw))
    raise UserError(
      f'Images of {H}x{W} px cannot be cut into patches of {ph}x{pw}: choose a '
      f'resolution that is a multiple, such as {-(-H // ph) * ph}x{-(-W // pw) * pw}.'
    )
  return PatchEmbedding(width, patch_size, dtype, name=name)(images)


class PatchEmbedding(nn.Module):
  """The layer of `patch_embed`. Initial values are those of a kernel [ph pw C, D]."""

  width: int
  patch_size: tuple[int, int]
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, images):
    shape = (*self.patch_size, images.shape[-1], self.width)
    flat = (math.prod(shape[:3]), self.width)
    start = lambda rng: nn.initializers.lecun_normal()(rng, flat).reshape(shape)
    kernel = param(self, 'kernel', start, shape)
    bias = param(self, 'bias', lambda rng: jnp.zeros(self.width), (self.width,))
    return embed(*nn.dtypes.promote_dtype(images, kernel, bias, dtype=self.dtype))
