"""Resizes arrays in numpy by a product with one matrix per axis."""

import numpy as np


def matrix(old: int, new: int, method: str, antialias: bool) -> np.ndarray:
  """Returns the float64 [new, old] matrix that resizes one axis.

  Pixels are at half-integer centres, and the weights of pixels outside the image are
  distributed over those inside, as in `jax.image.resize`.

  Args:
    old, new: lengths in pixels.
    method: 'bilinear' or 'bicubic' (Keys, a = -0.5).
    antialias: whether to widen the kernel if the axis shrinks.
  """
  scale = max(old / new, 1.0) if antialias else 1.0
  at = (np.arange(new) + 0.5) * old / new - 0.5
  kernel = {'bilinear': triangle, 'bicubic': keys}[method]
  weights = kernel(np.abs(at[:, None] - np.arange(old)) / scale)
  return weights / weights.sum(1, keepdims=True)


def bicubic_of_edges(old: int, new: int, scale: float | None = None) -> np.ndarray:
  """Returns the [new, old] matrix of PyTorch's bicubic interpolation, align_corners=False.

  Unlike `matrix` it has a = -0.75, and the weights of pixels outside the image go to its
  edges. `scale` is PyTorch's `scale_factor`, if that is not new / old.
  """
  at = (np.arange(new) + 0.5) / (scale or new / old) - 0.5
  inside = np.arange(-2, old + 2)
  weights = keys(np.abs(at[:, None] - inside), a=-0.75)
  return weights @ (np.clip(inside, 0, old - 1)[:, None] == np.arange(old))


def triangle(x: np.ndarray) -> np.ndarray:
  """Kernel of linear interpolation, at distances x >= 0, in the dtype of x."""
  return np.maximum(0, 1 - x)


def keys(x: np.ndarray, a: float = -0.5) -> np.ndarray:
  """Kernel of Keys' cubic convolution (1981), at distances x >= 0, in the dtype of x."""
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
  return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def align_corners(old: int, new: int) -> np.ndarray:
  """Returns the [new, old] matrix of linear interpolation that keeps the two ends in place."""
  at = np.linspace(0, old - 1, new) if new > 1 else np.zeros(1)
  return triangle(np.abs(at[:, None] - np.arange(old)))


def geometric(old: int, new: int) -> np.ndarray:
  """Returns the [new, old] matrix by which timm resizes a table of offsets -n, ..., n.

  The old offsets are placed at sums of a geometric series, 0, 1, 1 + q, 1 + q + q^2, ...,
  the last of which is the largest offset of the new table. Between them, interpolation is
  linear. See timm's `resize_rel_pos_bias_table`.
  """
  low, high, steps = 1.01, 1.5, old // 2
  while high - low > 1e-6:
    q = (low + high) / 2
    if (q**steps - 1) / (q - 1) > new // 2:
      high = q
    else:
      low = q
  ends = np.cumsum(q ** np.arange(steps))
  places = np.concatenate([-ends[::-1], [0], ends])
  at = np.arange(new) - new // 2
  return np.stack([np.interp(at, places, row) for row in np.eye(old)], 1)


def apply(images: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
  """Resizes [H, W, ...] by matrices [h, H] and [w, W]; returns float64 [h, w, ...]."""
  out = np.tensordot(rows, images.astype(np.float64), (1, 0))
  return np.moveaxis(np.tensordot(columns, out, (1, 1)), 0, 1)
