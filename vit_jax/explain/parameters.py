"""Principal components of the first layer's filters, and similarity of position embeddings."""

from typing import NamedTuple

import numpy as np


class Components(NamedTuple):
  """Principal components of filters; the first one explains the most variance.

  Attributes:
    filters: float32 [n, ph, pw, C], orthonormal. The sign of a component is chosen so that
      its entry of largest magnitude is positive.
    explained: float32 [n], the share of each component in the variance over all filters.
  """

  filters: np.ndarray
  explained: np.ndarray


def filters_pca(kernel, n: int | None = None) -> Components:
  """Computes principal components of an embedding's filters (ViT paper, figure 7 left).

  Args:
    kernel: [ph, pw, C, D], D filters.
    n: number of components; the paper shows 28. None: all of them, min(ph pw C, D).
  """
  kernel = np.asarray(kernel, np.float64)
  filters = kernel.reshape(-1, kernel.shape[-1]).T  # [D, ph pw C]
  most = min(filters.shape)
  n = most if n is None else n
  if not 1 <= n <= most:
    raise ValueError(f'{n} components of a kernel {kernel.shape}: expected 1 to {most}')
  _, singular, rows = np.linalg.svd(filters - filters.mean(0), full_matrices=False)
  largest = np.take_along_axis(rows, np.abs(rows).argmax(1)[:, None], 1)
  rows = rows * np.where(largest < 0, -1, 1)
  total = (singular**2).sum()
  explained = singular**2 / (total if total > 0 else 1)
  return Components(
    rows[:n].reshape(n, *kernel.shape[:3]).astype(np.float32),
    explained[:n].astype(np.float32),
  )


def rescale(filters) -> np.ndarray:
  """Rescales each of the filters [n, ph, pw, C] from its range to [0, 1], as float32."""
  filters = np.asarray(filters, np.float32)
  low = filters.min((1, 2, 3), keepdims=True)
  span = filters.max((1, 2, 3), keepdims=True) - low
  return (filters - low) / np.where(span > 0, span, 1)


def posemb_similarity(table, grid: tuple[int, int]) -> np.ndarray:
  """Returns the cosine similarity of every two positions (ViT paper, figure 7 centre).

  Args:
    table: [N, D] or [1, N, D]. The last h * w rows are patches; the others are left out.
    grid: (h, w).

  Returns:
    float32 [h, w, h, w], a tile for each patch. The similarity with a row of zeros is 0.
  """
  table = np.asarray(table, np.float32)
  patches = table.reshape(-1, table.shape[-1])[-grid[0] * grid[1] :]
  norm = np.linalg.norm(patches, axis=-1, keepdims=True)
  unit = patches / np.where(norm == 0, 1, norm)
  return np.clip(unit @ unit.T, -1, 1).reshape(*grid, *grid)
