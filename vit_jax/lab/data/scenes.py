"""Makes the scenes of the source `shapes`, and draws their pixels.

Positions and lengths are in units of the image's side; (0, 0) is its top left corner. A
scene follows from (seed, task, split, row). It is computed by `philox.uniforms` and
operations that IEEE 754 rounds exactly, which excludes a library's sine. Pixels are computed
likewise, each on its own. So they are the same on every machine and in any batch.
"""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from vit_jax.data import philox

# Images depend on the order of these names, and on that of TASKS: add new ones at the end.
KINDS = ('circle', 'square', 'triangle', 'star', 'cross', 'ring')
COLOURS = ('red', 'yellow', 'green', 'cyan', 'blue', 'magenta')  # hues 60 degrees apart
SPLITS = ('train', 'validation', 'test')

_DISTRACTORS = 4  # maximum number of grey shapes, which distract, in an image
_PER_SHAPE = 8  # random numbers for each shape
# Added to the key of random numbers. It is larger than any 32-bit seed: augmentations use
# the run's seed as their key, and must not get the same numbers.
_TAG = 0x5CE9E5 << 40


@dataclasses.dataclass(frozen=True)
class Scenes:
  """B scenes of up to S shapes each. Later shapes lie in front of earlier ones."""

  label: np.ndarray  # int64 [B]
  shown: np.ndarray  # bool [B, S], whether the shape is there; grey ones come first
  kind: np.ndarray  # int [B, S], index into KINDS
  x: np.ndarray  # float32 [B, S], centre of the shape
  y: np.ndarray  # float32 [B, S]
  radius: np.ndarray  # float32 [B, S], radius of the circumscribed circle
  turn: np.ndarray  # float32 [B, S], rotation of the shape; 1 is a full turn
  colour: np.ndarray  # float32 [B, S, 3], from 0 to 1
  ground: np.ndarray  # float32 [B, 2, 3], the two colours of the background's gradient
  ground_turn: np.ndarray  # float32 [B], direction of the gradient; 1 is a full turn
  noise: np.ndarray  # float32 [B], largest change of a channel; 1 is full scale


@dataclasses.dataclass(frozen=True)
class Task:
  """A task of the source `shapes`.

  Attributes:
    objects: O, the maximum number of coloured shapes in an image.
    place: a function that places these shapes. It maps a label, int64 [B], and uniform
      numbers in [0, 1), u [B, O, 8] and more [B, 16], to {field of `Scenes`: [B, O]}. In
      place of 'colour' it returns 'hue', an index into COLOURS.
  """

  names: tuple[str, ...]
  objects: int
  place: Callable[[np.ndarray, np.ndarray, np.ndarray], dict[str, np.ndarray]]


def _place_class(label, u, more):
  """Places one shape anywhere inside the image; the label is its kind and colour."""
  colour, kind = np.divmod(label[:, None], len(KINDS))
  radius = 0.16 + 0.14 * u[..., 4]
  x, y = (radius + (1 - 2 * radius) * u[..., k] for k in (6, 7))
  return {'kind': kind, 'hue': colour, 'x': x, 'y': y, 'radius': radius}


def _place_count(label, u, more):
  """Places label + 1 shapes, each in a cell of its own in a 4 x 4 grid."""
  cells = np.argsort(more, axis=1, kind='stable')[:, : u.shape[1]]
  radius = 0.07 + 0.035 * u[..., 4]
  # Half a cell is 0.125, so a gap stays between any two shapes.
  free = 0.113 - radius
  row, column = np.divmod(cells, 4)
  x = (column + 0.5) / 4 + free * (2 * u[..., 6] - 1)
  y = (row + 0.5) / 4 + free * (2 * u[..., 7] - 1)
  shown = np.arange(u.shape[1]) <= label[:, None]
  return {'shown': shown, 'x': x, 'y': y, 'radius': radius}


def _place_position(label, u, more):
  """Places the centre of one shape anywhere in the label's cell of a 4 x 4 grid."""
  radius = 0.08 + 0.06 * u[..., 4]
  row, column = np.divmod(label[:, None], 4)

  def place_in(cell, u):
    # Stay 0.14 away from the border, so that the whole shape is in the image.
    low, high = np.maximum(cell / 4, 0.14), np.minimum((cell + 1) / 4, 0.86)
    return low + (high - low) * u

  x, y = place_in(column, u[..., 6]), place_in(row, u[..., 7])
  return {'x': x, 'y': y, 'radius': radius}


_NEAREST, _BIN, _BINS = 0.24, 0.08, 6


