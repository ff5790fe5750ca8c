"""Ops of detection: DETR's sizes and crops, large jitter, and canvases of one size.

All work on one example at a time. Boxes are fractions of height and width, so resizing
does not change them. A crop moves them with the pixels, cuts them off at its border, and
drops boxes without an area left, with their labels and masks. The extents of masks move
likewise, but are not cut off: they may reach below 0 and above 1, as the masks do.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from vit_jax.check import nonempty
from vit_jax.data import lazy_tf
from vit_jax.data.ops import arguments, geometry, numpy_ops
from vit_jax.data.ops.registry import Twins, op
from vit_jax.errors import BadImage

# Section 4 of the paper, arXiv 2005.12872: the shorter side is 480 to 800, the longer at
# most 1333. In its code the shorter side is 400, 500 or 600 when the crop is taken.
SIZES = tuple(range(480, 801, 32))
LONGEST, FIRST, SIDES = 1333, (400, 500, 600), (384, 600)
_CROPPED = ('image', 'boxes', 'label', 'masks', 'extents')
_LEAST = 1e-6  # A box's sides, as parts of the image's: float32 rounds by less.
# A side, or several of which one is drawn.
Sizes = arguments.Side | Annotated[Sequence[arguments.Side], nonempty]


@op('detr_resize', keeps_positions=True)
def detr_resize(sizes: Sizes = SIZES, longest: arguments.Side = LONGEST):
  """Resizes the shorter side to one of `sizes`, at random; bilinear, antialiased.

  The aspect ratio stays, and the other side is rounded down. Both are smaller where the
  longer would exceed `longest`. `detr_resize(800)` is DETR's preprocessing in evaluation.
  """
  sizes = _several(sizes)

  def apply(images, u):
    return _resized(images, sizes, longest, u)

  def array(image):
    height, width = _sides(*image.shape[:2], sizes[0], longest)
    return numpy_ops.resize_to(image, height, width, 'bilinear', True, 'nearest')

  if len(sizes) == 1:
    return Twins(apply, array)
  apply.draws = 1
  return apply


@op('detr_crop', draws=7, maps=_CROPPED)
def detr_crop(
  sizes: Sizes = SIZES,
  longest: arguments.Side = LONGEST,
  first: Sizes = FIRST,
  sides: Annotated[tuple[arguments.Side, arguments.Side], arguments.ascending] = SIDES,
):
  """DETR's training sizes: `detr_resize(sizes, longest)`, half of the time after a crop.

  Before the crop the shorter side becomes one of `first`. The height and the width of the
  crop are drawn independently, whole numbers within `sides` = (least, most) and at most
  the image's. (Section 4: "crop to a random rectangular patch".)
  """
  sizes, first = _several(sizes), _several(first)
  least, most = sides

  def apply(features, u):
    tf = lazy_tf.load()

    def cropped():
      image = _resized(features['image'], first, arguments.MAX_SIDE, u[1:2])
      side = lambda n, v: _whole(v, tf.minimum(least, n), tf.minimum(most, n))
      H, W = geometry.height_width(image)
      height, width = side(H, u[3]), side(W, u[4])
      y, x = _whole(u[5], 0, H - height), _whole(u[6], 0, W - width)
      objects = _inside(features, (H, W), (y, x), (height, width))
      return {'image': image[y : y + height, x : x + width], **objects}

    out = tf.cond(u[0] < 0.5, cropped, lambda: features)
    return {**out, 'image': _resized(out['image'], sizes, longest, u[2:3])}

  return apply


@op('lsj', draws=2, maps=_CROPPED)
def lsj(size: arguments.Size = 1024, scale: arguments.Interval = (0.1, 2.0)):
  """Large-scale jitter: resizes by a random factor, and crops what is larger than (h, w).

  arXiv 2012.07177, as detectron2's ResizeScale and FixedSizeCrop: the factor, drawn within
  `scale`, multiplies the size at which the whole image just fits. One random number places
  the crop in both directions. `canvas(size)` then pads what is smaller. Where examples have
  masks, boxes are made anew around what the crop shows of them, up to a cell of the mask.
  """
  target, (low, high) = arguments.size_pair(size), scale

  def apply(features, u):
    tf = lazy_tf.load()
    image = features['image']
    shape = tf.cast(tf.shape(image)[:2], tf.float64)
    factor = tf.cast(low + u[0] * (high - low), tf.float64)
    whole = tf.round(shape * tf.reduce_min(target / shape * factor))
    whole = tf.maximum(tf.cast(whole, tf.int32), 1)
    window = tf.minimum(whole, target)
    start = tf.cast(tf.round(tf.cast(whole - window, tf.float32) * u[1]), tf.int32)
    # Pixels outside of the crop are not computed.
    pixels = tf.raw_ops.ScaleAndTranslate(
      images=image[None],
      size=window,
      scale=tf.cast(whole, tf.float32) / tf.cast(shape, tf.float32),
      translation=-tf.cast(start, tf.float32),
      kernel_type='triangle',
      antialias=True,
    )
    pixels = tf.ensure_shape(pixels[0], [None, None, image.shape[-1]])
    objects = _inside(features, whole, start, window, tighten=True)
    return {'image': geometry.to_levels(pixels, image.dtype, clip=False), **objects}

  return apply


@op('canvas', maps=('image', 'image_mask'), keeps_positions=True)
def canvas(size: arguments.Size):
  """The image at the top left of an (h, w) canvas of zeros; 'image_mask' is 1 on the image.

  A larger image is a bad image. Boxes stay fractions of the image without its padding, as
  DETR's are, so only `value_range` may follow.
  """
  height, width = arguments.size_pair(size)
  message = f'canvas: the image is larger than {height}x{width}'

  def apply(features, u):
    tf = lazy_tf.load()
    image = features['image']
    H, W = geometry.height_width(image)
    fits = tf.debugging.assert_equal((height >= H) & (width >= W), True, message)
    with tf.control_dependencies([fits]):
      around = [[0, height - H], [0, width - W]]
    padded = tf.pad(image, [*around, [0, 0]])
    mask = tf.pad(tf.ones([H, W], tf.uint8), around)
    return {
      'image': tf.ensure_shape(padded, [height, width, image.shape[-1]]),
      'image_mask': tf.ensure_shape(mask, [height, width]),
    }

  def arrays(image):
    H, W, C = image.shape
    if height < H or width < W:
      raise BadImage(message)
    out = {
      'image': np.zeros((height, width, C), image.dtype),
      'image_mask': np.zeros((height, width), np.uint8),
    }
    out['image'][:H, :W], out['image_mask'][:H, :W] = image, 1
    return out

  return Twins(apply, arrays)


def _several(sizes: int | Sequence[int]) -> tuple[int, ...]:
  return (sizes,) if isinstance(sizes, int) else tuple(sizes)


def _inside(features: dict, whole, start, size, tighten: bool = False) -> dict:
  """Returns an example's objects inside a window of its image.

  Args:
    whole, start, size: (height, width) of the image, the window's first pixel, and its
      height and width, in pixels of the same image.
    tighten: whether boxes become those around the masks that the window shows.
  """
  tf = lazy_tf.load()
  out = {k: features[k] for k in _CROPPED[1:] if k in features}
  if 'boxes' not in out:
    return out
  whole, start, size = (
    tf.cast(tf.tile(x, [2]), tf.float32) for x in (whole, start, size)
  )
  for name in [name for name in ('boxes', 'extents') if name in out]:
    out[name] = (out[name] * whole - start) / size
  if tighten and 'masks' in out:
    out['boxes'] = _around(out['masks'], out['extents'])
  out['boxes'] = boxes = tf.clip_by_value(out['boxes'], 0, 1)
  keep = tf.reduce_all(boxes[:, 2:] - boxes[:, :2] > _LEAST, -1)
  return {k: tf.boolean_mask(v, keep) for k, v in out.items()}


def _around(masks, extents):
  """Returns the boxes around the cells of masks that cover any of the image; else 1, 1, 0, 0."""
  tf = lazy_tf.load()
  ends = tf.linspace(extents[:, :2], extents[:, 2:], masks.shape[-1] + 1, axis=-1)
  low, high = ends[..., :-1], ends[..., 1:]  # [n, 2, SIDE]
  shown = (low < 1) & (high > 0)
  cells = (masks > 0) & shown[:, 0, :, None] & shown[:, 1, None, :]
  some = tf.stack([tf.reduce_any(cells, axis) for axis in (2, 1)], 1)
  first = tf.reduce_min(tf.where(some, low, 1), -1)
  last = tf.reduce_max(tf.where(some, high, 0), -1)
  return tf.concat([first, last], -1)


def _whole(u, least, most):
  """Returns an int32 from `least` to `most`, both included, given u in [0, 1)."""
  tf = lazy_tf.load()
  span = tf.cast(most - least + 1, tf.float32)
  return least + tf.minimum(tf.cast(tf.floor(u * span), tf.int32), most - least)


def _sides(height: int, width: int, size: int, longest: int) -> tuple[int, int]:
  """Returns the height and width that `_resized` gives an image, in NumPy."""
  shape = np.array([height, width], np.float64)
  short, long = shape.min(), shape.max()
  least = max(np.round(longest * short / long), 1)
  size = least if long / short * size > longest else size
  return tuple(int(n) for n in np.minimum(np.floor(size * shape / short), longest))


def _resized(image, sizes, longest: int, u):
  """Resizes the shorter side to one of the sizes; u [1] chooses where there are several."""
  tf = lazy_tf.load()
  size = tf.constant(sizes, tf.float64)
  size = size[0] if len(sizes) == 1 else size[_whole(u[0], 0, len(sizes) - 1)]
  shape = tf.cast(tf.shape(image)[:2], tf.float64)
  short, long = tf.reduce_min(shape), tf.reduce_max(shape)
  # Compared before rounding, as in the reference code.
  least = tf.maximum(tf.round(longest * short / long), 1)
  size = tf.where(long / short * size > longest, least, size)
  # The product comes before the quotient, so that a square's sides stay equal. In the
  # reference code the longer side may round to a few pixels above `longest`, which would
  # not fit a canvas of that size.
  target = tf.minimum(tf.cast(tf.floor(size * shape / short), tf.int32), longest)
  return geometry.resize_to(image, target, 'bilinear', True, 'nearest')
