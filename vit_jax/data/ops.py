"""The ops of a string pipeline. TensorFlow, pure, no state.

Images are uint8 or float [..., H, W, C]: one image, or many of one shape. Geometric
ops keep the dtype; uint8 is rounded to the nearest and clipped. Random ops get their
numbers as `u`, float32 [..., draws] in [0, 1). On a batch each image's result is
bitwise what it is alone, so that a batch may be cut anywhere: hence no transcendental
functions, whose vectorised forms differ from the scalar ones in the last bit.
"""

import math

import numpy as np

from vit_jax.data import lazy_tf
from vit_jax.data.registry import op
from vit_jax.errors import did_you_mean

_METHODS = ('bilinear', 'bicubic', 'area', 'nearest')


@op('decode')
class Decode:
  """Bytes to uint8 [H, W, channels]; arrays get that many channels.

  Args:
    channels: 3 or 1.
    precise: JPEG by the accurate inverse DCT, as Pillow, not the fast one.
  """

  def __init__(self, channels: int = 3, precise: bool = False):
    self.channels = _choice('channels', channels, (1, 3))
    self.precise = precise

  def __call__(self, images, u):
    tf = lazy_tf.load()
    if images.shape[-1] == self.channels:
      return images
    if self.channels == 1:
      return tf.image.rgb_to_grayscale(images)
    return tf.repeat(images, 3, axis=-1)


@op('resize')
def resize(size, method: str = 'bilinear', antialias: bool = False):
  """To (h, w), or to a square; the aspect ratio is not kept.

  Half-pixel centres. Training resizes bilinear without antialias, as big_vision.
  """
  height, width = _hw(size)
  _choice('method', method, _METHODS)
  return lambda images, u: _resize(images, (height, width), method, antialias)


@op('resize_small')
def resize_small(smaller_size: int, method: str = 'area', antialias: bool = True):
  """The smaller side to `smaller_size`, aspect ratio kept, as big_vision evaluates."""
  _positive('smaller_size', smaller_size)
  _choice('method', method, _METHODS)

  def apply(images, u):
    tf = lazy_tf.load()
    shape = tf.cast(tf.shape(images)[-3:-1], tf.float32)
    ratio = smaller_size / tf.reduce_min(shape)
    size = tf.cast(tf.round(shape * ratio), tf.int32)
    return _resize(images, size, method, antialias)

  return apply


@op('central_crop')
def central_crop(size):
  """The (h, w) in the middle; where the rest is odd, one pixel nearer the top left."""
  height, width = _hw(size)

  def apply(images, u):
    tf = lazy_tf.load()
    rest = _rest(images, height, width, 'central_crop')
    return _cut(images, rest[0] // 2, rest[1] // 2, tf.constant((height, width)))

  return apply


@op('random_crop', draws=2)
def random_crop(size, padding: int = 0):
  """A (h, w) anywhere, after `padding` zero pixels on each side (4 for CIFAR)."""
  height, width = _hw(size)
  if not _is_int(padding) or padding < 0:
    raise ValueError(f'padding={padding!r} must be an integer >= 0')

  def apply(images, u):
    tf = lazy_tf.load()
    if padding:
      around = [[0, 0]] * (images.shape.rank - 3) + [[padding] * 2] * 2 + [[0, 0]]
      images = tf.pad(images, around)
    rest = _rest(images, height, width, 'random_crop')
    offset = tf.cast(tf.floor(u * tf.cast(rest + 1, tf.float32)), tf.int32)
    y, x = offset[..., 0], offset[..., 1]
    if images.shape.rank == 3:
      return _cut(images, y, x, tf.constant((height, width)))
    rows, columns = y[:, None] + tf.range(height), x[:, None] + tf.range(width)
    images = tf.gather(images, rows, axis=1, batch_dims=1)
    return tf.gather(images, columns, axis=2, batch_dims=1)

  return apply


@op('inception_crop', draws=2)
class InceptionCrop:
  """A crop of random area and aspect ratio, resized (Szegedy et al. 2014, section 6).

  TensorFlow's `sample_distorted_bounding_box`, as published ViTs were trained; after
  `decode` a JPEG is decoded inside the crop only.

  Args:
    size: (h, w) of the result, or a square's side.
    area_min, area_max: the crop's area in percent of the image's.
    ratio: range of width / height.
    method, antialias: of the resize.
  """

  def __init__(
    self,
    size,
    area_min: float = 5,
    area_max: float = 100,
    ratio=(3 / 4, 4 / 3),
    method: str = 'bilinear',
    antialias: bool = False,
  ):
    self.size = _hw(size)
    if not 0 < area_min <= area_max <= 100:
      raise ValueError('needed is 0 < area_min <= area_max <= 100 (percent)')
    self.area = (area_min / 100, area_max / 100)
    self.ratio = _range('ratio', ratio)
    self.method = _choice('method', method, _METHODS)
    self.antialias = antialias

  def box(self, height, width, u):
    """Returns the crop (y, x, h, w), int32 scalars, for u float32 [2]."""
    tf = lazy_tf.load()
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
      tf.stack([height, width, 3]),
      tf.zeros([1, 0, 4]),
      seed=tf.cast(u * 2**24, tf.int32),  # u has 24 random bits
      min_object_covered=0.0,
      aspect_ratio_range=self.ratio,
      area_range=self.area,
      max_attempts=100,
      use_image_if_no_bounding_boxes=True,
    )
    return begin[0], begin[1], size[0], size[1]

  def finish(self, crop):
    return _resize(crop, self.size, self.method, self.antialias)

  def _one(self, image, u):
    y, x, h, w = self.box(*_shape(image), u)
    return self.finish(image[y : y + h, x : x + w])

  def __call__(self, images, u):
    tf = lazy_tf.load()
    if images.shape.rank == 3:
      return self._one(images, u)
    spec = tf.TensorSpec([*self.size, images.shape[-1]], images.dtype)
    return tf.map_fn(lambda x: self._one(*x), (images, u), fn_output_signature=spec)


