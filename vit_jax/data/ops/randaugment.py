"""RandAugment (Cubuk et al. 2019, arXiv 1909.13719) for string pipelines, in two versions:

the paper's, and that of timm, with which Swin and ConvNeXt were trained.
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
FILL = 128  # Level of pixels from outside the image, and of cutouts.
# The range searched in the paper. EfficientNet-B7 was trained with 28, AugReg's ViTs
# with up to 20.
MAX_MAGNITUDE = 30


@op('randaug')
class RandAugment:
  """Applies `num_ops` ops in turn, each chosen uniformly among 16, with repetition.

  Of uint8 images with 3 channels. Every op is as strong as the magnitude m says:

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

  These levels are the published ones, and not all grow with m. Blends leave the
  image as it is at m = 5. Posterize weakens with m: 1 bit is left below m = 5, all 8
  from m = 20 on. So does solarize, which inverts the image at 0 and leaves it from
  m = 10 on, where the threshold is 256.

  Pixels from outside are grey 128; positions are rounded to the nearest pixel.

  Args:
    num_ops: N, how many ops are applied to each image.
    magnitude: m, a number from 0 to 30; 10 is the scale's unit.
    legacy: False gives the results of Pillow's namesakes, True those of big_vision when
      AugReg, the better plain ViT-S/16 and Mixer were trained. Then contrast blends with
      the grey min(H W / 256, 255), 196 at 224 px whatever the image. The solarize threshold
      is taken modulo 256: m = 0, 10 and 20 invert the whole image. Shears start from the
      middle of the first pixel. The grey of color, and the smoothed image, are truncated,
      and autocontrast computes in float32. It equals TensorFlow on a CPU except where
      float32 sums, exact here, were truncated there: 0.1 to 0.6 % of the sharpened values
      and 0.004 % of the coloured differ, by a level up to m = 10 and 5 at m = 30; rotating
      by 45 degrees takes the other of two neighbours for 0.2 % of the pixels.
  """

  # Numbers for each op that is applied: which one; its sign; a cutout's centre, which
  # needs no sign, takes the second and third.
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
    """Returns uint8 [..., H, W, 3], as `images`, for u float32 [..., draws]."""
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
    """One op on one image. Its graph of sixteen is made once, for all uses: 0.5 s."""

    def step(image, draws):
      choice, a, b = tf.unstack(draws)
      # Runs only that one.
      return tf.switch_case(self._index(choice), self._branches(image, a, b))

    return tf.function(step, autograph=False)

  def _index(self, choice):
    """Returns which of the branches, for a number in [0, 1)."""
    return tf.cast(choice * len(NAMES), tf.int32)

  def _branches(self, image, a, b) -> list:
    """Returns a function without arguments for each of NAMES."""
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
  """Applies up to `num_ops` ops whose strengths grow with a magnitude that is drawn.

  timm's `rand-m9-mstd0.5-inc1` is `randaug_increasing(2, 9, 0.5)`. For uint8 images with 3
  channels. `num_ops` times one of 15 ops is chosen, with repetition, and applied with
  `probability`, each time at a magnitude m from a normal distribution, clipped to [0, 10]:

    autocontrast, equalize, invert    of each channel
    rotate                            by +-3 m degrees, about the centre
    shear_x, shear_y                  by +-0.03 m, from the top left corner
    translate_x, translate_y          by +-0.045 m of the width, of the height
    color, contrast, brightness,      blended with factor 1 +- 0.09 m, at least 0.1, with
    sharpness                         grey, the mean grey, black, the smoothed image
    posterize                         keeps 4 - int(0.4 m) bits: none at m = 10
    solarize                          inverts levels from 256 - int(25.6 m) on
    solarize_add                      adds int(11 m) to levels below 128

  Pixels from outside are the mean of ImageNet. Between pixels it interpolates bilinearly,
  where timm, as Swin and ConvNeXt use it, is bicubic.

  Args:
    num_ops: N, how many ops are chosen for each image.
    magnitude: mean of m, a number from 0 to 10.
    std: standard deviation of m, before it is clipped.
    probability: with which an op that was chosen is applied.
  """

  # Numbers for each op are: which one, and whether it is applied; its sign; its magnitude.

  def __init__(
    self,
    num_ops: Count = 2,
    magnitude: Annotated[float, Range(0, 10)] = 9,
    std: Factor = 0.5,
    probability: Fraction = 0.5,
  ):
    self.draws = self._DRAWS * num_ops
    self._num_ops, self._mean, self._std = num_ops, magnitude, std
    self._probability = probability

  def _index(self, choice):
    """Returns the index of a branch: an op of INCREASING, or the last, which does nothing."""
    number = len(INCREASING)
    chosen = tf.cast(choice, tf.float64) * number
    applied = chosen < self._probability * number
    share = max(self._probability, 1e-9)
    return tf.where(applied, tf.cast(tf.floor(chosen / share), tf.int32), number)

  def level(self, u):
    """Returns m / 10, float64 [...], of uniform numbers [...] in [0, 1)."""
    m = tf.fill(tf.shape(u), tf.constant(self._mean, tf.float64))
    if self._std:  # ndtri(0) is minus infinity, which is clipped to 0
      m += self._std * tf.math.ndtri(tf.cast(u, tf.float64))
    return tf.clip_by_value(m, 0, 10) / 10

  def _branches(self, image, a, b) -> list:
    """Returns a function without arguments for each of INCREASING, and one that does nothing."""
    level = self.level(b)
    signed = tf.where(a < 0.5, -level, level)
    whole = lambda x: tf.cast(tf.floor(x), tf.int32)  # int(), as x >= 0
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
  """Returns {name: function without arguments} of the ops that move no pixel."""
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
  """Returns int32 []: the histogram's sum, the number of pixels, over its 256 bins."""
  height, width = geometry.height_width(image)
  return tf.minimum(height * width // 256, 255)


def _moves(image, warp, turn, shear, middle, dx, dy) -> dict:
  """Returns {name: function without arguments} of the ops that move pixels.

  Args:
    warp: called with (image, [a, b, c, d, e, f]); the value at (x, y) of its result is
      that of the image at (a x + b y + c, d x + e y + f).
    turn: cosine and sine of the angle; a positive angle is counter-clockwise on screen.
    middle: distance of the first pixel's centre from the origin of shears, in pixels: 0.5
      if shears start at the corner.
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
  """Warps by the nearest pixel, FILL outside."""
  size = geometry.height_width(image)
  # Pixels' numbers move, then pixels by them: half the time of moving three channels.
  numbers = _warp(tf.reshape(1 + tf.range(size[0] * size[1]), [*size, 1]), matrix)
  fill = tf.constant(FILL, tf.uint8, [1, 3])
  return tf.gather(tf.concat([fill, tf.reshape(image, [-1, 3])], 0), numbers[..., 0])


def _bilinear(image, matrix: list):
  """Warps with bilinear interpolation, ImageNet's mean outside."""
  fill = tf.constant((124, 116, 104), tf.float32)
  levels = _warp(tf.cast(image, tf.float32) - fill, matrix, 'BILINEAR')
  return tf.cast(tf.round(levels + fill), tf.uint8)


def _warp(image, matrix: list, interpolation: str = 'NEAREST'):
  """Returns an image of numbers [H, W, C] moved by a matrix, see `_moves`; 0 outside."""
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
  """Fills the square of 2 `half` pixels around (a, b) of [0, 1)^2, as far as inside."""
  height, width = geometry.height_width(image)
  y = tf.cast(a * tf.cast(height, tf.float32), tf.int32)
  x = tf.cast(b * tf.cast(width, tf.float32), tf.int32)
  top, bottom = tf.maximum(y - half, 0), tf.minimum(y + half, height)
  left, right = tf.maximum(x - half, 0), tf.minimum(x + half, width)
  hole = tf.fill([bottom - top, right - left, 3], tf.constant(FILL, tf.uint8))
  rows = image[top:bottom]
  rows = tf.concat([rows[:, :left], hole, rows[:, right:]], 1)
  return tf.concat([image[:top], rows, image[bottom:]], 0)
