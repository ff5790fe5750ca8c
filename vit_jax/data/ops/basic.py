"""The ops of a string pipeline. TensorFlow, pure, no state.

Images are uint8 or float [..., H, W, C]: one image, or many of one shape. Geometric
ops keep the dtype; uint8 is rounded to the nearest and clipped. Random ops get their
numbers as `u`, float32 [..., draws] in [0, 1). On a batch each image's result is
bitwise what it is alone, so that a batch may be cut anywhere: hence no transcendental
functions, whose vectorised forms differ from the scalar ones in the last bit.
"""

import numpy as np

from vit_jax.data import lazy_tf
from vit_jax.data.ops import arguments, geometry
from vit_jax.data.ops.registry import op


@op('decode')
class Decode:
  """Bytes to uint8 [H, W, channels]; arrays get that many channels.

  Args:
    channels: 3 or 1.
    precise: JPEG by the accurate inverse DCT, as Pillow, not the fast one.
  """

  def __init__(self, channels: int = 3, precise: bool = False):
    self.channels = arguments.choice('channels', channels, (1, 3))
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
  height, width = arguments.size_pair(size)
  arguments.choice('method', method, arguments.METHODS)
  return lambda images, u: geometry.resize_to(
    images, (height, width), method, antialias
  )


@op('resize_small')
def resize_small(smaller_size: int, method: str = 'area', antialias: bool = True):
  """The smaller side to `smaller_size`, aspect ratio kept, as big_vision evaluates."""
  arguments.positive('smaller_size', smaller_size)
  arguments.choice('method', method, arguments.METHODS)

  def apply(images, u):
    tf = lazy_tf.load()
    shape = tf.cast(tf.shape(images)[-3:-1], tf.float32)
    ratio = smaller_size / tf.reduce_min(shape)
    size = tf.cast(tf.round(shape * ratio), tf.int32)
    return geometry.resize_to(images, size, method, antialias)

  return apply


@op('central_crop')
def central_crop(size):
  """The (h, w) in the middle; where the rest is odd, one pixel nearer the top left."""
  height, width = arguments.size_pair(size)

  def apply(images, u):
    rest = geometry.excess(images, height, width, 'central_crop')
    return geometry.cut(images, rest[0] // 2, rest[1] // 2, height, width)

  return apply


@op('value_range')
class ValueRange:
  """Maps [in_lo, in_hi] to [lo, hi], float32; values outside follow, or are clipped.

  lo and hi may be one number per channel: (0 - mean) / std and (1 - mean) / std for
  models whose pixels are standardised.
  """

  def __init__(
    self,
    lo,
    hi,
    in_lo: float = 0,
    in_hi: float = 255,
    clip: bool = False,
  ):
    low, high = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    if low.shape != high.shape or low.ndim > 1:
      raise ValueError('needed are two numbers, or two lists of one per channel')
    if not np.all(low < high) or not in_lo < in_hi:
      raise ValueError('needed is lo < hi and in_lo < in_hi')
    scale = (high - low) / (in_hi - in_lo)
    if low.ndim:
      self.lo, self.scale = low.astype(np.float32), scale.astype(np.float32)
    else:
      self.lo, self.scale = lo, float(scale)
    self.in_lo, self.in_hi, self.clip = in_lo, in_hi, clip

  def scale_images(self, images, clip):
    """Maps float32 images of TensorFlow or JAX, by that library's function to clip."""
    if self.clip:
      images = clip(images, self.in_lo, self.in_hi)
    return (images - self.in_lo) * self.scale + self.lo

  def __call__(self, images, u):
    tf = lazy_tf.load()
    return self.scale_images(tf.cast(images, tf.float32), tf.clip_by_value)


@op('onehot', kind='label')
def onehot(num_classes: int | None = None, on: float = 1.0, off: float = 0.0):
  """Labels as float32 [K]: `on` at each label of the example, `off` elsewhere."""
  if num_classes is not None:
    arguments.positive('num_classes', num_classes)

  def apply(labels, known_classes):
    if num_classes is not None and num_classes < known_classes:
      raise ValueError(f'onehot({num_classes}): the data has {known_classes} classes')
    out = np.full((len(labels), num_classes or known_classes), off, np.float32)
    for row, label in zip(out, labels, strict=True):
      row[np.asarray(label, np.int64)] = on
    return out

  return apply
