"""Attention along one axis of the image, section D.6 of the ViT paper."""

from vit_jax.errors import UserError

AXES = ('rows', 'columns')


def check(tokens: int, grid: tuple[int, int], posemb: str, added: tuple) -> None:
  """Raises UserError for a model whose tokens cannot attend along rows and columns.

  Args:
    tokens: how many there are, N.
    grid: (h, w) of patches.
    posemb: the kind of its positions.
    added: the kinds that may be.
  """
  if tokens != grid[0] * grid[1]:
    raise UserError(
      "attention='axial' is along rows and columns of patches, and a class token is in "
      "none of them: choose classifier='gap', 'map' or 'none'."
    )
  if posemb not in added:
    raise UserError(
      f"posemb={posemb!r} works only with attention='full': with 'axial' choose one of "
      f'{list(added)}.'
    )


def fold(x, grid: tuple[int, int], axis: str):
  """Maps tokens [B, h w, D] to sequences, [B h, w, D] of rows, [B w, h, D] of columns."""
  (B, _, D), (h, w) = x.shape, grid
  x = x.reshape(B, h, w, D)
  if axis == 'columns':
    x = x.swapaxes(1, 2)
  return x.reshape(-1, x.shape[2], D)


def unfold(x, grid: tuple[int, int], axis: str):
  """The inverse of `fold`: sequences to tokens [B, h w, D]."""
  h, w = grid
  D = x.shape[-1]
  if axis == 'columns':
    return x.reshape(-1, w, h, D).swapaxes(1, 2).reshape(-1, h * w, D)
  return x.reshape(-1, h * w, D)
