"""RandAugment: each op against Pillow or a closed form, and all of them as one op."""

import functools
import itertools

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from vit_jax.data import lazy_tf
from vit_jax.data.ops import color, randaugment, registry

tf = lazy_tf.load()

H, W = 25, 31
LAST = 1 - 2**-24  # the largest number drawn
SIGNED = ('rotate', 'shear_x', 'shear_y', 'translate_x', 'translate_y')


def noise(*shape, low=0, high=256, seed=0):
  return np.random.default_rng(seed).integers(low, high, shape, np.uint8)


def gradients():
  x = np.linspace(0, 255, W) * np.ones((H, 1))
  y = np.linspace(30, 220, H)[:, None] * np.ones(W)
  return np.stack([x, y, 255 - x], -1).astype(np.uint8)


IMAGES = {
  'noise': noise(H, W, 3),
  'dull': noise(H, W, 3, low=97, high=120),
  'constant': np.full((H, W, 3), (0, 77, 255), np.uint8),
  'two values': noise(H, W, 3, high=2) * np.uint8(3) + np.uint8(40),
  'gradients': gradients(),
}


@functools.cache
def op(num_ops, magnitude, legacy=False):
  (found,) = registry.parse(f'randaug({num_ops}, {magnitude}, {legacy})')
  return found


def step(choice, magnitude, image, a, b, legacy):
  """Applies one op, without a graph: that of all sixteen takes half a second to make."""
  tf.config.run_functions_eagerly(True)
  try:
    u = tf.constant([choice, a, b], tf.float32)
    return op(1, magnitude, legacy).apply(tf.constant(image), u).numpy()
  finally:
    tf.config.run_functions_eagerly(False)


def run(name, magnitude, image, a=0.75, b=0.5, legacy=False):
  """Applies the op `name`; a < 0.5 is the negative sign."""
  choice = (randaugment.NAMES.index(name) + 0.5) / 16
  out = step(choice, magnitude, image, a, b, legacy)
  assert out.dtype == np.uint8
  assert out.shape == image.shape
  return out


def pillow(name, magnitude, image):
  image, level = Image.fromarray(image), magnitude / 10
  if name in ('color', 'contrast', 'brightness', 'sharpness'):
    enhancer = getattr(ImageEnhance, name.capitalize())
    return np.asarray(enhancer(image).enhance(0.1 + 1.8 * level))
  args = {
    'posterize': [min(max(int(4 * level), 1), 8)],
    'solarize': [int(256 * level)],
  }
  return np.asarray(getattr(ImageOps, name)(image, *args.get(name, [])))


# --- against Pillow ----------------------------------------------------------------


@pytest.mark.parametrize('name', ['autocontrast', 'equalize', 'invert'])
def test_channels_are_pillows(name):
  for kind, image in IMAGES.items():
    got, want = run(name, 10, image), pillow(name, 10, image)
    np.testing.assert_array_equal(got, want, err_msg=kind)


def test_autocontrast_truncates_where_pillow_does():
  # Where float64 makes 254.999... of 255, so does it here.
  ramp = np.arange(256, dtype=np.uint8)
  for low in range(0, 250, 11):
    for high in range(low + 1, 256, 17):
      image = np.clip(ramp, low, high).reshape(16, 16, 1).repeat(3, -1)
      want = ImageOps.autocontrast(Image.fromarray(image))
      np.testing.assert_array_equal(color.autocontrast(tf.constant(image)), want)


@pytest.mark.parametrize(
  'name', ['posterize', 'solarize', 'color', 'contrast', 'brightness', 'sharpness']
)
def test_levels_are_pillows(name):
  for magnitude in (0, 2, 5, 7.5, 10, 15, 20, 30):
    for kind, image in IMAGES.items():
      got, want = run(name, magnitude, image), pillow(name, magnitude, image)
      if name in ('posterize', 'solarize'):
        np.testing.assert_array_equal(got, want, err_msg=f'{kind}, {magnitude}')
        continue
      # Bitwise where Pillow's C multiplies, then adds; a compiler that fuses the two
      # (not on x86-64) truncates some whole numbers to the level below.
      assert np.abs(got.astype(int) - want).max() <= 1, (kind, magnitude)
      assert (got != want).mean() < 0.01, (kind, magnitude)


def coordinates(name, magnitude, sign, legacy=False):
  """Returns (y, x), float64 [H, W] each: where a pixel's value comes from."""
  level = sign * magnitude / 10
  y, x = np.mgrid[:H, :W].astype(float)
  if name == 'rotate':
    c, s = np.cos(np.radians(30 * level)), np.sin(np.radians(30 * level))
    y, x = y - (H - 1) / 2, x - (W - 1) / 2
    return s * x + c * y + (H - 1) / 2, c * x - s * y + (W - 1) / 2
  middle = 0 if legacy else 0.5
  return {
    'shear_x': (y, x + 0.3 * level * (y + middle)),
    'shear_y': (y + 0.3 * level * (x + middle), x),
    'translate_x': (y, x + 100 * level),
    'translate_y': (y + 100 * level, x),
  }[name]


