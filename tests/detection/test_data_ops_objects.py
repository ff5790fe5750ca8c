"""Ops that boxes follow: DETR's sizes and crops, canvases, crops; pixel for pixel."""

import numpy as np
import pytest

from tests.support import naming
from vit_jax.data import lazy_tf, single_image
from vit_jax.data.ops import registry
from vit_jax.errors import UserError


def run(pp, features, u=()):
  """Returns the features of one example after ops, as NumPy arrays."""
  tf = lazy_tf.load()
  features = {k: tf.constant(x) for k, x in features.items()}
  u, start = tf.constant(u, tf.float32), 0
  for op in registry.parse(pp):
    features = op(features, u[start : start + op.draws])
    start += op.draws
  return {k: x.numpy() for k, x in features.items()}


def example(height=40, width=60, n=6, seed=0):
  """An image whose objects have a colour each, filling their boxes, none over another."""
  rng = np.random.default_rng(seed)
  image = np.zeros((height, width, 3), np.uint8)
  boxes = np.zeros((n, 4))
  for i in range(n):  # a column each
    left, right = sorted(rng.integers(width // n, size=2) + i * (width // n))
    top, bottom = sorted(rng.integers(height, size=2))
    boxes[i] = top, left, bottom + 1, right + 1
    image[top : bottom + 1, left : right + 1] = 40 * (i + 1)
  sides = [height, width, height, width]
  return {
    'image': image,
    'boxes': (boxes / sides).astype(np.float32),
    'label': np.arange(n, dtype=np.int32),
  }


def assert_boxes_are_exact(out):
  """Every box is the smallest around its colour, and every colour has one."""
  image, sides = out['image'], [*out['image'].shape[:2]] * 2
  shown = np.unique(image[image > 0])
  np.testing.assert_array_equal(np.sort(out['label']), shown // 40 - 1)
  for box, label in zip(out['boxes'] * sides, out['label'], strict=True):
    rows, columns = np.nonzero(image[..., 0] == 40 * (label + 1))
    expected = rows.min(), columns.min(), rows.max() + 1, columns.max() + 1
    np.testing.assert_allclose(box, expected, atol=1e-4)


@pytest.mark.parametrize('resize', ['detr_resize(32, 48)', 'fit((48, 50))'])
@pytest.mark.parametrize(('height', 'width'), [(40, 60), (33, 33), (7, 90), (101, 64)])
def test_prediction_sees_the_same_pixels(height, width, resize):
  image = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
  pp = f'decode|{resize}|canvas((48, 50))|value_range((0, 0, -1), (1, 2, 3))'
  expected = run(pp, {'image': image})
  result = single_image.features([image], pp)
  np.testing.assert_array_equal(result['image'][0], expected['image'])
  np.testing.assert_array_equal(result['image_mask'][0], expected['image_mask'])
  np.testing.assert_array_equal(result['size'], [(height, width)])


def test_prediction_takes_the_ops_of_evaluation():
  image = np.zeros((40, 60, 3), np.uint8)
  with pytest.raises(UserError, match=naming('detr_resize', 'training')):
    single_image.features([image], 'detr_resize((32, 48))|value_range(0, 1)')
  with pytest.raises(UserError, match=naming('image 0', 'canvas', '32x32')):
    single_image.features([image], 'canvas(32)|value_range(0, 1)')
  with pytest.raises(UserError, match=naming('canvas', 'mask', 'features')):
    single_image.batch([image], 'canvas(64)|value_range(0, 1)')


@pytest.mark.parametrize('draw', [0.2, 0.7])
def test_boxes_and_segments_flip_with_their_image(draw):
  features = example()
  assert_boxes_are_exact(features)
  out = run('flip_lr', features | {'segments': features['image'][..., 0]}, [draw])
  assert_boxes_are_exact(out)
  np.testing.assert_array_equal(out['segments'], out['image'][..., 0])
  assert np.array_equal(out['image'], features['image']) == (draw > 0.5)


# By the reference code's arithmetic (DETR's get_size_with_aspect_ratio): image, size of the
# shorter side, most of the longer, result.
DETR_SIZES = [
  ((480, 640), 800, 1333, (800, 1066)),
  ((640, 480), 800, 1333, (1066, 800)),
  ((427, 640), 800, 1333, (800, 1199)),
  ((375, 1242), 800, 1333, (402, 1331)),
  ((500, 500), 608, 1333, (608, 608)),
  ((64, 48), 40, 50, (50, 38)),
  ((1, 400), 40, 50, (1, 50)),
  ((682, 1389), 800, 1333, (655, 1333)),  # the reference has 1334, off the canvas
]


@pytest.mark.parametrize(('shape', 'size', 'longest', 'expected'), DETR_SIZES)
def test_sizes_of_detr(shape, size, longest, expected):
  image = np.zeros((*shape, 1), np.uint8)
  out = run(f'detr_resize({size}, {longest})', {'image': image})
  assert out['image'].shape[:2] == expected


@pytest.mark.parametrize(
  ('shape', 'expected'),
  [((40, 60), (33, 50)), ((7, 90), (4, 50)), ((101, 64), (48, 30))],
)
def test_an_image_fits_as_lsj_fits_it(shape, expected):
  features = {'image': np.zeros((*shape, 1), np.uint8)}
  out = run('fit((48, 50))', features)['image']
  assert out.shape == (*expected, 1)
  assert run('lsj((48, 50), (1, 1))', features, [0, 0])['image'].shape == out.shape


def test_a_size_is_drawn():
  image = {'image': np.zeros((32, 48, 1), np.uint8)}
  draws = [0.0, 0.4, 0.999]
  shapes = [run('detr_resize((16, 24, 40))', image, [u])['image'].shape for u in draws]
  assert shapes == [(16, 24, 1), (24, 36, 1), (40, 60, 1)]


OPTIONS = 'detr_crop((32, 48), 70, first=(40, 50), sides=(20, 30))'


def test_crops_of_detr():
  features = example(80, 120)
  whole = run(OPTIONS, features, [0.5, 0, 0.9, 0, 0, 0, 0])
  expected = run('detr_resize(48, 70)', features)
  np.testing.assert_array_equal(whole['image'], expected['image'])
  np.testing.assert_array_equal(whole['boxes'], features['boxes'])
  # The shorter side becomes 40, the window 21 x 30, at its last row and first column.
  cropped = run(OPTIONS, features, [0.4, 0, 0, 0.1, 0.99, 0.99, 0])
  assert cropped['image'].shape == (32, 45, 3)  # 21 x 30, its shorter side 32
  moved = features['boxes'] * [40, 60, 40, 60] - [19, 0, 19, 0]
  moved = np.clip(moved / [21, 30, 21, 30], 0, 1)
  keep = (moved[:, 2:] > moved[:, :2]).all(1)
  np.testing.assert_allclose(cropped['boxes'], moved[keep], atol=1e-6)
  np.testing.assert_array_equal(cropped['label'], features['label'][keep])
  assert 0 < keep.sum() < len(keep)


def test_crops_that_leave_no_object():
  features = example(n=6)
  features['boxes'] = np.tile(np.float32([0.9, 0.9, 1, 1]), (6, 1))
  out = run(OPTIONS, features, [0.4] + [0.0] * 6)
  assert out['boxes'].shape == (0, 4)
  assert out['label'].shape == (0,)


def with_masks(features, seed=0):
  """Adds masks of the objects: cells at random."""
  rng = np.random.default_rng(seed)
  masks = (rng.random((len(features['label']), 112, 112)) < 0.5).astype(np.uint8) * 255
  masks[:, :, [0, -1]] = masks[:, [0, -1]] = 255
  return features | {'masks': masks, 'extents': features['boxes']}


def value(features, i, points):
  """Returns the value of mask i at points [n, 2], parts of the height and width."""
  extent = features['extents'][i].astype(np.float64)
  cells = np.floor((points - extent[:2]) / (extent[2:] - extent[:2]) * 112).astype(int)
  inside = ((cells >= 0) & (cells < 112)).all(1)
  y, x = cells.clip(0, 111).T
  return np.where(inside, features['masks'][i][y, x], 0)


def assert_masks_move(before, after, whole, start, size, mirror=False):
  """Masks show in a window, in parts of its size, what they showed in the image."""
  points = np.random.default_rng(1).random((4000, 2))
  seen = (points * size + start) / whole
  if mirror:
    seen[:, 1] = 1 - seen[:, 1]
  for i, label in enumerate(after['label']):
    expected = value(before, label, seen)
    # Points on the border of two cells may fall into either in float32.
    assert np.mean(value(after, i, points) == expected) > 0.998
    assert expected.any()


@pytest.mark.parametrize('draw', [0.2, 0.7])
def test_masks_flip(draw):
  features = with_masks(example())
  out = run('flip_lr', features, [draw])
  np.testing.assert_array_equal(out['extents'], out['boxes'])
  assert_masks_move(features, out, 1, 0, 1, draw < 0.5)


def test_masks_follow_a_crop():
  features = with_masks(example(80, 120))
  cropped = run(OPTIONS, features, [0.4, 0, 0, 0.1, 0.99, 0.99, 0])
  assert_masks_move(features, cropped, [40, 60], [19, 0], [21, 30])
  assert 0 < len(cropped['masks']) < 6
  assert cropped['extents'].min() < 0
  np.testing.assert_array_equal(cropped['boxes'], cropped['extents'].clip(0, 1))


# Factor and place as numbers in [0, 1) -> height and width before the crop, its first
# pixel and size. An image of 80 x 120 just fits 64 x 64 as 43 x 64 (42.67 rounded).
JITTERS = [
  ((0.0, 0.3), (4, 6), (0, 0), (4, 6)),
  ((9 / 19, 0.3), (43, 64), (0, 0), (43, 64)),
  ((14 / 19, 0.5), (64, 96), (0, 16), (64, 64)),
  ((18 / 19, 0.75), (81, 122), (13, 44), (64, 64)),  # 17 and 58 pixels are left
]


@pytest.mark.parametrize(('draws', 'whole', 'start', 'size'), JITTERS)
@pytest.mark.parametrize('masks', [False, True])
def test_large_jitter(draws, whole, start, size, masks):
  features = example(80, 120)
  features = with_masks(features) if masks else features
  out = run('lsj(64)', features, np.float32(draws) + 1e-7)
  full = run(f'resize({whole}, antialias=True, rounding="nearest")', features)['image']
  (y, x), (h, w) = start, size
  shown = full[y : y + h, x : x + w].astype(int)
  assert out['image'].dtype == np.uint8
  # The crop's weights are computed from its own first pixel, and round otherwise.
  assert np.abs(out['image'] - shown).max() <= 1
  moved = (features['boxes'] * np.tile(whole, 2) - np.tile(start, 2)) / np.tile(size, 2)
  keep = (moved.clip(0, 1)[:, 2:] - moved.clip(0, 1)[:, :2] > 1e-5).all(1)
  np.testing.assert_array_equal(out['label'], features['label'][keep])
  if masks:
    np.testing.assert_allclose(out['extents'], moved[keep], atol=1e-5)
    assert_masks_move(features, out, whole, start, size)
  # Cells at the border of a mask have ink here: boxes are as without masks.
  np.testing.assert_allclose(out['boxes'], moved[keep].clip(0, 1), atol=1e-5)


def test_large_jitter_makes_boxes_around_what_masks_show():
  features = with_masks(example(64, 64, 2))
  features['boxes'] = features['extents'] = np.float32([[0, 0, 1, 1], [0, 0, 1, 1]])
  features['masks'][:] = 0
  features['masks'][0, 28:84, 56:] = 9  # a little of each cell counts
  features['masks'][0, :56, :28] = 9  # in the crop below, not seen
  features['masks'][1, :28, :28] = 255  # nothing of it is seen
  out = run('lsj(64, (2, 2))', features, [0, 0.999])
  assert out['label'].tolist() == [0]
  # The last 64 of 128 pixels are seen: rows from 56 of 112 on, so 0 to (84 - 56) / 56.
  np.testing.assert_allclose(out['boxes'], [[0, 0, 0.5, 1]], atol=1e-5)
  none = {k: x[:0] for k, x in features.items() if k != 'image'}
  out = run('lsj(64)', features | none, [0.9, 0.5])
  assert (out['boxes'].shape, out['masks'].shape) == ((0, 4), (0, 112, 112))
  assert run('lsj((20, 30))', {'image': features['image']}, [0.9, 0])['image'].any()


def test_canvas():
  features = example(20, 30)
  out = run('canvas((24, 40))', features)
  np.testing.assert_array_equal(out['image'][:20, :30], features['image'])
  assert out['image'].shape == (24, 40, 3)
  assert not out['image'][20:].any()
  assert not out['image'][:, 30:].any()
  mask = np.zeros((24, 40), np.uint8)
  mask[:20, :30] = 1
  np.testing.assert_array_equal(out['image_mask'], mask)
  np.testing.assert_array_equal(out['boxes'], features['boxes'])
  with pytest.raises(lazy_tf.load().errors.InvalidArgumentError, match='24x24'):
    run('canvas(24)', features)


@pytest.mark.parametrize(
  ('op', 'facts'),
  [
    ('detr_resize(())', ('sizes=()',)),
    ('detr_resize(8, 0)', ('longest=0',)),
    ('detr_crop(sides=(9, 4))', ('sides=(9, 4)',)),
    ('canvas("a")', ('size',)),
    ('lsj(64, (2, 1))', ('scale=(2, 1)',)),
    ('lsj(64, 1)', ('scale=1',)),
    ('canvas(9)|flip_lr|value_range(-1, 1)', ('canvas', 'value_range')),
  ],
)
def test_arguments(op, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    registry.check_pipeline('config.data.pp', op, {})
