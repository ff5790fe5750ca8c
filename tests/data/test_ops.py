"""Ops on images, against NumPy, Pillow and closed forms."""

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from vit_jax.data import lazy_tf
from vit_jax.data.ops import augment, registry

tf = lazy_tf.load()


def noise(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def run(text, images, u=()):
  """Applies the ops of `text` to images with numbers u, as NumPy."""
  u = tf.constant(np.asarray(u, np.float32))
  return run_graph(text, tf.constant(images), u).numpy()


def run_graph(text, images, u):
  """As `run`, of tensors: also within a `tf.function`."""
  start = 0
  for op in registry.parse(text):
    images = op({'image': images}, u[..., start : start + op.draws])['image']
    start += op.draws
  return images


def test_crops():
  image = noise(9, 12, 3)
  np.testing.assert_array_equal(run('central_crop((4, 5))', image), image[2:6, 3:8])
  np.testing.assert_array_equal(
    run('random_crop((4, 5))', image, [0, 0]), image[:4, :5]
  )
  last = np.nextafter(np.float32(1), 0)
  got = run('random_crop((4, 5))', image, [last, last])
  np.testing.assert_array_equal(got, image[-4:, -5:])
  # Six possible rows: each gets a sixth of the numbers.
  got = run('random_crop((4, 5))', image, [2.5 / 6, 0])
  np.testing.assert_array_equal(got, image[2:6, :5])
  got = run('random_crop(9, padding=2)', image[:, :9], [0, 0])
  np.testing.assert_array_equal(got[2:, 2:], image[:7, :7])
  assert not got[:2].any()


def test_trim():
  image = noise(9, 12, 3)
  np.testing.assert_array_equal(run('trim(2)', image), image[2:-2, 2:-2])
  (op,) = registry.parse('trim(2)')
  np.testing.assert_array_equal(op.apply.numpy(image), image[2:-2, 2:-2])
  with pytest.raises(ValueError, match=naming('trim', '10')):
    run('trim(5)', image)
  with pytest.raises(ValueError, match=naming('pixels', '0')):
    registry.parse('trim(0)')
  # Before the size is known, as of a decoded file.
  spec = tf.TensorSpec([None, None, 3], tf.uint8)
  graph = tf.function(lambda x: run_graph('trim(3)|resize(4)', x, tf.zeros(0)), [spec])
  assert graph(image).shape == (4, 4, 3)
  with pytest.raises(tf.errors.InvalidArgumentError, match=naming('trim', '6')):
    graph(image[:6])


def test_inception_crop_distribution():
  crop = registry.parse('inception_crop(8)')[0].apply
  u = np.random.default_rng(0).random((400, 2), np.float32)
  boxes = np.array([[int(n) for n in crop.box(100, 150, tf.constant(v))] for v in u])
  y, x, h, w = boxes.T
  assert min(y.min(), x.min()) >= 0
  assert (y + h).max() <= 100
  assert (x + w).max() <= 150
  area = h * w / 15_000
  # Whole pixels: a side of about 25 at the smallest, so 4 % of area and of ratio.
  assert area.min() > 0.05 * 0.95
  assert area.min() < 0.1  # and the range is used
  assert area.max() > 0.6
  assert (w / h).min() > 0.75 * 0.95
  assert (w / h).max() < 1.33 * 1.05
  whole = registry.parse('inception_crop(8, area_min=100, ratio=(1.5, 1.5))')[0].apply
  assert [int(n) for n in whole.box(100, 150, tf.constant(u[0]))] == [0, 0, 100, 150]


def test_inception_crop_is_a_crop_then_a_resize():
  image, u = noise(40, 50, 3), np.array([0.3, 0.8], np.float32)
  crop = registry.parse('inception_crop(8)')[0].apply
  y, x, h, w = (int(n) for n in crop.box(40, 50, tf.constant(u)))
  np.testing.assert_array_equal(
    run('inception_crop(8)', image, u), run('resize(8)', image[y : y + h, x : x + w])
  )


def test_flip_lr():
  images = noise(2, 4, 5, 3)
  got = run('flip_lr', images, [[0.49], [0.5]])
  np.testing.assert_array_equal(got, [images[0, :, ::-1], images[1]])


def test_value_range():
  image = np.array([[[0, 51, 255]]], np.uint8)
  np.testing.assert_allclose(run('value_range(-1, 1)', image)[0, 0], [-1, -0.6, 1])
  np.testing.assert_allclose(
    run('value_range(0, 1, 51, 255, clip=True)', image)[0, 0], [0, 0, 1]
  )
  np.testing.assert_allclose(run('value_range(0, 1, 51, 255)', image)[0, 0, 0], -0.25)


def test_decode_gives_arrays_their_channels():
  gray = noise(4, 5, 1)
  np.testing.assert_array_equal(run('decode', gray), np.repeat(gray, 3, -1))
  rgb = noise(4, 5, 3)
  np.testing.assert_array_equal(run('decode', rgb), rgb)
  luma = (rgb @ [0.2989, 0.587, 0.114])[..., None]  # ITU-R BT.601
  # TensorFlow truncates to uint8.
  assert np.abs(run('decode(1)', rgb) - luma).max() <= 1


def test_onehot():
  form = registry.parse('onehot')[0].apply(3)
  rows = form([2, [0, 1], [], None], [None] * 4)
  np.testing.assert_array_equal(rows, [[0, 0, 1], [1, 1, 0], [0, 0, 0], [0, 0, 0]])
  form = registry.parse('onehot(4, on=0.9, off=0.1)')[0].apply(3)
  np.testing.assert_allclose(form([1], [None]), [[0.1, 0.9, 0.1, 0.1]])
  np.testing.assert_allclose(
    form([[1, 3]], [np.array([1, 0.5])]), [[0.1, 0.9, 0.1, 0.5]]
  )


def test_random_affine_quarter_turn_and_shift():
  image = noise(6, 6, 2)
  middle = [0.5, 0.5, 0.5]
  turned = run('random_affine(degrees=90)', image, [1, *middle])
  # Exact but for sin and cos of float32 angles: 1e-6 of a pixel of 255 levels.
  np.testing.assert_array_equal(turned, np.rot90(image))  # counter-clockwise as seen
  np.testing.assert_array_equal(
    run('random_affine(degrees=90)', image, [0, *middle]), np.rot90(image, -1)
  )
  down = run('random_affine(translate=0.5, fill=9)', image, [0.5, 0.5, 5 / 6, 0.5])
  np.testing.assert_array_equal(down[2:], image[:-2])
  assert (down[:2] == 9).all()
  right = run('random_affine(translate=0.5)', image, [0.5, 0.5, 0.5, 5 / 6])
  np.testing.assert_array_equal(right[:, 2:], image[:, :-2])


def test_random_affine_agrees_with_pillow():
  image = noise(15, 17, 1)
  u = [0.85, 0.3, 0.4, 0.7]
  got = run('random_affine(degrees=30, translate=0.2, scale=(0.8, 1.5))', image, u)
  angle, zoom = np.radians(30) * 0.7, 0.8 + 0.3 * 0.7
  ty, tx = -0.2 * 0.2 * 15, 0.4 * 0.2 * 17
  # Pillow's pixel centres are at +0.5, so its centre is (8.5, 7.5).
  c, s = np.cos(angle) / zoom, np.sin(angle) / zoom
  cx, cy, dx, dy = 8.5, 7.5, 8.5 + tx, 7.5 + ty
  # Image rows grow downwards: counter-clockwise as seen maps (x, y) out to
  # (c x - s y, s x + c y) in.
  data = (c, -s, cx - c * dx + s * dy, s, c, cy - s * dx - c * dy)
  want = Image.fromarray(image[..., 0]).transform(
    (17, 15), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR
  )
  # Inside, the same interpolation up to Pillow's truncation; the two treat the
  # last half pixel at the border differently.
  mask = Image.fromarray(np.full((15, 17), 255, np.uint8))
  inside = np.asarray(
    mask.transform((17, 15), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)
  )
  core = np.zeros((15, 17), bool)
  core[2:-2, 2:-2] = True
  core &= (
    run(
      'random_affine(degrees=30, translate=0.2, scale=(0.8, 1.5))',
      np.full((15, 17, 1), 255, np.uint8),
      u,
    )[..., 0]
    == 255
  )
  core &= inside == 255
  assert core.sum() > 80
  assert np.abs(got[..., 0].astype(int) - np.asarray(want))[core].max() <= 1


def test_random_erasing():
  image = np.full((40, 60, 3), 9, np.float32)
  np.testing.assert_array_equal(
    run('random_erasing(0.25)', image, [0.25, 0, 0, 0, 0]), image
  )
  # The smallest: 2 % of the pixels, 0.3 times as high as wide, at the top left.
  erased = run('random_erasing(0.25)', image, [0.24, 0, 0, 0, 0]) != 9
  h, w = round((0.02 * 2400 * 0.3) ** 0.5), round((0.02 * 2400 / 0.3) ** 0.5)
  assert erased[:h, :w].all()
  assert erased.sum() == h * w * 3
  # The largest, a third of them, as high as wide, at the bottom right.
  last = np.nextafter(np.float32(1), 0)
  out = run('random_erasing(1.0)', image, [0, last, 0.5, last, last])
  side = round(800**0.5)
  assert (out[-side:, -side:] != 9).all()
  assert (out != 9).sum() == side**2 * 3
  noise = out[-side:, -side:]
  assert abs(noise.mean()) < 0.04  # 0.45 / sqrt(2352) is 0.009
  assert noise.std() == pytest.approx(0.45, rel=0.07)  # 1 / sqrt(2 * 2352) is 0.015


@pytest.mark.parametrize(
  'text',
  [
    'random_affine(degrees=25, translate=0.2, scale=(0.7, 1.3))',
    'random_crop(8, padding=2)',
    'flip_lr',
    'inception_crop(6)',
    'resize(13, "bicubic")|central_crop(9)',
    'resize_small(5)',
    'decode|resize(11, antialias=True)',
    'value_range(-1, 1)|random_erasing(0.7)',
  ],
)
def test_an_image_is_the_same_alone_and_in_any_batch(text):
  images = noise(23, 8, 8, 1)
  u = np.random.default_rng(1).random((23, 5), np.float32)
  graph = tf.function(lambda x, u: run_graph(text, x, u))
  whole = graph(images, u).numpy()
  assert whole.dtype == (np.float32 if 'value_range' in text else np.uint8)
  halves = np.concatenate([graph(images[:9], u[:9]), graph(images[9:], u[9:])])
  alone = np.stack([run(text, x, v) for x, v in zip(images, u, strict=True)])
  np.testing.assert_array_equal(whole, halves)
  np.testing.assert_array_equal(whole, alone)


def test_sine_and_cosine():
  angle = np.linspace(-np.pi, np.pi, 1001, dtype=np.float32)
  sine, cosine = augment._sin_cos(tf.constant(angle))
  # Series to x**21 in float32: rounding of terms up to 5 (x**3/6 at pi), 2**-22.
  np.testing.assert_allclose(sine, np.sin(angle.astype(float)), atol=2e-6)
  np.testing.assert_allclose(cosine, np.cos(angle.astype(float)), atol=2e-6)
