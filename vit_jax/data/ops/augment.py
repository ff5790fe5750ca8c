"""The random ops of a preprocessing pipeline.

An op gets its random numbers as `u`, float32 [..., draws] in [0, 1). `basic` describes the
images that ops take.
"""

import math
from typing import Annotated

from vit_jax.check import Fraction, Positive, Range
from vit_jax.data.lazy_tf import tf
from vit_jax.data.ops import arguments, geometry
from vit_jax.data.ops.arguments import (
  MAX_SIDE,
  Interval,
  Method,
  Percent,
  Rounding,
  Size,
)
from vit_jax.data.ops.registry import op


@op('random_crop', draws=2)
def random_crop(size: Size, padding: Annotated[int, Range(0, MAX_SIDE)] = 0):
  """Pads each side with `padding` zero pixels (4 for CIFAR), then crops (h, w) at random."""
  height, width = arguments.size_pair(size)

  def apply(images, u):
    if padding:
      around = [[0, 0]] * (images.shape.rank - 3) + [[padding] * 2] * 2 + [[0, 0]]
      images = tf.pad(images, around)
    rest = geometry.excess(images, height, width, 'random_crop')
    offset = tf.cast(tf.floor(u * tf.cast(rest + 1, tf.float32)), tf.int32)
    y, x = offset[..., 0], offset[..., 1]
    if images.shape.rank == 3:
      return geometry.cut(images, y, x, height, width)
    rows, columns = y[:, None] + tf.range(height), x[:, None] + tf.range(width)
    images = tf.gather(images, rows, axis=1, batch_dims=1)
    return tf.gather(images, columns, axis=2, batch_dims=1)

  return apply


@op('inception_crop', draws=2, maps=('image', 'segments'))
class InceptionCrop:
  """Crops a random area at a random aspect ratio, and resizes it.

  From Szegedy et al. 2014, section 6. Uses TensorFlow's `sample_distorted_bounding_box`, as
  big_vision's op of the same text does: the crops have the same distribution, and the same
  box gives the same levels. Directly after `decode`, a JPEG is decoded inside the crop only.

  Args:
    size: (h, w) of the result, or the side of a square.
    area_min, area_max: the area of the crop in percent of the image's area.
    ratio: range of width / height. The default is TensorFlow's, with which published ViTs
      were trained; the range of Inception's paper (arXiv 1409.4842) is [3/4, 4/3].
    method, antialias, rounding: see `resize`.
  """

  def __init__(
    self,
    size: Size,
    area_min: Percent = 5,
    area_max: Percent = 100,
    ratio: Interval = (0.75, 1.33),
    method: Method = 'bilinear',
    antialias: bool = False,
    rounding: Rounding = 'truncate',
  ):
    self.size = self.target = arguments.size_pair(size)
    if area_min > area_max:
      raise ValueError('expected 0 < area_min <= area_max <= 100 (percent)')
    self.area = (area_min / 100, area_max / 100)
    self.ratio = ratio
    self.method, self.antialias, self.rounding = method, antialias, rounding

  def box(self, height, width, u):
    """Returns the crop (y, x, h, w), int32 scalars, for u float32 [2]."""
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
      tf.stack([height, width, 3]),
      tf.zeros([1, 0, 4]),
      # u is a multiple of 2**-24, so this loses nothing.
      seed=tf.cast(u * 2**24, tf.int32),
      min_object_covered=0.0,
      aspect_ratio_range=self.ratio,
      area_range=self.area,
      max_attempts=100,
      use_image_if_no_bounding_boxes=True,
    )
    return begin[0], begin[1], size[0], size[1]

  def finish(self, crop, resize=geometry.resize_to):
    how = self.method, self.antialias, self.rounding
    return resize(crop, self.size, *how)

  def __call__(self, features, u):
    return geometry.extend_to_segments(self._crop)(features, u)

  def _crop(self, images, u, resize):
    def one(image, u):
      y, x, h, w = self.box(*geometry.height_width(image), u)
      return self.finish(image[y : y + h, x : x + w], resize)

    floats = self.rounding == 'none' and resize is geometry.resize_to
    dtype = tf.float32 if floats else images.dtype
    return geometry.each(one, images, u, [*self.size, images.shape[-1]], dtype)


