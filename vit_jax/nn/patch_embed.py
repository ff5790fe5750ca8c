"""Patches to vectors."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError


class PatchEmbed(nn.Module):
  """Splits an image into patches and projects each (equation 1 of the ViT paper).

  Parameters are those of a convolution whose stride is its kernel, `kernel`
  [ph, pw, C, D] and `bias` [D]; it is computed as the one matrix product that it is.
  """

  width: int
  patch_size: tuple[int, int]
  dtype: jnp.dtype = jnp.float32
  stride: int = 1  # of a stem before it: pixels per position, for the error

  @nn.compact
  def __call__(self, images):
    """Maps [B, H, W, C] to [B, h, w, D]; UserError if patches do not tile it."""
    B, H, W, C = images.shape
    ph, pw = self.patch_size
    if H % ph or W % pw:
      H, W, ph, pw = (n * self.stride for n in (H, W, ph, pw))
      raise UserError(
        f'Images of {H}x{W} px cannot be cut into patches of {ph}x{pw}: choose a '
        f'resolution that is a multiple, such as {-(-H // ph) * ph}x{-(-W // pw) * pw}.'
      )
    kernel = self.param(
      'kernel', nn.initializers.lecun_normal(), (ph, pw, C, self.width), jnp.float32
    )
    bias = self.param('bias', nn.initializers.zeros_init(), (self.width,), jnp.float32)
    x = images.astype(self.dtype).reshape(B, H // ph, ph, W // pw, pw, C)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(B, H // ph, W // pw, ph * pw * C)
    kernel = kernel.astype(self.dtype).reshape(ph * pw * C, self.width)
    return x @ kernel + bias.astype(self.dtype)
