"""RandAugment (Cubuk et al. 2019, arXiv 1909.13719) for string pipelines.

There are two versions: the paper's, and timm's, with which Swin and ConvNeXt were trained.
"""

import functools
import math
from typing import Annotated

from vit_jax.check import Count, Factor, Fraction, Range
from vit_jax.data.lazy_tf import tf
from vit_jax.data.ops import color, geometry
from vit_jax.data.ops.registry import op

# The order of the ops, each chosen with probability 1/16.
NAMES = (
  *('autocontrast', 'equalize', 'invert', 'rotate', 'posterize', 'solarize'),
  *('color', 'contrast', 'brightness', 'sharpness', 'shear_x', 'shear_y'),
  *('translate_x', 'translate_y', 'cutout', 'solarize_add'),
)
INCREASING = (
  *('autocontrast', 'equalize', 'invert', 'rotate', 'posterize', 'solarize'),
  *('solarize_add', 'color', 'contrast', 'brightness', 'sharpness'),
  *('shear_x', 'shear_y', 'translate_x', 'translate_y'),
)
# Level of cutouts, and of pixels that come from outside the image.
FILL = 128
# The largest magnitude that the paper searched. EfficientNet-B7 was trained with 28, and
# AugReg's ViTs with up to 20.
MAX_MAGNITUDE = 30


@op('randaug')
class RandAugment:
  """Applies `num_ops` ops in turn, each drawn uniformly from 16, with repetition.

  Takes uint8 images with 3 channels. The magnitude m sets the strength of every op:

    autocontrast, equalize, invert    of each channel
    rotate                            by +-3 m degrees, about the centre
    shear_x, shear_y                  by +-0.03 m, from the top left corner
    translate_x, translate_y          by +-10 m pixels
    color, contrast, brightness,      blended with factor 0.1 + 0.18 m with grey, with
    sharpness                         the mean grey, with black, with the smoothed image
    posterize                         keeps int(0.4 m) bits, at least 1 and at most 8
    solarize                          inverts levels from int(25.6 m) on
    solarize_add                      adds int(11 m) to levels below 128
    cutout                            greys a square of 2 int(4 m) pixels, centred
                                      anywhere in the image

  These strengths are the published ones, and not all grow with m. Blends leave the image as
  it is at m = 5. Posterize weakens with m: 1 bit is left below m = 5, all 8 from m = 20 on.
  Solarize weakens too: it inverts the whole image at m = 0, and does nothing from m = 10 on,
  where the threshold is 256.

  Pixels from outside the image are grey 128. Positions are rounded to the nearest pixel.

  Args:
    num_ops: N, the number of ops that are applied to each image.
    magnitude: m, a number from 0 to 30; 10 is the unit of the scale.
    legacy: False gives the results of Pillow's functions; True those of big_vision when
      AugReg, the better plain ViT-S/16 and Mixer were trained. In that version contrast
      blends with the grey min(H W / 256, 255), which is 196 at 224 px whatever the image.
      The threshold of solarize is taken modulo 256, so that m = 0, 10 and 20 invert the
      whole image. Shears start from the middle of the first pixel. The grey of color and
      the smoothed image are truncated, and autocontrast computes in float32. The result
      equals TensorFlow's on a CPU except where its float32 sums, exact here, lost bits
      before they were truncated: 0.1 to 0.6 % of the values differ after sharpness and
      0.004 % after color, by one level up to m = 10 and by 5 at m = 30. A rotation by 45
      degrees takes the other of two neighbours for 0.2 % of the pixels.
  """

  # Random numbers per op: the choice of the op, its sign, and one more for cutout, which
  # has no sign and takes the second and third number for its centre.
  _DRAWS = 3

  def __init__(
    self,
    num_ops: Count = 2,
    magnitude: Annotated[float, Range(0, MAX_MAGNITUDE)] = 10,
    legacy: bool = False,
  ):
    self.draws = self._DRAWS * num_ops
    self._num_ops, self._legacy = num_ops, legacy
    self._level = magnitude / 10

  def __call__(self, images, u):
    """Maps images uint8 [..., H, W, 3] to the same shape; u: float32 [..., draws]."""
    if images.dtype != tf.uint8 or images.shape[-1] != 3:
      raise ValueError(
        'RandAugment takes uint8 images of 3 channels: put it before value_range'
      )
    return geometry.each(self._one, images, u)

  def _one(self, image, u):
    for draws in tf.unstack(tf.reshape(u, [self._num_ops, self._DRAWS])):
      image = tf.ensure_shape(self._step(image, draws), image.shape)
    return image

  @functools.cached_property
  def _step(self):
    """The function that applies one op to one image.

    Its graph contains all 16 ops and takes 0.5 s to build, so it is built only once.
    """

    def step(image, draws):
      choice, a, b = tf.unstack(draws)
      # `tf.switch_case` runs only the chosen branch.
      return tf.switch_case(self._index(choice), self._branches(image, a, b))

    return tf.function(step, autograph=False)

  def _index(self, choice):
    """Returns the index of a branch, given a number in [0, 1)."""
    return tf.cast(choice * len(NAMES), tf.int32)

  def _branches(self, image, a, b) -> list:
    """Returns a function without arguments for each op of NAMES."""
    level, legacy = self._level, self._legacy
    sign = tf.where(a < 0.5, tf.constant(-1, tf.float64), 1)
    angle, factor = math.radians(level * 30), level * 1.8 + 0.1
    turn = math.cos(angle), sign * math.sin(angle)
    shear, shift = sign * level * 0.3, sign * level * 100
    bits, threshold = min(max(int(level * 4), 1), 8), int(level * 256)
    threshold = threshold % 256 if legacy else threshold
    branches = {
      **_colors(image, bits, threshold, int(level * 110), factor, legacy),
      **_moves(image, _nearest, turn, shear, 0 if legacy else 0.5, shift, shift),
      'cutout': lambda: _cutout(image, int(level * 40), a, b),
    }
    return [branches[name] for name in NAMES]


