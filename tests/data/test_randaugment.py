"""RandAugment, the paper's and timm's: ops against Pillow or a closed form, and as a whole."""

import functools
import itertools

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats

from vit_jax.data import lazy_tf
from vit_jax.data.ops import color, randaugment, registry

tf = lazy_tf.load()

H, W = 25, 31
LAST = 1 - 2**-24  # the largest number drawn
ENHANCERS = ('color', 'contrast', 'brightness', 'sharpness')
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
NOISE = IMAGES['noise']


@functools.cache
def paper(magnitude, num_ops=1, legacy=False):
  (op,) = registry.parse(f'randaug({num_ops}, {magnitude}, {legacy})')
  return op


@functools.cache
def timm(magnitude, num_ops=1, std=0.0, probability=1.0):
  text = f'randaug_increasing({num_ops}, {magnitude}, {std}, {probability})'
  (op,) = registry.parse(text)
  return op


def step(op, u, image):
  """Applies an op without a graph: that of all branches takes half a second to make."""
  tf.config.run_functions_eagerly(True)
  try:
    out = op.apply(tf.constant(image), tf.constant(u, tf.float32)).numpy()
  finally:
    tf.config.run_functions_eagerly(False)
  assert (out.dtype, out.shape) == (np.uint8, image.shape)
  return out


def run(name, magnitude, image, a=0.75, b=0.5, legacy=False):
  """Applies one op of the paper's; a < 0.5 is the negative sign."""
  choice = (randaugment.NAMES.index(name) + 0.5) / 16
  return step(paper(magnitude, legacy=legacy), [choice, a, b], image)


def run_timm(name, magnitude, sign=1, image=NOISE):
  choice = (randaugment.INCREASING.index(name) + 0.5) / 15
  return step(timm(magnitude), [choice, 0.5 + sign / 4, 0.5], image)


def assert_close(result, expected, case):
  # Bitwise where Pillow's C multiplies, then adds; a compiler that fuses the two (not on
  # x86-64) truncates some whole numbers to the level below.
  assert np.abs(result.astype(int) - expected).max() <= 1, case
  assert (result != expected).mean() < 0.01, case


def enhanced(name, image, factor):
  enhancer = getattr(ImageEnhance, name.capitalize())(Image.fromarray(image))
  return np.asarray(enhancer.enhance(factor))


# --- colours, as Pillow ------------------------------------------------------------


@pytest.mark.parametrize('name', ['autocontrast', 'equalize', 'invert'])
def test_channels_are_pillows(name):
  for kind, image in IMAGES.items():
    expected = getattr(ImageOps, name)(Image.fromarray(image))
    np.testing.assert_array_equal(run(name, 10, image), expected, err_msg=kind)


def test_autocontrast_truncates_where_pillow_does():
  # Where float64 makes 254.999... of 255, so does it here.
  ramp = np.arange(256, dtype=np.uint8)
  for low in range(0, 250, 11):
    for high in range(low + 1, 256, 17):
      image = np.clip(ramp, low, high).reshape(16, 16, 1).repeat(3, -1)
      expected = ImageOps.autocontrast(Image.fromarray(image))
      np.testing.assert_array_equal(color.autocontrast(tf.constant(image)), expected)


@pytest.mark.parametrize('magnitude', [0, 2, 5, 7.5, 10, 15, 20, 30])
def test_levels_of_the_paper(magnitude):
  bits, threshold = min(max(int(0.4 * magnitude), 1), 8), int(25.6 * magnitude)
  for kind, image in IMAGES.items():
    pillow, case = Image.fromarray(image), f'{kind}, {magnitude}'
    for name, argument in (('posterize', bits), ('solarize', threshold)):
      expected = getattr(ImageOps, name)(pillow, argument)
      np.testing.assert_array_equal(run(name, magnitude, image), expected, err_msg=case)
    for name in ENHANCERS:
      expected = enhanced(name, image, 0.1 + 0.18 * magnitude)
      assert_close(run(name, magnitude, image), expected, (name, case))
    added = np.minimum(image.astype(int) + int(11 * magnitude), 255)
    added = np.where(image < 128, added, image)
    np.testing.assert_array_equal(
      run('solarize_add', magnitude, image), added, err_msg=case
    )