@op('random_resized_crop', draws=2, maps=('image', 'segments'))
class RandomResizedCrop(InceptionCrop):
  """`inception_crop` with the boxes of torchvision and timm, resized as Pillow does.

  The area of the crop and the logarithm of its aspect ratio are uniform; the ratio is between
  3/4 and 4/3. The first of ten boxes that fits is taken, at a uniform place. If none does, it
  is the largest central box whose ratio is allowed.

  Args:
    size: (h, w) of the result, or the side of a square.
    area_min, area_max: the area of the crop in percent of the image's area.
  """

  def __init__(self, size: Size, area_min: Percent = 8, area_max: Percent = 100):
    how = 'bicubic', True, 'nearest'
    super().__init__(size, area_min, area_max, (3 / 4, 4 / 3), *how)

  def box(self, height, width, u):
    # u is a multiple of 2**-24, so this loses nothing.
    seed = tf.cast(u * 2**24, tf.int32)
    draws = tf.random.stateless_uniform([10, 4], seed)
    rows, columns = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
    low, high = self.area
    area = (low + draws[:, 0] * (high - low)) * rows * columns
    low, high = map(math.log, self.ratio)
    ratio = tf.exp(low + draws[:, 1] * (high - low))
    h, w = tf.round(tf.sqrt(area / ratio)), tf.round(tf.sqrt(area * ratio))
    y = tf.floor(draws[:, 2] * (rows - h + 1))
    x = tf.floor(draws[:, 3] * (columns - w + 1))
    fits = (h > 0) & (h <= rows) & (w > 0) & (w <= columns)
    first = tf.argmax(fits)
    # The largest central box, if none fits.
    low, high = self.ratio
    h_most = tf.minimum(rows, tf.round(columns / low))
    w_most = tf.minimum(columns, tf.round(rows * high))
    central = [(rows - h_most) // 2, (columns - w_most) // 2, h_most, w_most]
    box = tf.where(fits[first], tf.stack([y, x, h, w])[:, first], tf.stack(central))
    return tf.unstack(tf.cast(box, tf.int32))


@op('multi_crop', maps=('image', 'local'))
class MultiCrop:
  """Makes two large and several small crops of an image, as DINO and its successors do.

  'image' becomes [2, h, w, C], and 'local' [number, h, w, C]. The boxes are those of
  `random_resized_crop`, and each crop is mirrored half of the time. Only ops that run on the
  device may follow, see `colors`.

  Args:
    size: (h, w) of global crops, or the side of a square.
    local_size: the same of local crops.
    number: the number of local crops.
    area: global crops have at least this percentage of the image's area, local crops from 5 %
      to this percentage.
  """

  def __init__(
    self,
    size: Size,
    local_size: Size = 96,
    number: Annotated[int, Range(0, 100)] = 8,
    area: Annotated[float, Range(5, 100)] = 32,
  ):
    self.draws = 3 * (2 + number)
    self._global = RandomResizedCrop(size, area)
    self._local = RandomResizedCrop(local_size, 5, area) if number else None

  def __call__(self, features, u):
    out = {'image': self._cut(self._global, features['image'], u[..., :6])}
    if self._local:
      out['local'] = self._cut(self._local, features['image'], u[..., 6:])
    return out

  def _cut(self, crop, images, u):
    def one(image, u):
      def cut(draws):
        part = crop({'image': image}, draws[:2])['image']
        return tf.cond(draws[2] < 0.5, lambda: tf.reverse(part, [1]), lambda: part)

      spec = tf.TensorSpec(shape[1:], image.dtype)
      return tf.map_fn(cut, tf.reshape(u, [-1, 3]), fn_output_signature=spec)

    shape = [u.shape[-1] // 3, *crop.size, images.shape[-1]]
    return geometry.each(one, images, u, shape)


@op('flip_lr', draws=1, maps=('image', 'boxes', 'segments', 'masks', 'extents'))
def flip_lr():
  """Flips an image left to right if u < 0.5, that is, half of the time.

  Boxes and the extents of masks are [..., n, 4]: top, left, bottom and right, from 0 to 1.
  Segments are [..., H, W], and masks [..., n, h, w].
  """

  def apply(features, u):
    images = features['image']
    if images.shape.rank == 3:
      # `tf.where` would take longer to select pixels than `tf.reverse` to reverse them.
      flipped = tf.cond(u[0] < 0.5, lambda: tf.reverse(images, [-2]), lambda: images)
    else:
      flipped = tf.where(u[..., None, None] < 0.5, tf.reverse(images, [-2]), images)
    out = {'image': flipped}
    for name in [name for name in ('boxes', 'extents') if name in features]:
      top, left, bottom, right = tf.unstack(features[name], axis=-1)
      mirrored = tf.stack([top, 1 - right, bottom, 1 - left], -1)
      out[name] = tf.where(u[..., None] < 0.5, mirrored, features[name])
    for name, draw in (('segments', u[..., None]), ('masks', u[..., None, None])):
      if name in features:
        mirrored = tf.reverse(features[name], [-1])
        out[name] = tf.where(draw < 0.5, mirrored, features[name])
    return out

  return apply


@op('random_affine', draws=4)
def random_affine(
  degrees: Annotated[float, Range(0, 180)] = 0,
  translate: Fraction = 0,
  scale: Interval = (1, 1),
  fill: float = 0,
):
  """Rotates, zooms and shifts an image about its centre, bilinearly; for small images.

  Rounds uint8 images to the nearest level.

  Args:
    degrees: the angle is uniform in [-degrees, degrees]; at most 180.
    translate: the shifts are uniform in [-translate, translate], as fractions of the height
      and of the width.
    scale: (low, high) of the zoom factor, which is uniform.
    fill: the value outside of the image.
  """
  low, high = scale

  def apply(images, u):
    batch = images if images.shape.rank == 4 else images[None]
    u = tf.reshape(u, [-1, 4])
    height, width = (tf.cast(n, tf.float32) for n in geometry.height_width(batch))
    sine, cosine = _sin_cos((2 * u[:, 0] - 1) * math.radians(degrees))
    zoom = low + u[:, 1] * (high - low)
    sine, cosine = sine / zoom, cosine / zoom
    # An output pixel at offset d from the shifted centre shows the input pixel at
    # offset R(-angle) d / zoom from the centre. Angles turn counter-clockwise on screen.
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
      geometry.to_levels(tf.reshape(out, tf.shape(images)), images.dtype), images.shape
    )

  return apply


@op('random_erasing', draws=5, keeps_positions=True)
def random_erasing(p: Fraction = 0.25, std: Positive = 0.45):
  """Fills a random rectangle with noise (arXiv 1708.04896), as for Swin and ConvNeXt.

  Takes float images, so it stands after value_range. The rectangle has 2 to 33.3 % of the
  image's area; the logarithm of its height / width is uniform between 0.3 and 3.3. One that
  would exceed the image is clipped to it; timm draws another one instead. The noise is normal
  with mean 0, for every pixel and channel. Swin and ConvNeXt trained with a standard
  deviation of 1 on pixels that ImageNet's standard deviation, about 0.225 of [0, 1], had
  normalised: 0.45 in [-1, 1].

  Args:
    p: the share of images that get a rectangle.
    std: standard deviation of the noise.
  """
  area_min, area_max = 2, 100 / 3  # in percent
  low, high = math.log(0.3), math.log(1 / 0.3)

  def one(image, u):
    H, W = geometry.height_width(image)
    rows, columns = tf.cast(H, tf.float32), tf.cast(W, tf.float32)
    area = (area_min + u[1] * (area_max - area_min)) / 100 * rows * columns
    stretch = tf.exp(low + u[2] * (high - low))
    side = lambda length, most: tf.clip_by_value(
      tf.cast(tf.round(tf.sqrt(length)), tf.int32), 1, most
    )
    h, w = side(area * stretch, H), side(area / stretch, W)
    y = tf.cast(u[3] * tf.cast(H - h + 1, tf.float32), tf.int32)
    x = tf.cast(u[4] * tf.cast(W - w + 1, tf.float32), tf.int32)
    # u is a multiple of 2**-24, so this loses nothing.
    seed = tf.cast(u[1:3] * 2**24, tf.int32)
    noise = tf.random.stateless_normal([h, w, image.shape[-1]], seed, stddev=std)
    band = image[y : y + h]
    band = tf.concat([band[:, :x], tf.cast(noise, image.dtype), band[:, x + w :]], 1)
    erased = tf.concat([image[:y], band, image[y + h :]], 0)
    return tf.ensure_shape(erased, image.shape)

  def maybe(image, u):
    return tf.cond(u[0] < p, lambda: one(image, u), lambda: image)

  def apply(images, u):
    if not images.dtype.is_floating:
      raise ValueError('random_erasing takes float images: put it after value_range')
    return geometry.each(maybe, images, u)

  return apply


def _sin_cos(angle):
  """Returns (sin, cos) of angles in [-pi, pi] to 1e-6, by their power series.

  These need only products and sums, whose results are the same for one image and in a batch
  (see `basic`).
  """
  square = angle * angle
  sine = [(-1) ** k / math.factorial(2 * k + 1) for k in range(10, -1, -1)]
  cosine = [(-1) ** k / math.factorial(2 * k) for k in range(10, -1, -1)]
  return tf.math.polyval(sine, square) * angle, tf.math.polyval(cosine, square)