@op('randaug_increasing')
class IncreasingRandAugment(RandAugment):
  """Applies up to `num_ops` ops, whose strengths grow with a random magnitude.

  timm's `rand-m9-mstd0.5-inc1` is `randaug_increasing(2, 9, 0.5)`. Takes uint8 images with 3
  channels. Draws `num_ops` of 15 ops, with repetition, and applies each with `probability`.
  The magnitude m of each op is drawn from a normal distribution, clipped to [0, 10]:

    autocontrast, equalize, invert    of each channel
    rotate                            by +-3 m degrees, about the centre
    shear_x, shear_y                  by +-0.03 m, from the top left corner
    translate_x, translate_y          by +-0.045 m of the width, of the height
    color, contrast, brightness,      blended with factor 1 +- 0.09 m, at least 0.1, with
    sharpness                         grey, the mean grey, black, the smoothed image
    posterize                         keeps 4 - int(0.4 m) bits: none at m = 10
    solarize                          inverts levels from 256 - int(25.6 m) on
    solarize_add                      adds int(11 m) to levels below 128

  Pixels from outside the image have the mean of ImageNet. Interpolation is bilinear; timm's,
  as Swin and ConvNeXt use it, is bicubic.

  Args:
    num_ops: N, the number of ops that are drawn for each image.
    magnitude: mean of m, a number from 0 to 10.
    std: standard deviation of m before it is clipped.
    probability: probability that a drawn op is applied.
  """

  def __init__(
    self,
    num_ops: Count = 2,
    magnitude: Annotated[float, Range(0, 10)] = 9,
    std: Factor = 0.5,
    probability: Fraction = 0.5,
  ):
    # Per op: its choice and whether to apply it, the sign, the magnitude.
    self.draws = self._DRAWS * num_ops
    self._num_ops, self._mean, self._std = num_ops, magnitude, std
    self._probability = probability

  def _index(self, choice):
    """Returns the index of a branch: an op of INCREASING, or the last one, the identity."""
    number = len(INCREASING)
    chosen = tf.cast(choice, tf.float64) * number
    applied = chosen < self._probability * number
    share = max(self._probability, 1e-9)
    return tf.where(applied, tf.cast(tf.floor(chosen / share), tf.int32), number)

  def level(self, u):
    """Returns m / 10, float64 [...], given uniform numbers [...] in [0, 1)."""
    m = tf.fill(tf.shape(u), tf.constant(self._mean, tf.float64))
    if self._std:
      # ndtri(0) is minus infinity, which is clipped to 0.
      m += self._std * tf.math.ndtri(tf.cast(u, tf.float64))
    return tf.clip_by_value(m, 0, 10) / 10

  def _branches(self, image, a, b) -> list:
    """Returns a function without arguments for each op of INCREASING, and the identity."""
    level = self.level(b)
    signed = tf.where(a < 0.5, -level, level)
    # The same as int(), because x >= 0.
    whole = lambda x: tf.cast(tf.floor(x), tf.int32)
    factor = tf.maximum(tf.cast(1 + 0.9 * signed, tf.float32), 0.1)
    bits, threshold = 4 - whole(4 * level), 256 - whole(256 * level)
    angle = signed * math.radians(30)
    turn = tf.cos(angle), tf.sin(angle)
    height, width = (tf.cast(n, tf.float64) for n in geometry.height_width(image))
    shifts = 0.45 * signed * width, 0.45 * signed * height
    branches = {
      **_colors(image, bits, threshold, whole(110 * level), factor),
      **_moves(image, _bilinear, turn, 0.3 * signed, 0.5, *shifts),
    }
    nothing = functools.partial(tf.identity, image)
    return [*(branches[name] for name in INCREASING), nothing]