# timm's LEVEL_TO_ARG: bits retained, threshold, addition, factor up and down, of magnitudes.
TABLE = {
  0: (4, 256, 0, 1.0, 1.0),
  3: (3, 180, 33, 1.27, 0.73),
  5: (2, 128, 55, 1.45, 0.55),
  9: (1, 26, 99, 1.81, 0.19),
  10: (0, 0, 110, 1.9, 0.1),
}


@pytest.mark.parametrize('magnitude', TABLE)
def test_levels_of_timm_grow_with_the_magnitude(magnitude):
  bits, threshold, addition, *factors = TABLE[magnitude]
  expected = NOISE & (256 - 2 ** (8 - bits)) if bits else 0 * NOISE
  np.testing.assert_array_equal(run_timm('posterize', magnitude), expected)
  solarized = ImageOps.solarize(Image.fromarray(NOISE), threshold)
  np.testing.assert_array_equal(run_timm('solarize', magnitude), solarized)
  added = np.where(NOISE < 128, np.minimum(NOISE.astype(int) + addition, 255), NOISE)
  np.testing.assert_array_equal(run_timm('solarize_add', magnitude), added)
  for sign, factor in zip((1, -1), factors, strict=True):
    for name in ENHANCERS:
      result = run_timm(name, magnitude, sign)
      assert_close(result, enhanced(name, NOISE, factor), (name, sign))


# --- geometry, as Pillow -----------------------------------------------------------


def places(name, amount, middle=0.5):
  """Returns (y, x), float64 [H, W] each: where a pixel's value comes from."""
  y, x = np.mgrid[:H, :W].astype(float)
  if name == 'rotate':
    c, s = np.cos(np.radians(amount)), np.sin(np.radians(amount))
    y, x = y - (H - 1) / 2, x - (W - 1) / 2
    return s * x + c * y + (H - 1) / 2, c * x - s * y + (W - 1) / 2
  return {
    'shear_x': (y, x + amount * (y + middle)),
    'shear_y': (y + amount * (x + middle), x),
    'translate_x': (y, x + amount),
    'translate_y': (y + amount, x),
  }[name]


def decided(at):
  """Returns bool [H, W]: not within 1e-3 of half-way between two pixels.

  Pillow steps by 1/65536 of a pixel, 31 times; TensorFlow computes in float32.
  """
  out = np.all([np.abs(p - np.floor(p) - 0.5) > 1e-3 for p in at], 0)
  assert out.mean() > 0.9
  return out


def pillows(name, amount, image, resample, fill):
  image = Image.fromarray(image)
  more = {'resample': resample, 'fillcolor': fill}
  if name == 'rotate':
    return np.asarray(image.rotate(amount, **more))
  data = {
    'shear_x': (1, amount, 0, 0, 1, 0),
    'shear_y': (1, 0, 0, amount, 1, 0),
    'translate_x': (1, 0, amount, 0, 1, 0),
    'translate_y': (1, 0, 0, 0, 1, amount),
  }[name]
  return np.asarray(image.transform(image.size, Image.Transform.AFFINE, data, **more))


@pytest.mark.parametrize('name', SIGNED)
def test_geometry_of_the_paper(name):
  unit = {'rotate': 3, 'shear': 0.03, 'translate': 10}[name.split('_')[0]]
  for magnitude in (0, 0.2, 1, 3.7, 10, 30):
    for a, sign in ((np.nextafter(np.float32(0.5), 0), -1), (0.5, 1)):
      amount, case = sign * unit * magnitude, f'{magnitude}, {sign}'
      expected = pillows(name, amount, NOISE, Image.Resampling.NEAREST, (128,) * 3)
      where, result = decided(places(name, amount)), run(name, magnitude, NOISE, a=a)
      np.testing.assert_array_equal(result[where], expected[where], err_msg=case)
      if magnitude == 0:
        np.testing.assert_array_equal(result, NOISE, err_msg=case)


