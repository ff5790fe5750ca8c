"""How one array of a published file becomes arrays of ours, and back, bit for bit.

`load(x, heads)` returns our arrays, `save(arrays, heads)` the file's. Torch keeps dense
kernels as [out, in] and convolutions as [out, in, h, w]; ours are [in, out] and
[h, w, in, out], attention's [D, M, Dh] and [M, Dh, D].
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Transform(NamedTuple):
  """How arrays of a file become a parameter, and back; the integer is the number of heads."""

  load: Callable[[np.ndarray, int | None], tuple[np.ndarray, ...]]
  save: Callable[[Sequence[np.ndarray], int | None], np.ndarray]


def _one(load, save) -> Transform:
  return Transform(lambda x, m: (load(x, m),), lambda xs, m: save(xs[0], m))


same = _one(lambda x, m: x, lambda x, m: x)
dense = _one(lambda x, m: x.T, lambda x, m: x.T)
conv = _one(lambda x, m: x.transpose(2, 3, 1, 0), lambda x, m: x.transpose(3, 2, 0, 1))

# Of a transposed convolution, [in, out, h, w] in Torch, whose taps run the other way.
deconv = _one(
  lambda x, m: x.transpose(2, 3, 0, 1)[::-1, ::-1],
  lambda x, m: x[::-1, ::-1].transpose(2, 3, 0, 1),
)

# [D_out, D_in] -> [D_in, M, Dh]; [D] -> [M, Dh]; [D_out, D_in] -> [M, Dh, D_out].
heads_kernel = _one(
  lambda x, m: x.T.reshape(x.shape[1], m, -1),
  lambda x, m: x.reshape(x.shape[0], -1).T,
)
heads_bias = _one(lambda x, m: x.reshape(m, -1), lambda x, m: x.reshape(-1))
out_kernel = _one(
  lambda x, m: x.T.reshape(m, -1, x.shape[0]),
  lambda x, m: x.reshape(-1, x.shape[-1]).T,
)


def joined(part: Transform, number: int) -> Transform:
  """Of `number` arrays that the file holds as one, along its first axis."""
  return Transform(
    lambda x, m: tuple(part.load(p, m)[0] for p in np.split(x, number)),
    lambda xs, m: np.concatenate([part.save([x], m) for x in xs]),
  )


# GroupNorm's [C], which old files store as [1, 1, 1, C].
group_norm = _one(lambda x, m: x.reshape(-1), lambda x, m: x.reshape(1, 1, 1, -1))


def _with_cls_row(x, m):
  return np.concatenate([np.zeros_like(x[:, :1]), x], axis=1)


def _without_cls_row(x, m):
  if x[:, 0].any():
    raise ValueError('its cls token has a position, this format has none for it')
  return x[:, 1:]


# Positions of the patches only, in a model with a cls token: the token's is zero.
patch_positions = _one(_with_cls_row, _without_cls_row)


def offsets(window: tuple[int, int]) -> Transform:
  """[rows, M] of the offsets in a window of h x w, to [2 h - 1, 2 w - 1, M]."""
  shape = tuple(2 * n - 1 for n in window)
  return _one(
    lambda x, m: x.reshape(*shape, -1), lambda x, m: x.reshape(-1, x.shape[-1])
  )


# One factor per head, [M, 1, 1] -> [M].
factors = _one(lambda x, m: x.reshape(-1), lambda x, m: x.reshape(-1, 1, 1))


def with_heads(of: Transform, heads: int) -> Transform:
  """Returns `of` for so many heads, whatever it is called with."""
  return Transform(lambda x, m: of.load(x, heads), lambda xs, m: of.save(xs, heads))
