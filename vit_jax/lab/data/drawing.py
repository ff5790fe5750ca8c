"""Pixels of the scenes of the source 'shapes'.

How much of a pixel a shape covers follows from the signed distance between its edge and
the pixel's centre, so edges are smooth at any size. As in `scenes`, pixels are computed
one by one by operations that IEEE 754 rounds exactly: they are the same on every machine,
and in any batch.
"""

import numpy as np

from vit_jax.lab.data.scenes import Scenes, direction

# Unit vectors to the corners of a triangle and a pentagon.
_CORNERS = {
  3: ((0.0, -1.0), (0.8660254, 0.5), (-0.8660254, 0.5)),
  5: (
    (0.0, -1.0),
    (0.9510565, -0.3090170),
    (0.5877853, 0.8090170),
    (-0.5877853, 0.8090170),
    (-0.9510565, -0.3090170),
  ),
}


def draw(scenes: Scenes, size: int, noise: np.ndarray) -> np.ndarray:
  """Returns images, uint8 [B, size, size, 3], as is `noise`, uniformly distributed."""
  images = _ground(scenes, size)
  b, s = np.nonzero(scenes.shown)
  windows = {}
  for k, distance in enumerate(_DISTANCES):
    match = scenes.kind[b, s] == k
    at = b[match], s[match]
    places = (getattr(scenes, name)[at] for name in ('x', 'y', 'radius', 'turn'))
    covers = zip(*_cover(distance, size, *places), strict=True)
    windows |= dict(zip(zip(*at, strict=True), covers, strict=True))
  for place in zip(b, s, strict=True):  # from back to front
    _blend(images[place[0]], scenes.colour[place], *windows[place])
  images *= 255
  images += (noise - np.float32(127.5)) * (2 * scenes.noise[:, None, None, None])
  return (np.clip(images, 0, 255) + np.float32(0.5)).astype(np.uint8)


def _ground(scenes, size):
  """Returns a linear change from one colour to another, float32 [B, size, size, 3]."""
  cosine, sine = direction(scenes.ground_turn)
  place = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
  share = cosine[:, None, None] * place + sine[:, None, None] * place[:, None]
  share = (share * 0.7071 + 0.5)[..., None]
  first, last = (scenes.ground[:, None, None, k] for k in (0, 1))
  return first + (last - first) * share


def _blend(image, colour, covered, left, top):
  """Paints a window `covered` [w, w] at (left, top), cut to the image's bounds."""
  size, width = len(image), len(covered)
  rows = slice(max(top, 0), min(top + width, size))
  columns = slice(max(left, 0), min(left + width, size))
  part = image[rows, columns]
  covered = covered[rows.start - top :, columns.start - left :, None]
  part += covered[: part.shape[0], : part.shape[1]] * (colour - part)


def _cover(shape, size, x, y, radius, turn):
  """Returns the shares of pixels that n shapes cover, in windows around them.

  Those are (float32 [n, w, w] from 0 to 1, left int64 [n], top int64 [n]), for shapes
  with one signed distance.
  """
  radius = (radius * size).astype(np.float32)
  # A star's smooth tip ends 1.6 pixels beyond its radius, inside of any window: a larger
  # window, for the sake of other shapes in the batch, changes no pixel.
  width = int(np.ceil(2 * radius.max(initial=0))) + 6
  corners, offsets = [], []
  for centre in (x, y):
    centre = (centre * size).astype(np.float32)
    corner = np.floor(centre).astype(np.int64) - width // 2
    pixels = corner[:, None] + np.arange(width)
    corners.append(corner)
    offsets.append(pixels.astype(np.float32) + 0.5 - centre[:, None])
  cosine, sine = (v[:, None, None] / radius[:, None, None] for v in direction(turn))
  across, down = offsets[0][:, None, :], offsets[1][:, :, None]
  distance = shape(cosine * across + sine * down, cosine * down - sine * across)
  covered = np.clip(0.5 - distance * radius[:, None, None], 0, 1)
  return covered, *corners


# Signed distances, negative inside, from shapes with a circumscribed circle of radius 1
# and their centroid at the origin. Beyond a corner it is the distance from the edges'
# lines, which keeps corners sharp.


def _box(x, y, a, b):
  return np.maximum(np.abs(x) - a, np.abs(y) - b)


def _cross(x, y):
  return np.minimum(_box(x, y, 0.95, 0.31), _box(x, y, 0.31, 0.95))


def _triangle(x, y):
  # Each side is opposite to a corner.
  sides = [-(a * x + b * y) for a, b in _CORNERS[3]]
  return np.maximum(np.maximum(sides[0], sides[1]), sides[2]) - 0.5


def _star(x, y):
  """The pentagram: the points outside of at most one of its five lines."""
  most, second = np.float32(-np.inf), np.float32(-np.inf)
  for a, b in _CORNERS[5]:
    line = a * x + b * y
    second = np.maximum(second, np.minimum(most, line))
    most = np.maximum(most, line)
  return second - 0.3090170


# In the order of KINDS: circle, square, triangle, star, cross, ring.
_DISTANCES = (
  lambda x, y: np.sqrt(x * x + y * y) - 1,
  lambda x, y: _box(x, y, 0.7071068, 0.7071068),
  _triangle,
  _star,
  _cross,
  lambda x, y: np.abs(np.sqrt(x * x + y * y) - 0.75) - 0.25,
)