@op('flip_lr', draws=1)
def flip_lr():
  """Left to right in half of the cases: where u < 0.5."""

  def apply(images, u):
    tf = lazy_tf.load()
    return tf.where(u[..., None, None] < 0.5, tf.reverse(images, [-2]), images)

  return apply


@op('random_affine', draws=4)
def random_affine(
  degrees: float = 0, translate: float = 0, scale=(1, 1), fill: float = 0
):
  """Rotation, zoom and shift about the centre, bilinear; for small images.

  Args:
    degrees: angle uniform in +-degrees, up to 180.
    translate: shift uniform in +-translate of the height and of the width.
    scale: range of the zoom factor, uniform.
    fill: value outside the image.
  """
  if not 0 <= degrees <= 180:
    raise ValueError(f'degrees={degrees!r} must be between 0 and 180')
  if not 0 <= translate <= 1:
    raise ValueError(f'translate={translate!r} is a fraction, between 0 and 1')
  low, high = _range('scale', scale)

  def apply(images, u):
    tf = lazy_tf.load()
    batch = images if images.shape.rank == 4 else images[None]
    u = tf.reshape(u, [-1, 4])
    height, width = (tf.cast(n, tf.float32) for n in _shape(batch))
    sine, cosine = _sin_cos(tf, (2 * u[:, 0] - 1) * math.radians(degrees))
    zoom = low + u[:, 1] * (high - low)
    sine, cosine = sine / zoom, cosine / zoom
    # An output pixel at offset d from the shifted centre shows the input pixel at
    # offset R(-angle) d / zoom from the centre. Angles turn counter-clockwise as seen.
    cy, cx = (height - 1) / 2, (width - 1) / 2
    ty = cy + (2 * u[:, 2] - 1) * translate * height
    tx = cx + (2 * u[:, 3] - 1) * translate * width
    zero = tf.zeros_like(sine)
    rows = [cosine, -sine, cx - cosine * tx + sine * ty]
    rows += [sine, cosine, cy - sine * tx - cosine * ty, zero, zero]
    out = tf.raw_ops.ImageProjectiveTransformV3(
      images=tf.cast(batch, tf.float32),
      transforms=tf.stack(rows, -1),
      output_shape=tf.shape(batch)[1:3],
      interpolation='BILINEAR',
      fill_mode='CONSTANT',
      fill_value=float(fill),
    )
    return tf.ensure_shape(
      _like(tf.reshape(out, tf.shape(images)), images.dtype), images.shape
    )

  return apply


