"""The ops of a string pipeline that draw no random numbers, in TensorFlow and NumPy.

Images are uint8 or float [..., H, W, C]: one image, or many of one shape. Geometric ops keep
the dtype. The ops that resize, and central_crop, apply the same change to 'segments'
[..., H, W], by the nearest pixel.

Ops that resize have the argument `rounding`, for uint8 images. 'truncate' cuts off the
fraction, as big_vision does: its pipelines give the same levels here. 'nearest' rounds.
'none' leaves float32, as vision_transformer does. Truncation makes images half a level
darker, but published models were trained on such images. Recipes that cite Pillow, which
rounds, use 'nearest'.

An image in a batch has bitwise the same result as alone, so that a batch may be split
anywhere. For that reason ops avoid transcendental functions, whose vectorised forms differ
from the scalar ones in the last bit. Beside each op stands its twin for one NumPy image, so
that prediction needs no TensorFlow. The twins of resizing are equal to the last bit.
"""

from typing import Literal

import numpy as np

from vit_jax.check import Count
from vit_jax.data.lazy_tf import tf
from vit_jax.data.ops import arguments, geometry, numpy_ops
from vit_jax.data.ops.arguments import Method, Rounding, Side, Size
from vit_jax.data.ops.registry import Twins, op
from vit_jax.errors import BadImage


