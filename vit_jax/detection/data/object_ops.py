"""Ops for detection: DETR's sizes and crops, large-scale jitter, and canvases.

Each op works on one example. Boxes are fractions of height and width, so resizing does not
change them. A crop moves boxes with the pixels and clips them at its border. Boxes without
an area left are dropped, with their labels and masks. The extents of masks move too, but
are not clipped: like the masks they may reach below 0 and above 1.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from vit_jax.check import nonempty
from vit_jax.data import lazy_tf
from vit_jax.data.ops import arguments, geometry, numpy_ops
from vit_jax.data.ops.registry import Twins, op
from vit_jax.errors import BadImage

# Section 4 of DETR, arXiv 2005.12872: the shorter side has 480 to 800 pixels, and the longer
# one has at most 1333. In the authors' code, the shorter side has 400, 500 or 600 before a
# crop.
SIZES = tuple(range(480, 801, 32))
LONGEST, FIRST, SIDES = 1333, (400, 500, 600), (384, 600)
_CROPPED = ('image', 'boxes', 'label', 'masks', 'extents')
# Boxes are dropped if a side is shorter than this, as a fraction of the image's side. Rounding
# errors of float32 are smaller.
_LEAST_SIDE = 1e-6
# One side, or several, of which one is drawn at random.
Sizes = arguments.Side | Annotated[Sequence[arguments.Side], nonempty]


@op('detr_resize', keeps_positions=True)
def detr_resize(sizes: Sizes = SIZES, longest: arguments.Side = LONGEST):
  """Resizes the shorter side to one of `sizes`, at random; bilinear, antialiased.

  The aspect ratio stays; the longer side is rounded down. If it would exceed `longest`, both
  sides shrink to fit. `detr_resize(800)` is DETR's preprocessing in evaluation.
  """
  sizes = _as_tuple(sizes)

  def apply(images, u):
    return _resize(images, sizes, longest, u)

  def array(image):
    height, width = _sides(*image.shape[:2], sizes[0], longest)
    return numpy_ops.resize_to(image, height, width, 'bilinear', True, 'nearest')

  if len(sizes) == 1:
    return Twins(apply, array)
  apply.draws = 1
  return apply


@op('fit', keeps_positions=True)
def fit(size: arguments.Size):
  """Resizes the image to the largest that fits into (h, w), with its aspect ratio.

  Bilinear, antialiased. This is `lsj` at factor 1; `canvas(size)` pads the image.
  """
  target = arguments.size_pair(size)

  def apply(images, u):
    tf = lazy_tf.load()
    shape = tf.cast(tf.shape(images)[:2], tf.float64)
    whole = tf.round(shape * tf.reduce_min(target / shape))
    whole = tf.maximum(tf.cast(whole, tf.int32), 1)
    return geometry.resize_to(images, whole, 'bilinear', True, 'nearest')

  def array(image):
    shape = np.array(image.shape[:2], np.float64)
    height, width = np.maximum(np.round(shape * (target / shape).min()), 1).astype(int)
    return numpy_ops.resize_to(image, height, width, 'bilinear', True, 'nearest')

  return Twins(apply, array)


@op('detr_crop', draws=7, maps=_CROPPED)
def detr_crop(
  sizes: Sizes = SIZES,
  longest: arguments.Side = LONGEST,
  first: Sizes = FIRST,
  sides: Annotated[tuple[arguments.Side, arguments.Side], arguments.ascending] = SIDES,
):
  """DETR's augmentation: `detr_resize(sizes, longest)`, half of the time after a crop.

  Before the crop, the shorter side is resized to one of `first`. Height and width of the
  crop are drawn independently within `sides` = (least, most), and never exceed the image.
  (Section 4: "crop to a random rectangular patch".)
  """
  sizes, first = _as_tuple(sizes), _as_tuple(first)
  least, most = sides

  def apply(features, u):
    tf = lazy_tf.load()

    def crop():
      image = _resize(features['image'], first, arguments.MAX_SIDE, u[1:2])
      side = lambda n, v: _draw_int(v, tf.minimum(least, n), tf.minimum(most, n))
      H, W = geometry.height_width(image)
      height, width = side(H, u[3]), side(W, u[4])
      y, x = _draw_int(u[5], 0, H - height), _draw_int(u[6], 0, W - width)
      objects = _crop_objects(features, (H, W), (y, x), (height, width))
      return {'image': image[y : y + height, x : x + width], **objects}

    out = tf.cond(u[0] < 0.5, crop, lambda: features)
    return {**out, 'image': _resize(out['image'], sizes, longest, u[2:3])}

  return apply


@op('lsj', draws=2, maps=_CROPPED)
def lsj(size: arguments.Size = 1024, scale: arguments.Interval = (0.1, 2.0)):
  """Large-scale jitter: resizes by a random factor, then crops to at most (h, w).

  arXiv 2012.07177, as detectron2's ResizeScale and FixedSizeCrop. Factor 1 is the size at
  which the whole image just fits; the factor is drawn within `scale`. One random number
  places the crop in both directions. Follow it by `canvas(size)`, which pads smaller images.
  If an example has masks, its boxes are fitted to the visible part of the masks, up to one
  cell of a mask.
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
    # This computes the pixels of the crop only.
    pixels = tf.raw_ops.ScaleAndTranslate(
      images=image[None],
      size=window,
      scale=tf.cast(whole, tf.float32) / tf.cast(shape, tf.float32),
      translation=-tf.cast(start, tf.float32),
      kernel_type='triangle',
      antialias=True,
    )
    pixels = tf.ensure_shape(pixels[0], [None, None, image.shape[-1]])
    objects = _crop_objects(features, whole, start, window, tighten=True)
    return {'image': geometry.to_levels(pixels, image.dtype, clip=False), **objects}

  return apply