def _place_distance(label, u, more):
  """Places two shapes whose centres are as far apart as the label says."""
  radius = 0.07 + 0.04 * u[..., 4]
  apart = _NEAREST + _BIN * (label + more[:, 0])
  out = {'radius': radius}
  for k, along in enumerate(direction(more[:, 1])):
    half = apart * along / 2
    margin = 0.12 + np.abs(half)  # at most 0.12 + 0.72 / 2
    middle = margin + (1 - 2 * margin) * more[:, 2 + k]
    out['xy'[k]] = np.stack([middle - half, middle + half], 1)
  return out


_CLASSES = tuple(f'{colour} {kind}' for colour in COLOURS for kind in KINDS)
_COUNTS = ('1 shape', *(f'{n} shapes' for n in range(2, 9)))
_CELLS = tuple(f'row {y}, column {x}' for y in range(1, 5) for x in range(1, 5))
_BOUNDS = [f'{_NEAREST + _BIN * k:.2f}' for k in range(_BINS + 1)]
_DISTANCES = tuple(map(' to '.join, itertools.pairwise(_BOUNDS)))
TASKS = {
  'class': Task(_CLASSES, 1, _place_class),
  'count': Task(_COUNTS, 8, _place_count),
  'position': Task(_CELLS, 1, _place_position),
  'distance': Task(_DISTANCES, 2, _place_distance),
}


def labels(task: str, seed: int, split: str, rows: np.ndarray) -> np.ndarray:
  """Returns only the labels of `scenes`, int64 [B], which is faster."""
  (u,) = _uniforms(task, seed, split, rows, 1)
  return (u[:, 0] * len(TASKS[task].names)).astype(np.int64)


def scenes(task: str, seed: int, split: str, rows: np.ndarray) -> Scenes:
  """Makes the scenes of some rows, int [B], of a split. Seeds and rows have 32 bits."""
  objects = TASKS[task].objects
  sizes = (1, 12, 16, _PER_SHAPE * _DISTRACTORS, _PER_SHAPE * objects)
  of_label, scene, more, u, v = _uniforms(task, seed, split, rows, *sizes)
  label = (of_label[:, 0] * len(TASKS[task].names)).astype(np.int64)
  u, v = (x.reshape(len(rows), -1, _PER_SHAPE) for x in (u, v))

  grey = {
    'shown': np.arange(_DISTRACTORS) < np.floor(scene[:, :1] * (_DISTRACTORS + 1)),
    'kind': _pick(KINDS, u),
    'x': u[..., 6],
    'y': u[..., 7],
    'radius': 0.05 + 0.07 * u[..., 4],
    'turn': u[..., 5],
    'colour': np.repeat(0.1 + 0.8 * u[..., 3, None], 3, -1),
  }
  coloured = {
    'shown': np.ones((len(rows), objects), bool),
    'kind': _pick(KINDS, v),
    'hue': (v[..., 1] * len(COLOURS)).astype(np.int64),
    'turn': v[..., 5],
    **TASKS[task].place(label, v, more),
  }
  # Hues differ by up to 12 degrees from that of the colour's name.
  hue = coloured.pop('hue') + 0.4 * v[..., 2] - 0.2
  saturation, value = 0.75 + 0.25 * scene[:, 11:], 0.6 + 0.4 * v[..., 3]
  coloured['colour'] = _rgb(hue, saturation, value)

  lightness = 0.1 + 0.8 * scene[:, 1:3, None]
  tint = 0.1 * scene[:, 3:9].reshape(-1, 2, 3) - 0.05
  return Scenes(
    label=label,
    ground=lightness + tint,
    ground_turn=scene[:, 9],
    noise=0.02 + 0.05 * scene[:, 10],
    **{
      key: np.concatenate([value, coloured[key].astype(value.dtype)], 1)
      for key, value in grey.items()
    },
  )