def _colors(image, bits, threshold, addition, factor, legacy: bool = False) -> dict:
  """Returns {name: function without arguments} for the ops that move no pixel."""
  grey = color.grey_of_tf if legacy else color.grey
  target = lambda: _contrast_of_big_vision(image) if legacy else None
  return {
    'autocontrast': lambda: color.autocontrast(image, single=legacy),
    'equalize': lambda: color.equalize(image),
    'invert': lambda: color.invert(image),
    'posterize': lambda: color.posterize(image, bits),
    'solarize': lambda: color.solarize(image, threshold),
    'solarize_add': lambda: color.solarize_add(image, addition),
    'color': lambda: color.color(image, factor, grey),
    'contrast': lambda: color.contrast(image, factor, target()),
    'brightness': lambda: color.brightness(image, factor),
    'sharpness': lambda: color.sharpness(image, factor, truncate=legacy),
  }


def _contrast_of_big_vision(image):
  """Returns the level that big_vision uses as the mean grey, int32 [].

  It is the mean of the histogram's 256 bins: the number of pixels / 256, at most 255.
  """
  height, width = geometry.height_width(image)
  return tf.minimum(height * width // 256, 255)


def _moves(image, warp, turn, shear, middle, dx, dy) -> dict:
  """Returns {name: function without arguments} for the ops that move pixels.

  Args:
    warp: function of (image, [a, b, c, d, e, f]). Its result at (x, y) is the image at
      (a x + b y + c, d x + e y + f).
    turn: cosine and sine of the angle; a positive angle is counter-clockwise on screen.
    middle: distance in pixels from the origin of shears to the centre of the first pixel:
      0.5 if shears start at the corner.
  """

  def rotate():
    y, x = ((tf.cast(n, tf.float64) - 1) / 2 for n in geometry.height_width(image))
    cosine, sine = turn
    c, f = x - (cosine * x - sine * y), y - (sine * x + cosine * y)
    return warp(image, [cosine, -sine, c, sine, cosine, f])

  return {
    'rotate': rotate,
    'shear_x': lambda: warp(image, [1, shear, shear * middle, 0, 1, 0]),
    'shear_y': lambda: warp(image, [1, 0, 0, shear, 1, shear * middle]),
    'translate_x': lambda: warp(image, [1, 0, dx, 0, 1, 0]),
    'translate_y': lambda: warp(image, [1, 0, 0, 0, 1, dy]),
  }


def _nearest(image, matrix: list):
  """Warps to the nearest pixel, with FILL outside of the image."""
  size = geometry.height_width(image)
  # Warp the indices of the pixels, and then gather the pixels by index. That takes half the
  # time of warping three channels.
  numbers = _warp(tf.reshape(1 + tf.range(size[0] * size[1]), [*size, 1]), matrix)
  fill = tf.constant(FILL, tf.uint8, [1, 3])
  return tf.gather(tf.concat([fill, tf.reshape(image, [-1, 3])], 0), numbers[..., 0])


def _bilinear(image, matrix: list):
  """Warps with bilinear interpolation, with ImageNet's mean outside of the image."""
  fill = tf.constant((124, 116, 104), tf.float32)
  levels = _warp(tf.cast(image, tf.float32) - fill, matrix, 'BILINEAR')
  return tf.cast(tf.round(levels + fill), tf.uint8)


def _warp(image, matrix: list, interpolation: str = 'NEAREST'):
  """Warps an array [H, W, C] by a matrix, see `_moves`, with 0 outside of the image."""
  transform = tf.cast(tf.convert_to_tensor([*matrix, 0, 0], tf.float64), tf.float32)
  moved = tf.raw_ops.ImageProjectiveTransformV3(
    images=image[None],
    transforms=transform[None],
    output_shape=tf.shape(image)[:2],
    interpolation=interpolation,
    fill_mode='CONSTANT',
    fill_value=0.0,
  )
  return moved[0]


def _cutout(image, half: int, a, b):
  """Fills a square whose side is 2 `half` pixels, clipped to the image.

  Args:
    a, b: the centre (y, x), as fractions of the height and width.
  """
  height, width = geometry.height_width(image)
  y = tf.cast(a * tf.cast(height, tf.float32), tf.int32)
  x = tf.cast(b * tf.cast(width, tf.float32), tf.int32)
  top, bottom = tf.maximum(y - half, 0), tf.minimum(y + half, height)
  left, right = tf.maximum(x - half, 0), tf.minimum(x + half, width)
  hole = tf.fill([bottom - top, right - left, 3], tf.constant(FILL, tf.uint8))
  rows = image[top:bottom]
  rows = tf.concat([rows[:, :left], hole, rows[:, right:]], 1)
  return tf.concat([image[:top], rows, image[bottom:]], 0)
