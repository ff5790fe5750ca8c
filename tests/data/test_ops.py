"""Ops on images against NumPy, Pillow, TensorFlow and closed forms; the text of pipelines."""

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from tests.support.run_ops import run, run_graph
from vit_jax.data import lazy_tf
from vit_jax.data.ops import augment, registry
from vit_jax.errors import UserError

tf = lazy_tf.load()
LAST = np.nextafter(np.float32(1), 0)  # the largest number drawn


def noise(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


# --- crops -------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'u', 'rows', 'columns'),
  [
    ('central_crop((4, 5))', [], (2, 6), (3, 8)),
    ('central_crop((4, 5), half="even")', [], (2, 6), (4, 9)),
    ('random_crop((4, 5))', [0, 0], (0, 4), (0, 5)),
    ('random_crop((4, 5))', [LAST, LAST], (5, 9), (7, 12)),
    # Six possible rows: each gets a sixth of the numbers.
    ('random_crop((4, 5))', [2.5 / 6, 0], (2, 6), (0, 5)),
    ('trim(2)', [], (2, 7), (2, 10)),
  ],
)
def test_crops(text, u, rows, columns):
  image = noise(9, 12, 3)
  expected = image[slice(*rows), slice(*columns)]
  np.testing.assert_array_equal(run(text, image, u), expected)
  (op,) = registry.parse(text)
  if op.numpy:
    np.testing.assert_array_equal(op.numpy(image), expected)


def test_a_crop_of_a_padded_image():
  image = noise(9, 9, 3)
  result = run('random_crop(9, padding=2)', image, [0, 0])
  np.testing.assert_array_equal(result[2:, 2:], image[:7, :7])
  assert not result[:2].any()


def test_trim_of_small_images():
  with pytest.raises(ValueError, match=naming('trim', '10')):
    run('trim(5)', noise(9, 12, 3))
  # Before the size is known, as of a decoded file.
  spec = tf.TensorSpec([None, None, 3], tf.uint8)
  graph = tf.function(lambda x: run_graph('trim(3)|resize(4)', x, tf.zeros(0)), [spec])
  assert graph(noise(9, 12, 3)).shape == (4, 4, 3)
  with pytest.raises(tf.errors.InvalidArgumentError, match=naming('trim', '6')):
    graph(noise(6, 12, 3))


def test_inception_crop_distribution():
  crop = registry.parse('inception_crop(8)')[0].apply
  u = np.random.default_rng(0).random((400, 2), np.float32)
  boxes = np.array([[int(n) for n in crop.box(100, 150, tf.constant(v))] for v in u])
  y, x, h, w = boxes.T
  assert min(y.min(), x.min()) >= 0
  assert (y + h).max() <= 100
  assert (x + w).max() <= 150
  # Whole pixels: a side of about 25 at the smallest, so 4 % of area and of ratio.
  area = h * w / 15_000
  assert 0.05 * 0.95 < area.min() < 0.1
  assert area.max() > 0.6
  assert (w / h).min() > 0.75 * 0.95
  assert (w / h).max() < 1.33 * 1.05
  whole = registry.parse('inception_crop(8, area_min=100, ratio=(1.5, 1.5))')[0].apply
  assert [int(n) for n in whole.box(100, 150, tf.constant(u[0]))] == [0, 0, 100, 150]
  # It is a crop, then a resize.
  image = noise(40, 50, 3)
  y, x, h, w = (int(n) for n in crop.box(40, 50, tf.constant(u[1])))
  expected = run('resize(8)', image[y : y + h, x : x + w])
  np.testing.assert_array_equal(run('inception_crop(8)', image, u[1]), expected)


# --- resizing ----------------------------------------------------------------------


@pytest.mark.parametrize(
  ('size', 'antialias'), [((20, 31), False), ((20, 31), True), ((5, 7), True)]
)
@pytest.mark.parametrize('method', ['bilinear', 'bicubic'])
def test_resize_agrees_with_pillow(method, size, antialias):
  # Pillow's filters are the same kernels (its bicubic has a = -0.5, as TensorFlow's), and
  # widened where the image shrinks. It rounds, and clips, between its two passes: hence one
  # level, and low contrast, where bicubic does not overshoot.
  image = 96 + noise(16, 21, 3) // 4
  result = run(f'resize({size}, "{method}", {antialias}, "nearest")', image)
  resample = getattr(Image.Resampling, method.upper())
  expected = np.asarray(Image.fromarray(image).resize(size[::-1], resample))
  assert result.dtype == np.uint8
  assert np.abs(result.astype(int) - expected).max() <= 1


