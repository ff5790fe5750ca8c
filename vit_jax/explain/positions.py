"""How similar position embeddings are."""

import numpy as np

from vit_jax.errors import UserError


def posemb_similarity(table, grid: tuple[int, int] | None = None) -> np.ndarray:
  """Returns the cosine similarity of every two positions (ViT paper, figure 7 centre).

  Args:
    table: [N, D] or [1, N, D].
    grid: (h, w) of patches, the last h * w rows; rows in front of them (cls) are left
      out.

  Returns:
    float32 [N, N]; with a grid [h, w, h, w], a tile for each patch. 0 where a row is 0.

  Raises:
    UserError: for another shape, or fewer rows than the grid has patches.
  """
  table = np.asarray(table, np.float32)
  shape = table.shape
  if table.ndim == 3 and len(table) == 1:
    table = table[0]
  if table.ndim != 2:
    raise UserError(f'Position embeddings of shape {shape}: expected [N, D].')
  if grid is not None:
    h, w = grid
    if len(table) < h * w:
      raise UserError(f'{len(table)} positions are too few for {h}x{w} patches.')
    table = table[len(table) - h * w :]
  norm = np.linalg.norm(table, axis=-1, keepdims=True)
  unit = table / np.where(norm == 0, 1, norm)
  found = np.clip(unit @ unit.T, -1, 1)
  return found if grid is None else found.reshape(h, w, h, w)
