"""Resizing: against Pillow, closed forms, and the levels of other libraries."""

import numpy as np
import pytest
from PIL import Image

from tests.data.test_ops import noise, run
from vit_jax.data import lazy_tf

tf = lazy_tf.load()


@pytest.mark.parametrize('antialias', [False, True])
@pytest.mark.parametrize('method', ['bilinear', 'bicubic'])
def test_resize_up_agrees_with_pillow(method, antialias):
  # Up, antialias changes nothing, and Pillow's filters are the same kernels (its
  # bicubic has a = -0.5, as TensorFlow's). Pillow rounds, and clips, between its two
  # passes: hence one grey level, and low contrast, where bicubic does not overshoot.
  image = 96 + noise(7, 9, 3) // 4
  how = f'"{method}", antialias={antialias}, rounding="nearest"'
  got = run(f'resize((20, 31), {how})', image)
  want = np.asarray(
    Image.fromarray(image).resize((31, 20), getattr(Image.Resampling, method.upper()))
  )
  assert got.dtype == np.uint8
  assert np.abs(got.astype(int) - want).max() <= 1


def test_resize_down_with_antialias_agrees_with_pillow():
  image = 96 + noise(40, 50, 3) // 4
  for method in ('bilinear', 'bicubic'):
    got = run(f'resize((13, 17), "{method}", True, "nearest")', image)
    want = np.asarray(
      Image.fromarray(image).resize((17, 13), getattr(Image.Resampling, method.upper()))
    )
    # As above: Pillow rounds between its two passes.
    assert np.abs(got.astype(int) - want).max() <= 1


def test_resize_down_without_antialias_is_point_sampling():
  # By 4, half-pixel centres lie between the 2nd and 3rd of each 4 pixels.
  image = noise(8, 12, 1).astype(np.float32)
  got = run('resize((2, 3))', image)
  want = (
    image[1::4, 1::4] + image[1::4, 2::4] + image[2::4, 1::4] + image[2::4, 2::4]
  ) / 4
  # Float32 sums of four values below 256, in another order: 2 units of 2**-16.
  np.testing.assert_allclose(got, want, atol=4e-5)


def test_resize_area_is_the_block_mean():
  image = noise(12, 8, 3)
  got = run('resize((3, 4), "area", rounding="none")', image)
  want = image.reshape(3, 4, 4, 2, 3).astype(float).mean((1, 3))
  np.testing.assert_allclose(got, want, rtol=1e-6)  # float32 sums of 8


# Nine numbers: converted a whole register at a time, they may be clipped by the processor.
@pytest.mark.parametrize('size', [16, (1, 9)])
def test_bicubic_is_clipped_not_wrapped(size):
  image = np.zeros((4, 4, 1), np.uint8)
  image[1:3, 1:3] = 255
  image = image if size == 16 else image[1:2]
  how = f'resize({size}, "bicubic"'
  want = run(f'{how})', image.astype(np.float32))
  assert want.min() < -0.5
  assert want.max() > 255.5
  np.testing.assert_array_equal(
    run(f'{how})', image), np.clip(want, 0, 255).astype(np.uint8)
  )
  np.testing.assert_array_equal(
    run(f'{how}, rounding="nearest")', image),
    np.clip(np.round(want), 0, 255),
  )
  np.testing.assert_array_equal(run(f'{how}, rounding="none")', image), want)


@pytest.mark.parametrize('antialias', [False, True])
@pytest.mark.parametrize('method', ['bilinear', 'area', 'nearest'])
def test_other_methods_stay_within_the_levels(method, antialias):
  # So they are not clipped: of black and white alone, the largest sums of weights.
  image = np.where(noise(23, 31, 3) < 128, 0, 255).astype(np.uint8)
  image[:12] = 255
  for size in ((7, 5), (11, 64), (40, 13), (1, 1)):
    out = run(f'resize({size}, "{method}", {antialias})', image.astype(np.float32))
    assert out.min() >= 0
    assert out.max() < 255.5  # whether rounded or cut off


@pytest.mark.parametrize(
  ('pp', 'size', 'method', 'antialias'),
  [
    ('resize(23)', (23, 23), 'bilinear', False),
    ('resize(23, "bicubic", True)', (23, 23), 'bicubic', True),
    ('resize_small(16)', (21, 16), 'area', False),
    ('inception_crop(23, 100, 100, (0.75, 0.75))', (23, 23), 'bilinear', False),
  ],
)
def test_levels_are_those_of_big_vision(pp, size, method, antialias):
  # big_vision/pp/ops_image.py, `get_resize` and `_resize_factor`: a cast, which truncates.
  image = noise(40, 30, 3)
  want = tf.image.resize(image, size, method, antialias=antialias)
  want = tf.cast(tf.clip_by_value(want, 0, 255), tf.uint8)
  np.testing.assert_array_equal(run(pp, image, [0.5, 0.5]), want)


@pytest.mark.parametrize(
  ('shape', 'size'),
  [((300, 400), (256, 341)), ((400, 300), (341, 256)), ((9, 9), (256, 256))],
)
def test_resize_small_keeps_the_aspect_ratio(shape, size):
  assert run('resize_small(256)', noise(*shape, 3)).shape == (*size, 3)


def test_resize_small_is_area():
  image = noise(12, 8, 1)
  np.testing.assert_array_equal(
    run('resize_small(4)', image), run('resize((6, 4), "area")', image)
  )
