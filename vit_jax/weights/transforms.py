"""How one array of a published file becomes arrays of ours, and back, bit for bit.

Torch stores dense kernels as [out, in] and convolutions as [out, in, h, w]; ours are
[in, out] and [h, w, in, out], those of attention [D, M, Dh] and [M, Dh, D].
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
# A dense layer that the file may hold as a 1x1 convolution.
pointwise = _one(lambda x: x.reshape(x.shape[:2]).T, lambda x: x.T)
conv = _one(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))

dropped = Transform(lambda x: (), lambda xs: np.empty(0))  # no parameter, never saved

# A transposed convolution is [in, out, h, w] in Torch, with its taps in reverse.
deconv = _one(
  lambda x: x.transpose(2, 3, 0, 1)[::-1, ::-1],
  lambda x: x[::-1, ::-1].transpose(2, 3, 0, 1),
)

# Tables of embeddings are [N, D] in transformers, CLIP's class token [D].
rows = _one(lambda x: x[None], lambda x: x[0])
vector = _one(lambda x: x.reshape(1, 1, -1), lambda x: x.reshape(-1))

# The vectors of GroupNorm are [1, 1, 1, C] in old files.
group_norm = _one(lambda x: x.reshape(-1), lambda x: x.reshape(1, 1, 1, -1))

# One factor per head: [M, 1, 1] -> [M].
factors = _one(lambda x: x.reshape(-1), lambda x: x.reshape(-1, 1, 1))


def heads_kernel(heads: int) -> Transform:
  """[D_out, D_in] -> [D_in, M, Dh]."""
  return _one(
    lambda x: x.T.reshape(x.shape[1], heads, -1),
    lambda x: x.reshape(x.shape[0], -1).T,
  )


def heads_bias(heads: int) -> Transform:
  """[D] -> [M, Dh]."""
  return _one(lambda x: x.reshape(heads, -1), lambda x: x.reshape(-1))


def out_kernel(heads: int) -> Transform:
  """[D_out, D_in] -> [M, Dh, D_out]."""
  return _one(
    lambda x: x.T.reshape(heads, -1, x.shape[0]),
    lambda x: x.reshape(-1, x.shape[-1]).T,
  )


def patches(size: tuple[int, int]) -> Transform:
  """[D, h w C] of a dense layer on flat patches, channels last, -> [h, w, C, D]."""
  return _one(
    lambda x: x.T.reshape(*size, -1, x.shape[0]),
    lambda x: x.reshape(-1, x.shape[-1]).T,
  )


def joined(part: Transform, number: int) -> Transform:
  """`number` parameters that the file holds as one array, along its first axis."""
  return Transform(
    lambda x: tuple(part.load(p)[0] for p in np.split(x, number)),
    lambda xs: np.concatenate([part.save([x]) for x in xs]),
  )


def beside(first: Transform, other: Transform, width: int) -> Transform:
  """Four parameters in one array: one of any number of rows, then three of D rows."""
  cut = lambda x: np.split(x, [len(x) - k * width for k in (3, 2, 1)])
  load = lambda first_rows, *others: (
    first.load(first_rows)[0],
    *(other.load(x)[0] for x in others),
  )
  return Transform(
    lambda x: load(*cut(x)),
    lambda xs: np.concatenate([first.save(xs[:1]), *(other.save([x]) for x in xs[1:])]),
  )


def per_layer(heads: int) -> Transform:
  """[2, L, D / 2], also [2, L, M, Dh / 2], -> [2, M, Dh / 2] for each of the L layers."""
  return Transform(
    lambda x: tuple(y.reshape(2, heads, -1) for y in np.moveaxis(x, 1, 0)),
    lambda xs: np.stack(xs, axis=1),
  )


def offsets(window: tuple[int, int]) -> Transform:
  """[rows, M], a row per offset in a window of h x w, -> [2 h - 1, 2 w - 1, M]."""
  shape = tuple(2 * n - 1 for n in window)
  return _one(lambda x: x.reshape(*shape, -1), lambda x: x.reshape(-1, x.shape[-1]))