@op('canvas', maps=('image', 'image_mask'), keeps_positions=True)
def canvas(size: arguments.Size):
  """Puts the image at the top left of an (h, w) canvas of zeros.

  'image_mask' is 1 on the image and 0 on the padding. A larger image is a bad image. Boxes
  stay fractions of the image without its padding, as in DETR, so only `value_range` may
  follow.
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


def _as_tuple(sizes: int | Sequence[int]) -> tuple[int, ...]:
  return (sizes,) if isinstance(sizes, int) else tuple(sizes)


def _crop_objects(features: dict, whole, start, size, tighten: bool = False) -> dict:
  """Crops an example's objects to a window of its image.

  Args:
    whole: (height, width) of the image.
    start: (y, x) of the window's first pixel.
    size: (height, width) of the window.
    tighten: whether to fit boxes to the visible part of the masks.
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
    out['boxes'] = _box_masks(out['masks'], out['extents'])
  out['boxes'] = boxes = tf.clip_by_value(out['boxes'], 0, 1)
  keep = tf.reduce_all(boxes[:, 2:] - boxes[:, :2] > _LEAST_SIDE, -1)
  return {k: tf.boolean_mask(v, keep) for k, v in out.items()}


def _box_masks(masks, extents):
  """Returns boxes around the visible cells of masks; (1, 1, 0, 0) if none is visible."""
  tf = lazy_tf.load()
  ends = tf.linspace(extents[:, :2], extents[:, 2:], masks.shape[-1] + 1, axis=-1)
  low, high = ends[..., :-1], ends[..., 1:]  # [n, 2, SIDE]
  shown = (low < 1) & (high > 0)
  cells = (masks > 0) & shown[:, 0, :, None] & shown[:, 1, None, :]
  some = tf.stack([tf.reduce_any(cells, axis) for axis in (2, 1)], 1)
  first = tf.reduce_min(tf.where(some, low, 1), -1)
  last = tf.reduce_max(tf.where(some, high, 0), -1)
  return tf.concat([first, last], -1)


def _draw_int(u, least, most):
  """Maps u in [0, 1) to an int32 from `least` to `most`, both included."""
  tf = lazy_tf.load()
  span = tf.cast(most - least + 1, tf.float32)
  return least + tf.minimum(tf.cast(tf.floor(u * span), tf.int32), most - least)


def _sides(height: int, width: int, size: int, longest: int) -> tuple[int, int]:
  """Computes in NumPy the height and width to which `_resize` resizes."""
  shape = np.array([height, width], np.float64)
  short, long = shape.min(), shape.max()
  least = max(np.round(longest * short / long), 1)
  size = least if long / short * size > longest else size
  return tuple(int(n) for n in np.minimum(np.floor(size * shape / short), longest))


def _resize(image, sizes, longest: int, u):
  """Resizes the shorter side to one of `sizes`; u [1] chooses if there are several."""
  tf = lazy_tf.load()
  size = tf.constant(sizes, tf.float64)
  size = size[0] if len(sizes) == 1 else size[_draw_int(u[0], 0, len(sizes) - 1)]
  shape = tf.cast(tf.shape(image)[:2], tf.float64)
  short, long = tf.reduce_min(shape), tf.reduce_max(shape)
  # The reference code, too, compares before it rounds.
  least = tf.maximum(tf.round(longest * short / long), 1)
  size = tf.where(long / short * size > longest, least, size)
  # Multiplying before dividing keeps the sides of a square equal. The reference code has no
  # minimum: there the longer side may exceed `longest` by a few pixels, and would not fit a
  # canvas of that size.
  target = tf.minimum(tf.cast(tf.floor(size * shape / short), tf.int32), longest)
  return geometry.resize_to(image, target, 'bilinear', True, 'nearest')