def captions(scenes: Scenes) -> list[list[str]]:
  """Describes the last shape of each scene, as the task 'class' has it, in five captions."""
  out = []
  for kind, colour, x, y, radius in zip(
    *(scenes.kind, scenes.label // len(KINDS), scenes.x, scenes.y, scenes.radius),
    strict=True,
  ):
    name = f'{COLOURS[colour]} {KINDS[kind[-1]]}'
    size = 'large' if radius[-1] > 0.23 else 'small'
    place = f'{"bottom" if y[-1] > 0.5 else "top"} {"right" if x[-1] > 0.5 else "left"}'
    out.append(
      [
        f'a {name}',
        f'a {size} {name}',
        f'a {name} at the {place}',
        f'a picture of a {KINDS[kind[-1]]} that is {COLOURS[colour]}',
        f'{KINDS[kind[-1]]}, {COLOURS[colour]}, {size}, {place}',
      ]
    )
  return out


def direction(turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns (cosine, sine) of turns in [0, 1), exact to 1e-5, in the dtype of `turn`."""
  return _sine(turn + 0.25), _sine(turn)


def _sine(turn):
  # Taylor polynomial of degree 9 in x * pi/2, for x in [-1, 1].
  x = 1 - 4 * np.abs((turn + 0.25) % 1 - 0.5)
  y = x * x
  polynomial = 1.5707963 - y * (
    0.64596410 - y * (0.07969263 - y * (0.00468175 - y * 0.00016044))
  )
  return x * polynomial


def _uniforms(task, seed, split, rows, *sizes):
  """Draws numbers in [0, 1), float32 [B, size] for each of the sizes."""
  positions = (SPLITS.index(split) << 32) + np.asarray(rows, np.int64)
  key = seed + (list(TASKS).index(task) << 32) + _TAG
  numbers = philox.uniforms(key, positions, sizes)
  return np.split(numbers, np.cumsum(sizes)[:-1], axis=1)


def _pick(names, u):
  return (u[..., 0] * len(names)).astype(np.int64)


def _rgb(hue, saturation, value):
  """Converts HSV, with hues in sixths of a turn, to RGB float32 [..., 3]."""
  k = (hue[..., None] + np.array([5, 3, 1], np.float32)) % 6
  depth = np.clip(np.minimum(k, 4 - k), 0, 1)
  return (value[..., None] * (1 - saturation[..., None] * depth)).astype(np.float32)


# -- pixels ---------------------------------------------------------------------------

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
  """Draws images, uint8 [B, size, size, 3]; `noise` has the same shape and is uniform."""
  images = _ground(scenes, size)
  b, s = np.nonzero(scenes.shown)
  windows = {}
  for k, distance in enumerate(_DISTANCES):
    match = scenes.kind[b, s] == k
    at = b[match], s[match]
    places = (getattr(scenes, name)[at] for name in ('x', 'y', 'radius', 'turn'))
    covers = zip(*_cover(distance, size, *places), strict=True)
    windows |= dict(zip(zip(*at, strict=True), covers, strict=True))
  # Shapes are drawn from back to front.
  for place in zip(b, s, strict=True):
    _blend(images[place[0]], scenes.colour[place], *windows[place])
  images *= 255
  images += (noise - np.float32(127.5)) * (2 * scenes.noise[:, None, None, None])
  return (np.clip(images, 0, 255) + np.float32(0.5)).astype(np.uint8)


def _ground(scenes, size):
  """Draws backgrounds, linear gradients of colour, float32 [B, size, size, 3]."""
  cosine, sine = direction(scenes.ground_turn)
  place = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
  share = cosine[:, None, None] * place + sine[:, None, None] * place[:, None]
  share = (share * 0.7071 + 0.5)[..., None]
  first, last = (scenes.ground[:, None, None, k] for k in (0, 1))
  return first + (last - first) * share


def _blend(image, colour, covered, left, top):
  """Paints a window `covered` [w, w] at (left, top), clipped to the image."""
  size, width = len(image), len(covered)
  rows = slice(max(top, 0), min(top + width, size))
  columns = slice(max(left, 0), min(left + width, size))
  part = image[rows, columns]
  covered = covered[rows.start - top :, columns.start - left :, None]
  part += covered[: part.shape[0], : part.shape[1]] * (colour - part)


def _cover(shape, size, x, y, radius, turn):
  """Computes how much of each pixel n shapes cover, in windows around the shapes.

  Args:
    shape: the function that computes the signed distance; all n shapes have the same one.
    x, y, radius, turn: as in `Scenes`, [n].

  Returns:
    (shares float32 [n, w, w], left int64 [n], top int64 [n]).
  """
  radius = (radius * size).astype(np.float32)
  # A star's smooth tip ends 1.6 pixels beyond its radius, inside of any window. So a larger
  # window, which other shapes in the batch may need, changes no pixel.
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


# Signed distances, negative inside, of shapes whose centroid is the origin and whose
# circumscribed circle has radius 1. Beyond a corner the distance is that to the lines through
# the edges, which keeps corners sharp.


def _box(x, y, a, b):
  return np.maximum(np.abs(x) - a, np.abs(y) - b)


def _cross(x, y):
  return np.minimum(_box(x, y, 0.95, 0.31), _box(x, y, 0.31, 0.95))


def _triangle(x, y):
  # The normal of each side points away from the opposite corner.
  sides = [-(a * x + b * y) for a, b in _CORNERS[3]]
  return np.maximum(np.maximum(sides[0], sides[1]), sides[2]) - 0.5


def _star(x, y):
  """A pentagram: the points that lie outside of at most one of its five lines."""
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
