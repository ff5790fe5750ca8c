"""The RandAugment with which Swin and ConvNeXt were trained, for string pipelines."""

import functools
import math
from typing import Annotated

from vit_jax.check import Count, Factor, Fraction, Range
from vit_jax.data.lazy_tf import tf
from vit_jax.data.ops import geometry
from vit_jax.data.ops.randaugment import RandAugment, colors
from vit_jax.data.ops.registry import op

NAMES = (
  *('autocontrast', 'equalize', 'invert', 'rotate', 'posterize', 'solarize'),
  *('solarize_add', 'color', 'contrast', 'brightness', 'sharpness'),
  *('shear_x', 'shear_y', 'translate_x', 'translate_y'),
)
FILL = (124, 116, 104)  # ImageNet's mean, outside of the image
MAX_MAGNITUDE = 10


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

  # Numbers for each op: which one, and whether it is applied; its sign; its magnitude.
  _DRAWS = 3

  def __init__(
    self,
    num_ops: Count = 2,
    magnitude: Annotated[float, Range(0, MAX_MAGNITUDE)] = 9,
    std: Factor = 0.5,
    probability: Fraction = 0.5,
  ):
    self.draws = self._DRAWS * num_ops
    self._num_ops, self._mean, self._std = num_ops, magnitude, std
    self._probability = probability

  def _index(self, choice):
    """Returns which of the branches: the last one, which does nothing, if none of NAMES."""
    chosen = tf.cast(choice, tf.float64) * len(NAMES)
    applied = chosen < self._probability * len(NAMES)
    share = max(self._probability, 1e-9)
    return tf.where(applied, tf.cast(tf.floor(chosen / share), tf.int32), len(NAMES))

  def level(self, u):
    """Returns m / 10, float64 [...], of uniform numbers [...] in [0, 1)."""
    m = tf.fill(tf.shape(u), tf.constant(self._mean, tf.float64))
    if self._std:  # ndtri(0) is minus infinity, which is clipped to 0
      m += self._std * tf.math.ndtri(tf.cast(u, tf.float64))
    return tf.clip_by_value(m, 0, MAX_MAGNITUDE) / 10

  def _branches(self, image, a, b) -> list:
    """Returns a function without arguments for each of NAMES, and one that does nothing."""
    level = self.level(b)
    signed = tf.where(a < 0.5, -level, level)
    whole = lambda x: tf.cast(tf.floor(x), tf.int32)  # int(), as x >= 0
    factor = tf.maximum(tf.cast(1 + 0.9 * signed, tf.float32), 0.1)
    shear, angle = 0.3 * signed, signed * math.radians(30)
    height, width = (tf.cast(n, tf.float64) for n in geometry.height_width(image))
    bits, threshold = 4 - whole(4 * level), 256 - whole(256 * level)
    branches = {
      **colors(image, bits, threshold, whole(110 * level), factor),
      'rotate': lambda: _rotate(image, height, width, angle),
      # The first pixel's middle is half a pixel from the corner.
      'shear_x': lambda: _warp(image, [1, shear, shear / 2, 0, 1, 0]),
      'shear_y': lambda: _warp(image, [1, 0, 0, shear, 1, shear / 2]),
      'translate_x': lambda: _warp(image, [1, 0, 0.45 * signed * width, 0, 1, 0]),
      'translate_y': lambda: _warp(image, [1, 0, 0, 0, 1, 0.45 * signed * height]),
    }
    return [*(branches[name] for name in NAMES), functools.partial(tf.identity, image)]


def _rotate(image, height, width, angle):
  """Rotates about the centre, counter-clockwise on screen if the angle is positive."""
  cosine, sine = tf.cos(angle), tf.sin(angle)
  y, x = (height - 1) / 2, (width - 1) / 2
  c, f = x - (cosine * x - sine * y), y - (sine * x + cosine * y)
  return _warp(image, [cosine, -sine, c, sine, cosine, f])


def _warp(image, matrix: list):
  """Shows at (x, y) the value at (a x + b y + c, d x + e y + f), bilinear; else FILL.

  Args:
    matrix: a, b, c, d, e, f: numbers or float64 [].
  """
  matrix = [tf.cast(x, tf.float64) for x in (*matrix, 0, 0)]
  fill = tf.constant(FILL, tf.float32)
  levels = tf.raw_ops.ImageProjectiveTransformV3(
    images=(tf.cast(image, tf.float32) - fill)[None],
    transforms=tf.cast(tf.stack(matrix), tf.float32)[None],
    output_shape=tf.stack([*geometry.height_width(image)]),
    interpolation='BILINEAR',
    fill_mode='CONSTANT',
    fill_value=0.0,
  )
  return tf.cast(tf.round(levels[0] + fill), tf.uint8)
