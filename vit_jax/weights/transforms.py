"""Transforms between an array of a published file and our parameters, bit for bit.

PyTorch stores a dense kernel as [out, in] and a convolution as [out, in, h, w]. Our kernels
are [in, out] and [h, w, in, out], or [D, M, Dh] and [M, Dh, D] in attention.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Transform(NamedTuple):
  """A bijection between an array of a file and one or more parameters."""

  load: Callable[[np.ndarray], tuple[np.ndarray, ...]]
  save: Callable[[Sequence[np.ndarray]], np.ndarray]


def _one(load, save) -> Transform:
  return Transform(lambda x: (load(x),), lambda xs: save(xs[0]))


same = _one(lambda x: x, lambda x: x)
dense = _one(lambda x: x.T, lambda x: x.T)
# A dense layer; a file may hold it as a 1x1 convolution.
pointwise = _one(lambda x: x.reshape(x.shape[:2]).T, lambda x: x.T)
conv = _one(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))

# An array that is not a parameter: it is read, ignored and never written.
drop = Transform(lambda x: (), lambda xs: np.empty(0))

# A transposed convolution is [in, out, h, w] in PyTorch, with its taps reversed.
deconv = _one(
  lambda x: x.transpose(2, 3, 0, 1)[::-1, ::-1],
  lambda x: x[::-1, ::-1].transpose(2, 3, 0, 1),
)

# transformers stores embedding tables as [N, D]; ours are [1, N, D].
rows = _one(lambda x: x[None], lambda x: x[0])
# CLIP stores the class token as [D]; ours is [1, 1, D].
vector = _one(lambda x: x.reshape(1, 1, -1), lambda x: x.reshape(-1))

# Old files store the vectors of GroupNorm as [1, 1, 1, C].
group_norm = _one(lambda x: x.reshape(-1), lambda x: x.reshape(1, 1, 1, -1))

# One factor per head: [M, 1, 1] -> [M].
factors = _one(lambda x: x.reshape(-1), lambda x: x.reshape(-1, 1, 1))


def _divide(channels: int, heads: int) -> tuple[int, int]:
  """Returns (heads, channels of each)."""
  if channels % heads:
    raise ValueError(
      f'{channels} channels are no multiple of num_heads={heads}: pass another num_heads'
    )
  return heads, channels // heads


def heads_kernel(heads: int) -> Transform:
  """Maps a kernel [D_out, D_in] to [D_in, M, Dh]."""
  return _one(
    lambda x: x.T.reshape(x.shape[1], *_divide(len(x), heads)),
    lambda x: x.reshape(x.shape[0], -1).T,
  )


def heads_bias(heads: int) -> Transform:
  """Maps a bias [D] to [M, Dh]."""
  return _one(lambda x: x.reshape(_divide(x.size, heads)), lambda x: x.reshape(-1))


def out_kernel(heads: int) -> Transform:
  """Maps a kernel [D_out, D_in] to [M, Dh, D_out]."""
  return _one(
    lambda x: x.T.reshape(*_divide(x.shape[1], heads), x.shape[0]),
    lambda x: x.reshape(-1, x.shape[-1]).T,
  )


def patches(size: tuple[int, int]) -> Transform:
  """Maps a kernel [D, h w C] of flat patches, channels last, to [h, w, C, D]."""
  return _one(
    lambda x: x.T.reshape(*size, -1, x.shape[0]),
    lambda x: x.reshape(-1, x.shape[-1]).T,
  )


def join(part: Transform, number: int) -> Transform:
  """Splits an array of a file along its first axis into `number` parameters."""
  return Transform(
    lambda x: tuple(part.load(p)[0] for p in np.split(x, number)),
    lambda xs: np.concatenate([part.save([x]) for x in xs]),
  )


def join_mlp_and_qkv(mlp: Transform, heads: Transform, width: int) -> Transform:
  """Splits an array into four parameters: MLP (any number of rows), q, k, v (D rows each)."""

  def load(x):
    rows, *qkv = np.split(x, [len(x) - k * width for k in (3, 2, 1)])
    return mlp.load(rows) + tuple(heads.load(part)[0] for part in qkv)

  def save(parameters):
    first, *qkv = parameters
    return np.concatenate([mlp.save([first]), *(heads.save([x]) for x in qkv)])

  return Transform(load, save)


def split_layers(heads: int) -> Transform:
  """Splits [2, L, D / 2] or [2, L, M, Dh / 2] into L parameters [2, M, Dh / 2]."""
  return Transform(
    lambda x: tuple(y.reshape(2, heads, -1) for y in np.moveaxis(x, 1, 0)),
    lambda xs: np.stack(xs, axis=1),
  )


def offsets(window: tuple[int, int]) -> Transform:
  """Maps [rows, M], one row per offset in an h x w window, to [2 h - 1, 2 w - 1, M]."""
  shape = tuple(2 * n - 1 for n in window)
  return _one(lambda x: x.reshape(*shape, -1), lambda x: x.reshape(-1, x.shape[-1]))
