"""`tf.image.resize` in NumPy, to the last bit (TensorFlow 2.21 on a CPU).

Prediction needs no TensorFlow, but it must see the pixels that training saw. Truncation
turns a difference of 1e-5 into one of a whole level: a white wall could be 254 here and 255
there. So everything is computed in float32, and every sum in TensorFlow's order.
"""

import numpy as np

from vit_jax.resample import keys, triangle

_ONE = np.float32(1)
_HALF = np.float32(0.5)
# Number of steps in the table from which TensorFlow takes the weights of bicubic
# interpolation without antialiasing.
_TABLE = 1024


def resize_to(
  image, height: int, width: int, method: str, antialias: bool, rounding: str
) -> np.ndarray:
  """Resizes an image [H, W, C] to [height, width, C], as `geometry.resize_to` does.

  Args:
    method: 'bilinear', 'bicubic' (Keys, a = -0.5), 'area' or 'nearest'.
    antialias: whether the kernel of the first two methods widens where the image shrinks.
    rounding: for uint8, see `geometry.to_levels`.
  """
  out = _resize(image, height, width, method, antialias)
  if image.dtype != np.uint8 or rounding == 'none':
    return out
  out = np.clip(out, 0, 255)
  return (np.rint(out) if rounding == 'nearest' else out).astype(np.uint8)


def _resize(image, height, width, method, antialias):
  x = image.astype(np.float32)
  lengths = (x.shape[0], height), (x.shape[1], width)
  if method == 'nearest':
    rows, columns = (
      np.minimum(np.floor(_centres(*n) + _HALF), n[0] - 1) for n in lengths
    )
    return x[rows.astype(int)][:, columns.astype(int)]
  if method == 'area':
    rows, columns = (_area(*n) for n in lengths)
    x = _sum(_sum(x, 1, *columns), 0, *rows)
    per_pixel = [np.float32(old) / np.float32(new) for old, new in lengths]
    return x * np.float32(1 / np.float64(per_pixel[0] * per_pixel[1]))
  if method == 'bilinear' and not antialias:
    rows, columns = (_neighbours(*n) for n in lengths)
    return _interpolate(_interpolate(x, 1, *columns), 0, *rows)
  if antialias:
    kernel, radius = {'bilinear': (triangle, 1), 'bicubic': (keys, 2)}[method]
    rows, columns = (_kernel_weights(*n, kernel, radius) for n in lengths)
  else:
    rows, columns = (_table(*n) for n in lengths)
  return _sum(_sum(x, 0, *rows), 1, *columns)


def _centres(old: int, new: int) -> np.ndarray:
  """Returns the centres of the new pixels in coordinates of the old ones: float32 [new]."""
  scale = np.float32(old) / np.float32(new)
  return (np.arange(new, dtype=np.float32) + _HALF) * scale - _HALF


def _sum(x, axis: int, at, weights) -> np.ndarray:
  """Returns sum_k x[at[:, k]] * weights[:, k] along an axis; both are [new, k]."""
  shape = (-1, 1, 1) if axis == 0 else (-1, 1)
  out = np.float32(0)
  for k in range(at.shape[1]):
    out = out + np.take(x, at[:, k], axis) * weights[:, k].reshape(shape)
  return out


def _area(old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the old pixels that each new pixel covers, and the covered part of each."""
  scale = np.float32(old) / np.float32(new)
  i = np.arange(new, dtype=np.float32)[:, None]
  low, high = i * scale, (i + _ONE) * scale
  at = np.floor(low).astype(int)
  at = at + np.arange((np.ceil(high).astype(int) - at).max())
  x = at.astype(np.float32)
  # Weights of pixels that start before `low`.
  begun = np.where(x + 1 > high, scale, x + _ONE - low)
  weights = np.where(x < low, begun, np.where(x + 1 > high, high - x, _ONE))
  weights = np.where(at < np.ceil(high), weights, np.float32(0))
  return np.minimum(at, old - 1), weights


def _neighbours(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the two old pixels next to each new one, and the weight of the second."""
  centres = _centres(old, new)
  low = np.floor(centres)
  second = np.minimum(np.ceil(centres), old - 1)
  return np.maximum(low, 0).astype(int), second.astype(int), centres - low


def _interpolate(x, axis: int, first, second, share) -> np.ndarray:
  low, high = np.take(x, first, axis), np.take(x, second, axis)
  return low + (high - low) * share.reshape((-1, 1, 1) if axis == 0 else (-1, 1))


def _kernel_weights(
  old: int, new: int, kernel, radius: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (indices, weights) [new, n] of the old pixels that each new pixel is made of.

  The kernel widens if the axis shrinks, as antialiasing wants.
  """
  step = np.float32(1 / np.float64(np.float32(new) / np.float32(old)))
  wide = max(step, _ONE)
  centres = (np.arange(new, dtype=np.float32) + _HALF) * step
  reach = np.float32(radius) * wide
  first = np.clip(np.ceil(centres - reach - _HALF), 0, old - 1).astype(int)
  end = np.clip(np.floor(centres + reach - _HALF), 0, old - 1).astype(int) + 1
  at = first[:, None] + np.arange((end - first).max())
  distance = np.abs(at.astype(np.float32) + _HALF - centres[:, None])
  weights = np.where(at < end[:, None], kernel(distance * (_ONE / wide)), np.float32(0))
  return np.minimum(at, old - 1), _normalise(weights)


def _table(old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns (indices, weights) [new, 4] of bicubic interpolation, with tabulated weights."""
  centres = _centres(old, new)
  low = np.floor(centres)
  place = np.rint((centres - low) * np.float32(_TABLE)).astype(int)
  table = keys(np.arange(2 * _TABLE + 1) / _TABLE).astype(np.float32)
  entries = [_TABLE + place, place, _TABLE - place, 2 * _TABLE - place]
  at = low.astype(int)[:, None] + np.arange(-1, 3)
  weights = np.where((at >= 0) & (at < old), table[np.stack(entries, 1)], np.float32(0))
  return np.clip(at, 0, old - 1), _normalise(weights)


def _normalise(weights: np.ndarray) -> np.ndarray:
  total = np.float32(0)
  # A loop, because `sum` would add in another order.
  for k in range(weights.shape[1]):
    total = total + weights[:, k]
  return weights * (_ONE / total)[:, None]
