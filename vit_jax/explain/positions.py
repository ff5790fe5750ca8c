"""Similarity of position embeddings."""

import numpy as np


def posemb_similarity(table, grid: tuple[int, int]) -> np.ndarray:
  """Returns the cosine similarity of every two positions (ViT paper, figure 7 centre).

  Args:
    table: [N, D] or [1, N, D]; the last h * w rows are patches, and others are left out.
    grid: (h, w).

  Returns:
    float32 [h, w, h, w], a tile for each patch. 0 where a row is 0.
  """
  table = np.asarray(table, np.float32)
  patches = table.reshape(-1, table.shape[-1])[-grid[0] * grid[1] :]
  norm = np.linalg.norm(patches, axis=-1, keepdims=True)
  unit = patches / np.where(norm == 0, 1, norm)
  return np.clip(unit @ unit.T, -1, 1).reshape(*grid, *grid)
