"""RandAugment as timm's `inc1`, `mstd`: severities, noise and chances, in closed form."""

import functools

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats

from vit_jax.data import lazy_tf
from vit_jax.data.ops import randaugment_increasing, registry

tf = lazy_tf.load()
NAMES = randaugment_increasing.NAMES
IMAGE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)


@functools.cache
def op(magnitude, std=0.0, probability=1.0, num_ops=1):
  text = f'randaug_increasing({num_ops}, {magnitude}, {std}, {probability})'
  (result,) = registry.parse(text)
  return result


def run(name, magnitude, sign=1, image=IMAGE):
  """Applies one op, without a graph."""
  u = [(NAMES.index(name) + 0.5) / 15, 0.25 if sign < 0 else 0.75, 0.5]
  return step(op(magnitude), u, image)


def step(result, u, image=IMAGE):
  tf.config.run_functions_eagerly(True)
  try:
    return result.apply(tf.constant(image), tf.constant(u, tf.float32)).numpy()
  finally:
    tf.config.run_functions_eagerly(False)


def level(std, magnitude=9):
  result = randaugment_increasing.IncreasingRandAugment(2, magnitude, std)
  return lambda u: result.level(tf.constant(u, tf.float32)).numpy() * 10


def test_magnitudes_are_normal_and_clipped():
  u = (np.arange(20_000) + 0.5) / 20_000
  u = u.astype(np.float32)
  result = level(0.5)(u)
  np.testing.assert_allclose(
    result, np.clip(stats.norm(9, 0.5).ppf(u), 0, 10), atol=1e-6
  )
  # A part of them, 1 - Phi(2), is all at the end of the scale; here counted.
  assert (result == 10).mean() == pytest.approx(stats.norm.sf(2), abs=1e-4)
  assert np.median(result) == pytest.approx(9, abs=1e-3)
  assert (level(0.5)([0.0]), level(0.0)([0.3])) == (0, 9)
  assert level(50.0, 0)(u).max() == 10


# timm's LEVEL_TO_ARG: bits expected, threshold, addition, factor up and down, of magnitudes.
TABLE = {
  0: (4, 256, 0, 1.0, 1.0),
  3: (3, 180, 33, 1.27, 0.73),
  5: (2, 128, 55, 1.45, 0.55),
  9: (1, 26, 99, 1.81, 0.19),
  10: (0, 0, 110, 1.9, 0.1),
}


@pytest.mark.parametrize('magnitude', TABLE)
def test_severities_grow_with_the_magnitude(magnitude):
  bits, threshold, addition, *factors = TABLE[magnitude]
  expected = IMAGE & (256 - 2 ** (8 - bits)) if bits else 0 * IMAGE
  np.testing.assert_array_equal(run('posterize', magnitude), expected)
  pillow = Image.fromarray(IMAGE)
  solarized = ImageOps.solarize(pillow, threshold)
  np.testing.assert_array_equal(run('solarize', magnitude), solarized)
  added = np.where(IMAGE < 128, np.minimum(IMAGE.astype(int) + addition, 255), IMAGE)
  np.testing.assert_array_equal(run('solarize_add', magnitude), added)
  for name in ('color', 'contrast', 'brightness', 'sharpness'):
    for sign, factor in zip((1, -1), factors, strict=True):
      enhancer = getattr(ImageEnhance, name.capitalize())
      want = np.asarray(enhancer(pillow).enhance(factor)).astype(int)
      result = run(name, magnitude, sign)
      assert np.abs(result - want).max() <= 1, (
        name,
        sign,
      )  # see test_data_randaugment.py
      assert (result != want).mean() < 0.01, (name, sign)


def pillows(name, amount, image=IMAGE):
  image = Image.fromarray(image)
  more = {'resample': Image.Resampling.BILINEAR, 'fillcolor': (124, 116, 104)}
  if name == 'rotate':
    return np.asarray(image.rotate(amount, **more))
  data = {
    'shear_x': (1, amount, 0, 0, 1, 0),
    'shear_y': (1, 0, 0, amount, 1, 0),
    'translate_x': (1, 0, amount * image.width, 0, 1, 0),
    'translate_y': (1, 0, 0, 0, 1, amount * image.height),
  }[name]
  return np.asarray(image.transform(image.size, Image.Transform.AFFINE, data, **more))


def inside(name, amount):
  """Returns bool [H, W]: whether a pixel comes from between the middles of pixels."""
  H, W = IMAGE.shape[:2]
  y, x = np.mgrid[:H, :W].astype(float)
  if name == 'rotate':
    c, s = np.cos(np.radians(amount)), np.sin(np.radians(amount))
    y, x = y - (H - 1) / 2, x - (W - 1) / 2
    y, x = s * x + c * y + (H - 1) / 2, c * x - s * y + (W - 1) / 2
  x, y = {
    'rotate': (x, y),
    'shear_x': (x + amount * (y + 0.5), y),
    'shear_y': (x, y + amount * (x + 0.5)),
    'translate_x': (x + amount * W, y),
    'translate_y': (x, y + amount * H),
  }[name]
  between = lambda n, size: (n > -1e-4) & (n < size - 1 + 1e-4)
  return between(x, W) & between(y, H)


@pytest.mark.parametrize(
  ('name', 'most'),
  [('rotate', 30), *((f'shear_{x}', 0.3) for x in 'xy')]
  + [(f'translate_{x}', 0.45) for x in 'xy'],
)
def test_geometry_is_pillows(name, most):
  smooth = Image.fromarray(IMAGE[:6, :8]).resize((32, 24), Image.Resampling.BICUBIC)
  smooth = np.asarray(smooth)
  for magnitude in (0, 4, 10):
    for sign in (1, -1):
      amount = sign * most * magnitude / 10
      result = run(name, magnitude, sign, smooth).astype(int)
      want, where = pillows(name, amount, smooth), inside(name, amount)
      assert where.any()
      assert np.abs(result - want)[where].max() <= 1, (magnitude, sign)  # rounded
      if magnitude == 10:
        assert (result == (124, 116, 104)).all(-1).any()


def test_each_op_has_its_share_and_the_rest_do_nothing():
  result = op(9, 0.0, 0.5, 2)
  u = (np.arange(3000) + 0.5) / 3000
  index = np.asarray(result.apply._index(tf.constant(u, tf.float32)))
  np.testing.assert_array_equal(np.bincount(index), [100] * 15 + [1500])
  nothing = [0.5, 0, 0.5, 1 - 2**-24, 0, 0.5]
  np.testing.assert_array_equal(step(result, nothing), IMAGE)
  twice = [2.5 / 30, 0, 0.5] * 2  # invert, and invert again
  np.testing.assert_array_equal(step(result, twice), IMAGE)
  np.testing.assert_array_equal(step(result, twice[:3] + nothing[:3]), 255 - IMAGE)


def test_an_image_is_the_same_alone_and_in_any_batch():
  images = np.random.default_rng(1).integers(0, 256, (30, 20, 23, 3), np.uint8)
  u = np.random.default_rng(2).random((30, 6), np.float32)
  u[:15, 0] = (np.arange(15) + 0.5) / 30  # each op
  apply = op(9, 0.5, 0.5, 2).apply
  specs = [tf.TensorSpec([None, 20, 23, 3], tf.uint8), tf.TensorSpec([None, 6])]
  whole = tf.function(apply, specs)(images, u)
  for i in range(30):
    one = apply(tf.constant(images[i]), tf.constant(u[i]))
    np.testing.assert_array_equal(whole[i], one)