def test_resize_down_in_closed_form():
  # Without antialias it samples points. By 4, half-pixel centres lie between the 2nd and
  # 3rd of each 4 pixels.
  image = noise(8, 12, 1).astype(np.float32)
  expected = (
    image[1::4, 1::4] + image[1::4, 2::4] + image[2::4, 1::4] + image[2::4, 2::4]
  )
  # Float32 sums of four values below 256, in another order: 2 units of 2**-16.
  np.testing.assert_allclose(run('resize((2, 3))', image), expected / 4, atol=4e-5)
  image = noise(12, 8, 3)
  result = run('resize((3, 4), "area", rounding="none")', image)
  expected = image.reshape(3, 4, 4, 2, 3).astype(float).mean((1, 3))
  np.testing.assert_allclose(result, expected, rtol=1e-6)  # float32 sums of 8


# Nine numbers: converted a whole register at a time, they may be clipped by the processor.
@pytest.mark.parametrize('size', [16, (1, 9)])
def test_bicubic_is_clipped_not_wrapped(size):
  image = np.zeros((4, 4, 1), np.uint8)
  image[1:3, 1:3] = 255
  image = image if size == 16 else image[1:2]
  how = f'resize({size}, "bicubic"'
  exact = run(f'{how})', image.astype(np.float32))
  assert exact.min() < -0.5
  assert exact.max() > 255.5
  for rounding, expected in {
    'truncate': np.clip(exact, 0, 255).astype(np.uint8),
    'nearest': np.clip(np.round(exact), 0, 255),
    'none': exact,
  }.items():
    result = run(f'{how}, rounding="{rounding}")', image)
    np.testing.assert_array_equal(result, expected)


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
  expected = tf.image.resize(image, size, method, antialias=antialias)
  expected = tf.cast(tf.clip_by_value(expected, 0, 255), tf.uint8)
  np.testing.assert_array_equal(run(pp, image, [0.5, 0.5]), expected)


SHAPES = [(427, 640), (640, 427), (400, 600), (300, 400), (400, 300), (9, 9)]


@pytest.mark.parametrize('shape', SHAPES)
def test_resize_small_rounds_the_longer_side_as_the_library_does(shape):
  for more, rounded in (('', round), (", rounding='nearest'", int)):
    size = tuple(rounded(256 * n / min(shape)) for n in shape)
    pp, image = f'resize_small(256{more})', noise(*shape, 3)
    assert run(pp, image).shape == (*size, 3)
    assert registry.parse(pp)[0].numpy(image).shape == (*size, 3)


# --- values ------------------------------------------------------------------------


def test_value_range():
  image = np.array([[[0, 51, 255]]], np.uint8)
  for text, expected in {
    'value_range(-1, 1)': [-1, -0.6, 1],
    'value_range(0, 1, 51, 255, clip=True)': [0, 0, 1],
    'value_range(0, 1, 51, 255)': [-0.25, 0, 1],
  }.items():
    np.testing.assert_allclose(run(text, image)[0, 0], expected)


def test_decode_gives_arrays_their_channels():
  gray, rgb = noise(4, 5, 1), noise(4, 5, 3)
  np.testing.assert_array_equal(run('decode', gray), np.repeat(gray, 3, -1))
  np.testing.assert_array_equal(run('decode', rgb), rgb)


# --- random ops --------------------------------------------------------------------


def test_flip_lr():
  images = noise(2, 4, 5, 3)
  result = run('flip_lr', images, [[0.49], [0.5]])
  np.testing.assert_array_equal(result, [images[0, :, ::-1], images[1]])


def test_random_affine_quarter_turns_and_shifts():
  image, middle = noise(6, 6, 2), [0.5, 0.5, 0.5]
  # Exact but for sin and cos of float32 angles: 1e-6 of a pixel of 255 levels.
  for u, times in ((1, 1), (0, -1)):  # counter-clockwise on screen
    result = run('random_affine(degrees=90)', image, [u, *middle])
    np.testing.assert_array_equal(result, np.rot90(image, times))
  down = run('random_affine(translate=0.5, fill=9)', image, [0.5, 0.5, 5 / 6, 0.5])
  np.testing.assert_array_equal(down[2:], image[:-2])
  assert (down[:2] == 9).all()
  right = run('random_affine(translate=0.5)', image, [0.5, 0.5, 0.5, 5 / 6])
  np.testing.assert_array_equal(right[:, 2:], image[:, :-2])