@pytest.mark.parametrize('name', SIGNED)
def test_geometry_of_timm(name):
  most = {'rotate': 30, 'shear_x': 0.3, 'shear_y': 0.3}.get(name)
  most = most or 0.45 * (W if name == 'translate_x' else H)
  smooth = Image.fromarray(NOISE[:6, :8]).resize((W, H), Image.Resampling.BICUBIC)
  smooth, mean = np.asarray(smooth), (124, 116, 104)
  between = lambda n, size: (n > -1e-4) & (n < size - 1 + 1e-4)
  for magnitude, sign in itertools.product((0, 4, 10), (1, -1)):
    amount = sign * most * magnitude / 10
    result = run_timm(name, magnitude, sign, smooth).astype(int)
    expected = pillows(name, amount, smooth, Image.Resampling.BILINEAR, mean)
    y, x = places(name, amount)
    inside = between(y, H) & between(x, W)
    assert inside.any()
    # Both are rounded.
    assert np.abs(result - expected)[inside].max() <= 1, (magnitude, sign)
    if magnitude == 10:
      assert (result == mean).all(-1).any()


def test_cutout():
  for a, b in itertools.product((0, 0.5, LAST), (0, 0.3, LAST)):
    for magnitude, half in ((0.1, 0), (1, 4), (2.6, 10), (20, 80)):
      y, x = np.mgrid[:H, :W] - np.floor([[[a * H]], [[b * W]]])
      hole = (y >= -half) & (y < half) & (x >= -half) & (x < half)
      result = run('cutout', magnitude, NOISE, a, b)
      expected = np.where(hole[..., None], 128, NOISE)
      np.testing.assert_array_equal(result, expected, err_msg=f'{a}, {b}, {magnitude}')


# --- legacy: as big_vision computes it ---------------------------------------------


def blended(target, image, factor=2.8):
  """Blends as at magnitude 15."""
  target = np.asarray(target, np.float32)
  out = target + np.float32(factor) * (image.astype(np.float32) - target)
  return np.clip(out, 0, 255).astype(np.uint8)


def smoothed(image):
  x = image.astype(int)
  around = sum(x[i : H - 2 + i, j : W - 2 + j] for i in range(3) for j in range(3))
  out = x.copy()
  out[1:-1, 1:-1] = (around + 4 * x[1:-1, 1:-1]) // 13
  return out


def stretched(image):
  low, high = (f((0, 1)).astype(np.float32) for f in (image.min, image.max))
  scale = np.float32(255) / np.maximum(high - low, 1)
  out = np.clip(image * scale + -low * scale, 0, 255).astype(np.uint8)
  return np.where(high > low, out, image)


def test_legacy_colours():
  for kind, image in IMAGES.items():
    theirs = tf.image.rgb_to_grayscale(image).numpy()
    ours = color.grey_of_tf(tf.constant(image)).numpy()[..., None]
    # Theirs multiplies in float32: one level off where the exact value is nearly whole.
    assert np.abs(ours - theirs.astype(int)).max() <= 1, kind
    assert (ours != theirs).mean() < 1e-2, kind
    for name, expected in {
      'color': blended(ours, image),
      'sharpness': blended(smoothed(image), image),
      'autocontrast': stretched(image),
      'solarize': np.where(image < 128, image, 255 - image),
    }.items():
      result = run(name, 15, image, legacy=True)
      np.testing.assert_array_equal(result, expected, err_msg=f'{name}, {kind}')
    for magnitude in (0, 10, 20):  # the threshold is taken modulo 256
      result = run('solarize', magnitude, image, legacy=True)
      np.testing.assert_array_equal(result, 255 - image, err_msg=kind)


def test_legacy_contrast_blends_with_the_number_of_pixels():
  for shape, target in (((224, 224), 196), ((16, 40), 2), ((300, 300), 255)):
    for image in (noise(*shape, 3), noise(*shape, 3, high=9)):
      result = run('contrast', 15, image, legacy=True)
      np.testing.assert_array_equal(result, blended(target, image))


@pytest.mark.parametrize('name', ['shear_x', 'shear_y'])
def test_legacy_shears_start_from_the_first_pixels_middle(name):
  for a, sign in ((0.2, -1), (0.7, 1)):
    at = places(name, sign * 0.45, middle=0)
    y, x = np.rint(at).astype(int)
    inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
    expected = np.where(inside[..., None], NOISE[y % H, x % W], 128)
    result, where = run(name, 15, NOISE, a=a, legacy=True), decided(at)
    np.testing.assert_array_equal(result[where], expected[where], err_msg=f'{sign}')
    first = np.s_[0] if name == 'shear_x' else np.s_[:, 0]
    np.testing.assert_array_equal(result[first], NOISE[first], err_msg=f'{sign}')


