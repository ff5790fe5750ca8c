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


@pytest.mark.parametrize(('height', 'width'), [(40, 60), (33, 33), (7, 90), (101, 64)])
def test_prediction_sees_the_same_pixels(height, width):
  image = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
  pp = 'decode|detr_resize(32, 48)|canvas((48, 50))|value_range((0, 0, -1), (1, 2, 3))'
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
  with pytest.raises(UserError, match=naming('canvas', 'mask', 'inputs')):
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
    ('canvas(9)|flip_lr|value_range(-1, 1)', ('canvas', 'last')),
  ],
)
def test_arguments(op, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    registry.check('config.data.pp', op, {})
