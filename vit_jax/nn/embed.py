"""Patches to vectors."""

from vit_jax.errors import UserError
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