@op('value_range')
class ValueRange:
  """Maps [in_lo, in_hi] to [lo, hi], float32; values outside follow, or are clipped."""

  def __init__(
    self,
    lo: float,
    hi: float,
    in_lo: float = 0,
    in_hi: float = 255,
    clip: bool = False,
  ):
    if not lo < hi or not in_lo < in_hi:
      raise ValueError('needed is lo < hi and in_lo < in_hi')
    self.lo, self.scale = lo, (hi - lo) / (in_hi - in_lo)
    self.in_lo, self.in_hi, self.clip = in_lo, in_hi, clip

  def map(self, xnp, images):
    """The same arithmetic for TensorFlow, JAX or NumPy float32 images."""
    if self.clip:
      images = xnp.clip(images, self.in_lo, self.in_hi)
    return (images - self.in_lo) * self.scale + self.lo

  def __call__(self, images, u):
    tf = lazy_tf.load()
    images = tf.cast(images, tf.float32)
    if self.clip:
      images = tf.clip_by_value(images, self.in_lo, self.in_hi)
    return (images - self.in_lo) * self.scale + self.lo


@op('onehot', kind='label')
def onehot(num_classes: int | None = None, on: float = 1.0, off: float = 0.0):
  """Labels as float32 [K]: `on` at each label of the example, `off` elsewhere."""
  if num_classes is not None:
    _positive('num_classes', num_classes)

  def apply(labels, default_classes):
    out = np.full((len(labels), num_classes or default_classes), off, np.float32)
    for row, label in zip(out, labels, strict=True):
      row[np.asarray(label, np.int64)] = on
    return out

  return apply


def _resize(images, size, method, antialias):
  tf = lazy_tf.load()
  out = tf.image.resize(images, size, method, antialias=antialias)
  return _like(out, images.dtype)


def _like(images, dtype):
  """Casts to `dtype`; to uint8 by rounding to the nearest and clipping."""
  tf = lazy_tf.load()
  if dtype != tf.uint8 or images.dtype == tf.uint8:
    return tf.cast(images, dtype)
  return tf.cast(tf.clip_by_value(tf.round(images), 0, 255), tf.uint8)


def _shape(images):
  """Returns (H, W), int32 scalars."""
  tf = lazy_tf.load()
  shape = tf.shape(images)
  return shape[-3], shape[-2]


def _rest(images, height, width, name):
  """Returns int32 [2]: how much larger than (height, width) the images are."""
  tf = lazy_tf.load()
  rest = tf.shape(images)[-3:-1] - tf.constant((height, width))
  message = f'{name}: the image is smaller than {height}x{width}'
  with tf.control_dependencies([tf.debugging.assert_non_negative(rest, message)]):
    return tf.identity(rest)


def _cut(images, y, x, size):
  tf = lazy_tf.load()
  height, width = tf.get_static_value(size)
  out = images[..., y : y + height, x : x + width, :]
  return tf.ensure_shape(out, [*images.shape[:-3], height, width, images.shape[-1]])


def _sin_cos(tf, angle):
  """Returns (sin, cos) of angles in [-pi, pi] to 1e-6, by their power series.

  Only products and sums, which are the same alone and in a vector (see above).
  """
  square = angle * angle
  sine = [(-1) ** k / math.factorial(2 * k + 1) for k in range(10, -1, -1)]
  cosine = [(-1) ** k / math.factorial(2 * k) for k in range(10, -1, -1)]
  return tf.math.polyval(sine, square) * angle, tf.math.polyval(cosine, square)


def _is_int(value) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _positive(name, value):
  if not _is_int(value) or value < 1:
    raise ValueError(f'{name}={value!r} must be a positive integer')


def _hw(size) -> tuple[int, int]:
  """Returns (h, w) of a side or a pair."""
  pair = (size, size) if _is_int(size) else size
  if not isinstance(pair, tuple | list) or len(pair) != 2:
    raise ValueError(f'size={size!r} must be an integer or (height, width)')
  for side in pair:
    _positive('size', side)
  return tuple(pair)


def _range(name, value) -> tuple[float, float]:
  ok = isinstance(value, tuple | list) and len(value) == 2
  if not ok or not 0 < value[0] <= value[1]:
    raise ValueError(f'{name}={value!r} must be (low, high) with 0 < low <= high')
  return tuple(value)


def _choice(name, value, allowed):
  if value not in allowed:
    raise ValueError(
      f'{name}={value!r} is not in {allowed}{did_you_mean(value, allowed)}'
    )
  return value
