"""Patches to vectors, and where they are in the image."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError, choose
from vit_jax.kernels.sincos import sincos2d
from vit_jax.nn.dense import Dense


def patch_embed(images, width: int, patch_size, *, name: str, dtype, stride: int = 1):
  """Splits images into patches and projects each (equation 1 of the ViT paper).

  A dense layer with the parameters of a convolution whose stride is its kernel:
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
  B, H, W, C = images.shape
  ph, pw = patch_size
  if H % ph or W % pw:
    H, W, ph, pw = (n * stride for n in (H, W, ph, pw))
    raise UserError(
      f'Images of {H}x{W} px cannot be cut into patches of {ph}x{pw}: choose a '
      f'resolution that is a multiple, such as {-(-H // ph) * ph}x{-(-W // pw) * pw}.'
    )
  patches = images.astype(dtype).reshape(B, H // ph, ph, W // pw, pw, C).swapaxes(2, 3)
  dense = Dense(width, inputs=(ph, pw, C), dtype=dtype, name=name)
  return dense(patches.reshape(*patches.shape[:3], -1))


POSEMBS = ('learn', 'sincos2d', 'none')


class AddPositions(nn.Module):
  """Adds a position embedding to tokens [B, N, D].

  Attributes:
    kind: 'learn': a table `pos_embedding` [1, N, D], rows of other tokens than the
      grid's (cls) included; 'sincos2d': see there, such tokens get none; 'none'.
    std: of the table's initial values; None: 1 / sqrt(D).
  """

  kind: str
  std: float | None

  @nn.compact
  def __call__(self, x, grid: tuple[int, int]):
    """Returns [B, N, D]; `grid` is (h, w), of the last h * w tokens.

    Raises:
      UserError: for another number of tokens than the table is for.
    """
    _, N, D = x.shape
    match choose('posemb', self.kind, POSEMBS):
      case 'learn':
        std = D**-0.5 if self.std is None else self.std
        self._check_size(N, grid)
        table = self.param('pos_embedding', nn.initializers.normal(std), (1, N, D))
      case 'sincos2d':
        table = np.pad(sincos2d(*grid, D), ((0, 0), (N - grid[0] * grid[1], 0), (0, 0)))
      case 'none':
        return x
    return x + jnp.asarray(table, x.dtype)

  def _check_size(self, tokens: int, grid: tuple[int, int]) -> None:
    if not self.has_variable('params', 'pos_embedding'):
      return  # they are being made, for this size
    known = self.get_variable('params', 'pos_embedding').shape[1]
    if known != tokens:
      raise UserError(
        f'Images of {grid[0]}x{grid[1]} patches, {tokens} tokens: the position '
        f'embeddings are of {known}. Make the images of the size that the parameters '
        'are for, or fit these: vit_jax.load(..., image_size=(H, W)).'
      )
