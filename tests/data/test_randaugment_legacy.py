"""RandAugment as big_vision computes it, `legacy=True`: against closed forms."""

import itertools

import numpy as np
import pytest

from tests.data.test_randaugment import IMAGES, H, W, coordinates, decided, noise, run
from vit_jax.data import lazy_tf
from vit_jax.data.ops import color

tf = lazy_tf.load()


def blended(target, image, factor):
  target = np.asarray(target, np.float32)
  out = target + np.float32(factor) * (image.astype(np.float32) - target)
  return np.clip(out, 0, 255).astype(np.uint8)


def test_faithful_solarize_takes_the_threshold_modulo_256():
  for magnitude, threshold in {0: 0, 5: 128, 10: 0, 15: 128, 20: 0}.items():
    for kind, image in IMAGES.items():
      case = f'{kind}, {magnitude}'
      got = run('solarize', magnitude, image, legacy=True)
      want = np.where(image < threshold, image, 255 - image)
      np.testing.assert_array_equal(got, want, err_msg=case)
      if magnitude % 10 == 0:
        inverted = run('invert', magnitude, image, legacy=True)
        np.testing.assert_array_equal(got, inverted, err_msg=case)
      elif magnitude > 10:
        plain = run('solarize', magnitude, image)
        np.testing.assert_array_equal(plain, image, err_msg=case)


def test_faithful_contrast_blends_with_the_number_of_pixels():
  for shape, target in (((224, 224), 196), ((16, 40), 2), ((300, 300), 255)):
    for image in (noise(*shape, 3), noise(*shape, 3, high=9)):
      got, want = run('contrast', 15, image, legacy=True), blended(target, image, 2.8)
      np.testing.assert_array_equal(got, want, err_msg=f'{shape}')


def test_faithful_posterize_keeps_at_least_a_bit():
  image = IMAGES['noise']
  for magnitude, bits in {0: 1, 2: 1, 3: 1, 10: 4, 15: 6, 20: 8, 30: 8}.items():
    step = 2 ** (8 - bits)
    got = run('posterize', magnitude, image, legacy=True)
    np.testing.assert_array_equal(got, image // step * step, err_msg=f'{magnitude}')


def test_faithful_sharpness_truncates_the_smoothed_levels():
  for kind, image in IMAGES.items():
    x = image.astype(int)
    around = sum(x[i : H - 2 + i, j : W - 2 + j] for i in range(3) for j in range(3))
    smooth = x.copy()
    smooth[1:-1, 1:-1] = (around + 4 * x[1:-1, 1:-1]) // 13
    got = run('sharpness', 15, image, legacy=True)
    np.testing.assert_array_equal(got, blended(smooth, image, 2.8), err_msg=kind)


def test_faithful_color_blends_with_the_grey_of_tensorflow():
  for kind, image in IMAGES.items():
    theirs = tf.image.rgb_to_grayscale(image).numpy()
    ours = color.grey_of_tf(tf.constant(image)).numpy()[..., None]
    # Theirs multiplies in float32: one level off where the exact value is nearly whole.
    assert np.abs(ours - theirs.astype(int)).max() <= 1, kind
    assert (ours != theirs).mean() < 1e-2, kind
    got = run('color', 15, image, legacy=True)
    np.testing.assert_array_equal(got, blended(ours, image, 2.8), err_msg=kind)


def test_faithful_autocontrast_is_in_float32():
  for kind, image in IMAGES.items():
    low, high = (f((0, 1)).astype(np.float32) for f in (image.min, image.max))
    scale = np.float32(255) / np.maximum(high - low, 1)
    want = np.clip(image * scale + -low * scale, 0, 255).astype(np.uint8)
    want = np.where(high > low, want, image)
    got = run('autocontrast', 15, image, legacy=True)
    np.testing.assert_array_equal(got, want, err_msg=kind)


@pytest.mark.parametrize('name', ['shear_x', 'shear_y'])
def test_faithful_shears_start_from_the_first_pixels_middle(name):
  image = IMAGES['noise']
  for a, sign in ((0.2, -1), (0.7, 1)):
    places = coordinates(name, 15, sign, legacy=True)
    y, x = np.rint(places).astype(int)
    inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
    want = np.where(inside[..., None], image[y % H, x % W], 128)
    got, where = run(name, 15, image, a=a, legacy=True), decided(places)
    np.testing.assert_array_equal(got[where], want[where], err_msg=f'{sign}')
    first = np.s_[0] if name == 'shear_x' else np.s_[:, 0]
    np.testing.assert_array_equal(got[first], image[first], err_msg=f'{sign}')


def test_other_ops_are_the_same_for_both():
  same = {'equalize', 'invert', 'rotate', 'translate_x', 'translate_y', 'cutout'}
  same |= {'posterize', 'brightness', 'solarize_add'}
  for name, magnitude in itertools.product(sorted(same), (0, 10, 15)):
    both = [run(name, magnitude, IMAGES['dull'], legacy=x) for x in (False, True)]
    np.testing.assert_array_equal(*both, err_msg=f'{name}, {magnitude}')