# --- which op, how strong, and all together ----------------------------------------


@pytest.mark.parametrize('legacy', [False, True])
def test_each_op_has_a_sixteenth_of_the_numbers(legacy):
  results = set()
  for k in range(16):
    # Numbers are multiples of 2**-24: first, middle and last of a sixteenth. At
    # magnitude 1 no two ops agree.
    outs = {
      step(paper(1, 1, legacy), [u, 0.3, 0.6], IMAGES['gradients']).tobytes()
      for u in (k / 16, (k + 0.5) / 16, (k + 1) / 16 - 2**-24)
    }
    assert len(outs) == 1
    results |= outs
  assert len(results) == 16


def test_ops_follow_one_another():
  assert paper(12, 3).draws == 9
  for row in np.random.default_rng(1).random((20, 9), np.float32):
    expected = NOISE
    for u in np.split(row, 3):
      expected = step(paper(12), u, expected)
    result = paper(12, 3).apply(tf.constant(NOISE), row)
    np.testing.assert_array_equal(result, expected)


def test_magnitudes_of_timm_are_normal_and_clipped():
  def level(u, std, magnitude=9):
    op = randaugment.IncreasingRandAugment(2, magnitude, std)
    return op.level(tf.constant(u, tf.float32)).numpy() * 10

  u = ((np.arange(20_000) + 0.5) / 20_000).astype(np.float32)
  result, expected = level(u, 0.5), np.clip(stats.norm(9, 0.5).ppf(u), 0, 10)
  np.testing.assert_allclose(result, expected, atol=1e-6)
  assert (level([0.0], 0.5), level([0.3], 0.0)) == (0, 9)
  assert level(u, 50.0, 0).max() == 10


def test_each_op_of_timm_has_its_share_and_the_rest_do_nothing():
  op = timm(9, 2, 0.0, 0.5)
  u = (np.arange(3000) + 0.5) / 3000
  index = np.asarray(op.apply._index(tf.constant(u, tf.float32)))
  np.testing.assert_array_equal(np.bincount(index), [100] * 15 + [1500])
  nothing = [0.5, 0, 0.5, 1 - 2**-24, 0, 0.5]
  np.testing.assert_array_equal(step(op, nothing, NOISE), NOISE)
  invert = [2.5 / 30, 0, 0.5]
  np.testing.assert_array_equal(step(op, invert * 2, NOISE), NOISE)
  np.testing.assert_array_equal(step(op, invert + nothing[:3], NOISE), 255 - NOISE)


@pytest.mark.parametrize('op', [paper(15, 2), paper(15, 2, True), timm(9, 2, 0.5, 0.5)])
def test_an_image_is_the_same_alone_in_any_batch_and_of_unknown_size(op):
  images = noise(40, 20, 23, 3)
  u = np.random.default_rng(2).random((40, 6), np.float32)
  share = 16 if op.name == 'randaug' else 30
  u[:16, 0] = (np.arange(16) + 0.5) / share  # each op
  specs = [tf.TensorSpec([None, 20, 23, 3], tf.uint8), tf.TensorSpec([None, 6])]
  batch = tf.function(op.apply, specs)
  whole = batch(images, u)
  assert whole.dtype == tf.uint8
  np.testing.assert_array_equal(whole[5:], batch(images[5:], u[5:]))
  specs = [tf.TensorSpec([None, None, 3], tf.uint8), tf.TensorSpec([6], tf.float32)]
  unknown = tf.function(op.apply, specs)
  for i in range(40):
    image = tf.constant(images[i])
    np.testing.assert_array_equal(whole[i], op.apply(image, tf.constant(u[i])))
    np.testing.assert_array_equal(whole[i], unknown(image, u[i]))
  assert op.apply(tf.constant(images[:0]), tf.constant(u[:0])).shape == (0, 20, 23, 3)
