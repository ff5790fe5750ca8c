"""Random changes of colour, which run on the device in JAX, as part of the train step.

The host sends uint8 images and two random numbers for each op. Nothing but `value_range` may
follow these ops in a pipeline. They change float32 images [H, W, 3] from 0 to 255 without
rounding, by the formulas of torchvision for float images.

After `multi_crop` each crop is changed by itself. A probability may then be three numbers:
for the first global crop, for the second, and for local crops.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from vit_jax.check import Factor, Fraction, Range
from vit_jax.data.ops.registry import op

Chance = Fraction | tuple[Fraction, Fraction, Fraction]


@dataclasses.dataclass(frozen=True, eq=False)
class _OnDevice:
  """Changes each image of a batch, or each crop of its images, with probability `p`.

  Attributes:
    change: a function (image float32 [3, H, W], key) -> image.
  """

  change: Callable
  p: Chance

  def on_device(self, batch: dict, u) -> dict:
    """Changes 'image' [B, H, W, 3], or 'image' and 'local' [B, crops, H, W, 3]."""
    # u is a multiple of 2**-24, so this loses nothing.
    keys = jax.random.wrap_key_data((u * 2**24).astype('uint32'), impl='threefry2x32')
    out = dict(batch)
    for name, first in (('image', 0), ('local', 2)):
      if name in batch:
        x = batch[name].astype(jnp.float32)
        self._check(x.shape)
        crops = x.reshape(len(x), -1, *x.shape[-3:])
        numbers = first + jnp.arange(crops.shape[1])
        over_crops = jax.vmap(self._maybe, (0, None, 0))
        out[name] = jax.vmap(over_crops, (0, 0, None))(crops, keys, numbers)
        out[name] = out[name].reshape(x.shape)
    return out

  def _check(self, shape) -> None:
    if shape[-1] != 3:
      raise ValueError('changes of colour need 3 channels: decode(3) makes them')
    if len(shape) == 4 and not isinstance(self.p, int | float):
      raise ValueError(f'p={self.p!r} is for the crops of multi_crop: give one number')

  def _maybe(self, image, key, number):
    chance, draw = jax.random.split(jax.random.fold_in(key, number))
    p = jnp.broadcast_to(jnp.float32(self.p), 3)[jnp.minimum(number, 2)]
    changed = jnp.moveaxis(self.change(jnp.moveaxis(image, -1, 0), draw), 0, -1)
    return jnp.where(jax.random.uniform(chance) < p, changed, image)


@op('color_jitter', draws=2)
def color_jitter(
  brightness: Factor = 0,
  contrast: Factor = 0,
  saturation: Factor = 0,
  hue: Annotated[float, Range(0, 0.5)] = 0,
  p: Chance = 1.0,
):
  """Changes brightness, contrast, saturation and hue, in a random order for each image.

  Three factors are uniform in [max(0, 1 - x), 1 + x]. They scale the levels, their distance
  from the mean grey of the image, and their distance from the grey of the pixel. The hue
  turns by up to `hue` of a circle.
  """
  strengths = jnp.float32([brightness, contrast, saturation])

  def change(image, key):
    order, factors, turn = jax.random.split(key, 3)
    low = jnp.maximum(0, 1 - strengths)
    factors = jax.random.uniform(factors, (3,), minval=low, maxval=1 + strengths)
    turn = jax.random.uniform(turn, (1,), minval=-hue, maxval=hue)
    order = jax.random.permutation(order, 4)
    return _jitter(image, order, jnp.concatenate([factors, turn]))

  return _OnDevice(change, p)


@op('grayscale', draws=2)
def grayscale(p: Chance = 0.2):
  """Replaces the three channels by their grey, with probability `p`."""
  return _OnDevice(lambda image, key: _grey(image), p)


@op('gaussian_blur', draws=2)
def gaussian_blur(p: Chance = 0.5, pillow: bool = False, inverted: bool = False):
  """Blurs with probability `p`; the standard deviation is uniform in [0.1, 2] pixels.

  Args:
    pillow: blur as Pillow does, by three box filters, as for DINO, iBOT and 3-Augment. The
      default is torchvision's kernel of nine pixels, as for DINOv2.
    inverted: apply with probability 1 - p. The published DINOv2 and DINOv3 were trained so
      by mistake (facebookresearch/dinov2 issue 411): they never blur the first global crop.
  """
  blur = _blur_of_pillow if pillow else _blur
  p = (1 - jnp.float32(p)).tolist() if inverted else p
  return _OnDevice(lambda image, key: blur(image, _sigma(key)), p)


@op('solarize', draws=2)
def solarize(p: Chance = 0.2):
  """Inverts the upper half of the levels, with probability `p`."""
  return _OnDevice(lambda image, key: _solarize(image), p)


@op('three_augment', draws=2)
def three_augment(jitter: Factor = 0.3):
  """3-Augment of DeiT III (arXiv 2204.07118): grey, solarize or blur, then colour jitter.

  Each of the three has the same probability. `jitter` is the strength of the changes of
  brightness, contrast and saturation.
  """
  last = color_jitter(jitter, jitter, jitter)

  def change(image, key):
    choice, sigma, colors = jax.random.split(key, 3)
    blur = lambda image: _blur_of_pillow(image, _sigma(sigma))
    branches = [_grey, _solarize, blur]
    chosen = jax.random.randint(choice, (), 0, len(branches))
    return last.change(jax.lax.switch(chosen, branches, image), colors)

  return _OnDevice(change, 1.0)


# The functions below change images float32 [3, H, W], because TPUs store arrays whose last
# axis is short at many times their size.


def _jitter(image, order, factors):
  """Applies four changes in an `order`, int [4], each with its factor, float32 [4]."""
  contrast = lambda x, factor: _blend(x, _grey(x).mean(), factor)
  saturation = lambda x, factor: _blend(x, _grey(x), factor)
  changes = [lambda x, factor: _clip(factor * x), contrast, saturation, _turn_hue]
  for i in order:
    image = jax.lax.switch(i, changes, image, factors[i])
  return image


def _grey(image):
  # A product of matrices would be rounded to bfloat16 on TPUs.
  r, g, b = image
  return jnp.broadcast_to(0.2989 * r + 0.587 * g + 0.114 * b, image.shape)


def _blend(image, other, factor):
  return _clip(factor * image + (1 - factor) * other)


def _clip(image):
  return jnp.clip(image, 0, 255)


def _solarize(image):
  return jnp.where(image >= 127.5, 255 - image, image)


def _turn_hue(image, turn):
  """Turns the hue of HSV by a part of a circle."""
  r, g, b = image
  # XLA does not compute a reduction again for each plane, as it would jnp.maximum.
  high = image.max(0)
  chroma = high - image.min(0)
  divisor = jnp.where(chroma == 0, 1, chroma)
  # The hue in sixths of a circle: 0 red, 2 green, 4 blue.
  sixths = jnp.where(high == g, 2 + (b - r) / divisor, 4 + (r - g) / divisor)
  sixths = jnp.where(high == r, (g - b) / divisor, sixths) + 6 * turn
  distance = (jnp.float32([5, 3, 1])[:, None, None] + sixths) % 6
  return high - chroma * jnp.clip(jnp.minimum(distance, 4 - distance), 0, 1)


def _sigma(key):
  return jax.random.uniform(key, minval=0.1, maxval=2)


def _blur(image, sigma):
  """torchvision's blur: a Gaussian of nine pixels; the image is mirrored at its border."""
  taps = jnp.exp(-0.5 * (jnp.arange(-4, 5) / sigma) ** 2)
  return _filter(image, taps / taps.sum(), 'reflect')


def _blur_of_pillow(image, sigma):
  """Pillow's blur up to rounding, for sigma <= 2: three boxes, whose ends are parts of pixels.

  The border pixels are repeated.
  """
  variance = sigma**2 / 3
  whole = jnp.floor((jnp.sqrt(12 * variance + 1) - 1) / 2)
  part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
  radius = whole + part / (6 * (variance - (whole + 1) ** 2))
  taps = jnp.clip(radius + 1 - jnp.abs(jnp.arange(-2, 3)), 0, 1) / (2 * radius + 1)
  for _ in range(3):
    image = _filter(image, taps, 'edge')
  return image


def _filter(image, taps, mode: str):
  """Convolves rows and columns of an image with the same taps, an odd number of them."""
  reach = len(taps) // 2
  for axis in (1, 2):
    around = [(0, 0)] * 3
    around[axis] = (reach, reach)
    padded, length = jnp.pad(image, around, mode), image.shape[axis]
    image = sum(
      taps[k] * jax.lax.slice_in_dim(padded, k, k + length, axis=axis)
      for k in range(len(taps))
    )
  return image