def test_random_affine_agrees_with_pillow():
  text = 'random_affine(degrees=30, translate=0.2, scale=(0.8, 1.5))'
  u = [0.85, 0.3, 0.4, 0.7]
  angle, zoom = np.radians(30) * 0.7, 0.8 + 0.3 * 0.7
  ty, tx = -0.2 * 0.2 * 15, 0.4 * 0.2 * 17
  # Pillow's pixel centres are at +0.5, so its centre is (8.5, 7.5). Image rows grow
  # downwards: counter-clockwise on screen maps (x, y) out to (c x - s y, s x + c y) in.
  c, s = np.cos(angle) / zoom, np.sin(angle) / zoom
  cx, cy, dx, dy = 8.5, 7.5, 8.5 + tx, 7.5 + ty
  data = (c, -s, cx - c * dx + s * dy, s, c, cy - s * dx - c * dy)

  def pillow(image):
    how = Image.Transform.AFFINE, data, Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(image[..., 0]).transform((17, 15), *how))

  image, white = noise(15, 17, 1), np.full((15, 17, 1), 255, np.uint8)
  # Inside, the same interpolation up to Pillow's truncation; the two treat the last half
  # pixel at the border differently.
  core = (run(text, white, u)[..., 0] == 255) & (pillow(white) == 255)
  core[[0, 1, -2, -1]] = core[:, [0, 1, -2, -1]] = False
  assert core.sum() > 80
  result = run(text, image, u)[..., 0].astype(int)
  assert np.abs(result - pillow(image))[core].max() <= 1


def test_sine_and_cosine():
  angle = np.linspace(-np.pi, np.pi, 1001, dtype=np.float32)
  sine, cosine = augment._sin_cos(tf.constant(angle))
  # Series to x**21 in float32: rounding of terms up to 5 (x**3/6 at pi), 2**-22.
  np.testing.assert_allclose(sine, np.sin(angle.astype(float)), atol=2e-6)
  np.testing.assert_allclose(cosine, np.cos(angle.astype(float)), atol=2e-6)


def test_random_erasing():
  image = np.full((40, 60, 3), 9, np.float32)
  intact = run('random_erasing(0.25)', image, [0.25, 0, 0, 0, 0])
  np.testing.assert_array_equal(intact, image)
  # The smallest: 2 % of the pixels, 0.3 times as high as wide, at the top left.
  erased = run('random_erasing(0.25)', image, [0.24, 0, 0, 0, 0]) != 9
  h, w = round((0.02 * 2400 * 0.3) ** 0.5), round((0.02 * 2400 / 0.3) ** 0.5)
  assert erased[:h, :w].all()
  assert erased.sum() == h * w * 3
  # The largest, a third of them, as high as wide, at the bottom right.
  out = run('random_erasing(1.0)', image, [0, LAST, 0.5, LAST, LAST])
  side = round(800**0.5)
  assert (out[-side:, -side:] != 9).all()
  assert (out != 9).sum() == side**2 * 3
  normal = out[-side:, -side:]
  assert abs(normal.mean()) < 0.04  # 0.45 / sqrt(2352) is 0.009
  assert normal.std() == pytest.approx(0.45, rel=0.07)  # 1 / sqrt(2 * 2352) is 0.015


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


# --- the text of a pipeline --------------------------------------------------------


def test_parse():
  parsed = registry.parse(
    ' decode(1) | resize((8, 4), method="bicubic")|flip_lr |value_range(-1,1) '
  )
  assert [op.name for op in parsed] == ['decode', 'resize', 'flip_lr', 'value_range']
  assert [op.draws for op in parsed] == [0, 0, 1, 0]
  assert registry.parse('') == ()
  # Bars inside quotes and brackets separate nothing.
  pieces = registry._pieces("a(\"x|y\")|b([1|2])|c('\\'|')")
  assert list(pieces) == ['a("x|y")', 'b([1|2])', "c('\\'|')"]


@pytest.mark.parametrize(
  ('pp', 'facts'),
  [
    ('decode|reszie(8)', ("'reszie'", 'resize')),
    ('resize(8, methd="area")', ("'methd'", 'resize(size', 'method')),
    ('resize', ("'size'", 'resize(size')),
    ('resize(8, 9, 10, 11, 12)', ('resize(8, 9, 10, 11, 12)', 'resize(size')),
    ('resize_small(8, rounding="nearset")', ("rounding 'nearset'", 'nearest')),
    ('resize(-8)', ('size=-8', '[1, 8000]')),
    ('resize((8, 8, 8))', ('size=(8, 8, 8)', 'resize(size')),
    ('decode(4)', ('channels 4', '[1, 3]')),
    ('inception_crop(8, area_min=0)', ('area_min=0', '(0, 100]')),
    ('inception_crop(8, ratio=(2, 1))', ('ratio=(2, 1)', '(low, high)')),
    ('random_affine(scale=0.5)', ('scale=0.5', 'scale=(1, 1)')),
    ('value_range(1, -1)', ('value_range(1, -1)', 'lo < hi')),
    ('value_range(x, 1)', ("'value_range(x, 1)'",)),
    ('resize(__import__("os"))', ('\'resize(__import__("os"))\'',)),
    ('a.b(1)', ("'a.b(1)'",)),
    ('resize(8', ("'resize(8'",)),
    ('decode||flip_lr', ("'decode||flip_lr'",)),
    ('pad_to(boxes=0)', ('boxes=0',)),
    (7, ('data.pp', 7)),
  ],
)
def test_wrong_pipelines(pp, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    registry.parse(pp)