@op('decode', keeps_positions=True)
class Decode:
  """Decodes bytes to uint8 [H, W, channels], and converts arrays to that many channels.

  Uses `tf.io.decode_image`, as big_vision does, and `tf.image.rgb_to_grayscale` for gray.

  Large photographs are decoded at a reduced size: if the next op makes a JPEG (`resize`,
  `resize_small`) or its crop (`inception_crop`) at least four times smaller in height and
  width, the JPEG is decoded at 1/2, 1/4 or 1/8 of its size, but not below twice the size of
  the result.

  Args:
    channels: 3 or 1.
    precise: decode JPEG by the accurate inverse DCT, as Pillow does, not by the fast one.
    whole: decode all pixels of a JPEG, however small the result, as big_vision does.
  """

  def __init__(
    self, channels: Literal[1, 3] = 3, precise: bool = False, whole: bool = False
  ):
    self.channels = channels
    self.precise = precise
    self.whole = whole

  def __call__(self, images, u):
    if images.shape[-1] == self.channels:
      return images
    if self.channels == 1:
      return tf.image.rgb_to_grayscale(images)
    return tf.repeat(images, 3, axis=-1)

  def numpy(self, image):
    if image.shape[-1] == self.channels:
      return image
    if self.channels == 3:
      return np.repeat(image, 3, axis=-1)
    # The same as `color.grey_of_tf`: TensorFlow computes x / 255 * 255.5, and truncates.
    total = image.astype(np.int64) @ np.array([2989, 5870, 1140])
    return (total * 511 // 5_100_000).astype(np.uint8)[..., None]


@op('resize', maps=('image', 'segments'), keeps_positions=True)
def resize(
  size: Size,
  method: Method = 'bilinear',
  antialias: bool = False,
  rounding: Rounding = 'truncate',
):
  """Resizes to (h, w), or to a square, whatever the aspect ratio.

  Uses `tf.image.resize` with half-pixel centres, as big_vision's op of the same text does.
  """
  target = arguments.size_pair(size)
  return Twins(
    geometry.extend_to_segments(
      lambda images, u, resize: resize(images, target, method, antialias, rounding)
    ),
    lambda image: numpy_ops.resize_to(image, *target, method, antialias, rounding),
    target,
  )


# In a run that starts from weights, `weights.pipelines.fill` replaces this op.
op('resize_as_weights', maps=('image', 'segments'), keeps_positions=True)(resize)


@op('resize_small', maps=('image', 'segments'), keeps_positions=True)
def resize_small(
  smaller_size: Side,
  method: Method = 'area',
  antialias: bool = True,
  rounding: Rounding = 'truncate',
):
  """Resizes the smaller side to `smaller_size` at the same aspect ratio.

  The same as big_vision's op of this text. There antialias is False by default, which makes no
  difference to 'area'. With rounding='nearest', which the pipelines of timm and transformers
  have, the longer side is rounded down, as these libraries do.
  """

  def tensors(images, u, resize):
    if rounding == 'nearest':
      shape = tf.cast(tf.shape(images)[-3:-1], tf.int64)
      size = shape * smaller_size // tf.reduce_min(shape)
    else:
      shape = tf.cast(tf.shape(images)[-3:-1], tf.float32)
      size = tf.round(shape * (smaller_size / tf.reduce_min(shape)))
    size = tf.cast(size, tf.int32)
    return resize(images, size, method, antialias, rounding)

  def array(image):
    if rounding == 'nearest':
      shape = np.asarray(image.shape[:2])
      size = shape * smaller_size // shape.min()
    else:
      shape = np.asarray(image.shape[:2], np.float32)
      size = np.round(shape * (np.float32(smaller_size) / shape.min()))
    return numpy_ops.resize_to(image, *size.astype(int), method, antialias, rounding)

  target = (smaller_size, smaller_size)
  return Twins(geometry.extend_to_segments(tensors), array, target)


@op('central_crop', maps=('image', 'segments'))
def central_crop(size: Size, half: Literal['down', 'even'] = 'down'):
  """Crops (h, w) from the middle; an odd margin is one pixel smaller at the top and left.

  The same as big_vision's op of this text. half='even' rounds half a pixel to an even number, as
  torchvision and timm do.
  """
  height, width = arguments.size_pair(size)
  first = lambda rest: (rest + (rest // 2 % 2 if half == 'even' else 0)) // 2

  def tensors(images, u, resize):
    rest = geometry.excess(images, height, width, 'central_crop')
    return geometry.cut(images, first(rest[0]), first(rest[1]), height, width)

  def array(image):
    y, x = first(image.shape[0] - height), first(image.shape[1] - width)
    if y < 0 or x < 0:
      raise BadImage(f'central_crop: the image is smaller than {height}x{width}')
    return image[y : y + height, x : x + width]

  return Twins(geometry.extend_to_segments(tensors), array)


@op('trim')
def trim(pixels: Side):
  """Removes `pixels` pixels at each side: `decode|trim(2)` for ObjectNet's red border."""
  message = f'trim: the image has no more than {2 * pixels} pixels a side'

  def tensors(images, u):
    static = images.shape[-3:-1]
    if static.is_fully_defined() and min(static) <= 2 * pixels:
      raise ValueError(message)
    smallest = tf.reduce_min(tf.shape(images)[-3:-1])
    large = tf.debugging.assert_greater(smallest, 2 * pixels, message)
    with tf.control_dependencies([large]):
      return tf.identity(images)[..., pixels:-pixels, pixels:-pixels, :]

  def array(image):
    if min(image.shape[:2]) <= 2 * pixels:
      raise BadImage(message)
    return image[pixels:-pixels, pixels:-pixels]

  return Twins(tensors, array)


@op('value_range', keeps_positions=True)
class ValueRange:
  """Maps [in_lo, in_hi] linearly to [lo, hi], as float32.

  Values outside of [in_lo, in_hi] lie outside of [lo, hi], unless `clip` is True. As
  big_vision's op of the same text, up to float32 rounding. lo and hi may be lists of one
  number per channel: (0 - mean) / std and (1 - mean) / std for models that standardise
  their pixels. A plain `value_range` in a run that starts from weights takes their numbers.
  """

  def __init__(
    self, lo=-1, hi=1, in_lo: float = 0, in_hi: float = 255, clip: bool = False
  ):
    low, high = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    if low.shape != high.shape or low.ndim > 1:
      raise ValueError('expected two numbers, or two lists of one per channel')
    if not np.all(low < high) or not in_lo < in_hi:
      raise ValueError('expected lo < hi and in_lo < in_hi')
    scale = (high - low) / (in_hi - in_lo)
    if low.ndim:
      self.lo, self.scale = low.astype(np.float32), scale.astype(np.float32)
    else:
      self.lo, self.scale = lo, float(scale)
    self.in_lo, self.in_hi, self.clip = in_lo, in_hi, clip

  def scale_images(self, images, clip):
    """Maps float32 images of TensorFlow, JAX or NumPy; `clip` is the library's function."""
    if self.clip:
      images = clip(images, self.in_lo, self.in_hi)
    return (images - self.in_lo) * self.scale + self.lo

  def __call__(self, images, u):
    return self.scale_images(tf.cast(images, tf.float32), tf.clip_by_value)

  def on_device(self, batch: dict, u=None) -> dict:
    """Maps the images of a batch, and their local crops, in JAX."""
    import jax.numpy as jnp

    scale = lambda x: self.scale_images(x.astype(jnp.float32), jnp.clip)
    return batch | {k: scale(batch[k]) for k in ('image', 'local') if k in batch}

  def numpy(self, image):
    return self.scale_images(image.astype(np.float32), np.clip)


@op('pad_to')
class PadTo:
  """Brings features to one length: `pad_to(boxes=100, label=100)`, as the last op.

  Cuts off what is longer, and pads with zeros what is shorter. For each feature adds
  NAME_mask, float32 [length], which is 0 for padding.
  """

  def __init__(self, **lengths: Count):
    self.lengths, self.maps = lengths, tuple(lengths)

  def __call__(self, features, u):
    out = {}
    for name, length in self.lengths.items():
      if name not in features:
        raise ValueError(f'pad_to: examples have no {name!r}')
      x = features[name][:length]
      number = tf.shape(x)[0]
      around = [[0, length - number]] + [[0, 0]] * (x.shape.rank - 1)
      out[name] = tf.ensure_shape(tf.pad(x, around), [length, *x.shape[1:]])
      out[f'{name}_mask'] = tf.cast(tf.range(length) < number, tf.float32)
    return out
