"""Similarity of position embeddings."""

import numpy as np


def posemb_similarity(table, grid: tuple[int, int] | None = None) -> np.ndarray:
  """Returns the cosine similarity of every two positions (ViT paper, figure 7 centre).

  Args:
    table: [N, D] or [1, N, D].
    grid: (h, w) of patches, the last h * w rows; rows in front of them (cls) are left
      out.

  Returns:
    float32 [N, N]; with a grid [h, w, h, w], a tile for each patch. 0 where a row is 0.
  """
  table = np.asarray(table, np.float32)
  table = table.reshape(-1, table.shape[-1])
  if grid is not None:
    h, w = grid
    assert len(table) >= h * w, (table.shape, grid)
    table = table[len(table) - h * w :]
  norm = np.linalg.norm(table, axis=-1, keepdims=True)
  unit = table / np.where(norm == 0, 1, norm)
  cosine = np.clip(unit @ unit.T, -1, 1)
  return cosine if grid is None else cosine.reshape(h, w, h, w)