def decided(places):
  """Returns bool [H, W]: not within 1e-3 of half-way between two pixels.

  Pillow steps by 1/65536 of a pixel, 31 times; TensorFlow computes in float32.
  """
  out = np.all([np.abs(p - np.floor(p) - 0.5) > 1e-3 for p in places], 0)
  assert out.mean() > 0.9
  return out


def pillows_geometry(name, level, image):
  image = Image.fromarray(image)
  more = {'resample': Image.Resampling.NEAREST, 'fillcolor': (128,) * 3}
  if name == 'rotate':
    return np.asarray(image.rotate(30 * level, **more))
  data = {
    'shear_x': (1, 0.3 * level, 0, 0, 1, 0),
    'shear_y': (1, 0, 0, 0.3 * level, 1, 0),
    'translate_x': (1, 0, 100 * level, 0, 1, 0),
    'translate_y': (1, 0, 0, 0, 1, 100 * level),
  }[name]
  return np.asarray(image.transform(image.size, Image.Transform.AFFINE, data, **more))


@pytest.mark.parametrize('name', SIGNED)
def test_geometry_is_pillows(name):
  image = IMAGES['noise']
  for magnitude in (0, 0.2, 1, 3.7, 10, 30):
    for a, sign in ((np.nextafter(np.float32(0.5), 0), -1), (0.5, 1)):
      want = pillows_geometry(name, sign * magnitude / 10, image)
      where = decided(coordinates(name, magnitude, sign))
      got, case = run(name, magnitude, image, a=a), f'{magnitude}, {sign}'
      np.testing.assert_array_equal(got[where], want[where], err_msg=case)
      if magnitude == 0:
        np.testing.assert_array_equal(got, image, err_msg=case)


# --- ops that Pillow does not have -------------------------------------------------


def test_solarize_add():
  for magnitude in (0, 5, 10, 15, 30):
    for kind, image in IMAGES.items():
      want = np.minimum(image.astype(int) + int(11 * magnitude), 255)
      want = np.where(image < 128, want, image)
      got = run('solarize_add', magnitude, image)
      np.testing.assert_array_equal(got, want, err_msg=f'{kind}, {magnitude}')


def test_cutout():
  image = IMAGES['noise']
  for a, b in itertools.product((0, 0.5, LAST), (0, 0.3, LAST)):
    for magnitude, half in ((0.1, 0), (1, 4), (2.6, 10), (20, 80)):
      y, x = np.mgrid[:H, :W] - np.floor([[[a * H]], [[b * W]]])
      hole = (y >= -half) & (y < half) & (x >= -half) & (x < half)
      got, want = (
        run('cutout', magnitude, image, a, b),
        np.where(hole[..., None], 128, image),
      )
      np.testing.assert_array_equal(got, want, err_msg=f'{a}, {b}, {magnitude}')


# --- the op as a whole -------------------------------------------------------------


@pytest.mark.parametrize('legacy', [False, True])
def test_each_op_has_a_sixteenth_of_the_numbers(legacy):
  image, seen = IMAGES['gradients'], set()
  for k in range(16):
    # Numbers are multiples of 2**-24: first, middle and last of a sixteenth. At
    # magnitude 1 no two ops agree.
    outs = {
      step(choice, 1, image, 0.3, 0.6, legacy).tobytes()
      for choice in (k / 16, (k + 0.5) / 16, (k + 1) / 16 - 2**-24)
    }
    assert len(outs) == 1
    seen |= outs
  assert len(seen) == 16


def test_ops_follow_one_another():
  image, u = IMAGES['noise'], np.random.default_rng(1).random((20, 9), np.float32)
  assert op(3, 12).draws == 9
  for row in u:
    want = image
    for choice, a, b in np.split(row, 3):
      want = step(choice, 12, want, a, b, False)
    np.testing.assert_array_equal(op(3, 12).apply(tf.constant(image), row), want)


@pytest.mark.parametrize('legacy', [False, True])
def test_an_image_is_the_same_alone_in_any_batch_and_of_unknown_size(legacy):
  images = noise(40, 20, 23, 3)
  u = np.random.default_rng(2).random((40, 6), np.float32)
  u[:16, 0] = (np.arange(16) + 0.5) / 16  # each op
  apply = op(2, 15, legacy).apply
  specs = [tf.TensorSpec([None, 20, 23, 3], tf.uint8), tf.TensorSpec([None, 6])]
  batch = tf.function(apply, specs)
  whole = batch(images, u)
  assert whole.dtype == tf.uint8
  np.testing.assert_array_equal(whole[5:], batch(images[5:], u[5:]))
  specs = [tf.TensorSpec([None, None, 3], tf.uint8), tf.TensorSpec([6], tf.float32)]
  unknown = tf.function(apply, specs)
  for i in range(40):
    image = tf.constant(images[i])
    np.testing.assert_array_equal(whole[i], apply(image, tf.constant(u[i])))
    np.testing.assert_array_equal(whole[i], unknown(image, u[i]))
  assert apply(tf.constant(images[:0]), tf.constant(u[:0])).shape == (0, 20, 23, 3)
