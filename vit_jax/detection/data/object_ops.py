"""Ops of detection: DETR's sizes and crops, and canvases of one size.

All work on one example at a time. Boxes are fractions of height and width, so resizing
does not change them. A crop moves them with the pixels, cuts them off at its border, and
drops boxes without an area left, with their labels.
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


@op('detr_crop', draws=7, maps=('image', 'boxes', 'label'))
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
      moved = {**features, 'image': image}
      return _window(moved, y, x, height, width)

    out = tf.cond(u[0] < 0.5, cropped, lambda: features)
    return {**out, 'image': _resized(out['image'], sizes, longest, u[2:3])}

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


def _window(features: dict, y, x, height, width) -> dict:
  """Returns an example's image, boxes and labels inside a window, given in pixels."""
  image = features['image']
  out = {'image': image[y : y + height, x : x + width]}
  if 'boxes' not in features:
    return out
  tf = lazy_tf.load()
  whole = tf.cast(tf.tile(tf.shape(image)[:2], [2]), tf.float32)
  corner = tf.cast(tf.stack([y, x, y, x]), tf.float32)
  side = tf.cast(tf.stack([height, width, height, width]), tf.float32)
  out |= {k: v for k, v in features.items() if k in ('boxes', 'label')}
  out['boxes'] = tf.clip_by_value((out['boxes'] * whole - corner) / side, 0, 1)
  keep = tf.reduce_all(out['boxes'][:, 2:] > out['boxes'][:, :2], -1)
  keep = {k: tf.boolean_mask(v, keep) for k, v in out.items() if k != 'image'}
  return out | keep


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
