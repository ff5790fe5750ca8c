"""Canvases of digits: exact boxes and masks, the same everywhere, splits apart."""

import numpy as np
import pytest
from pycocotools import mask as mask_lib

from vit_jax.data import sources
from vit_jax.detection.data import objects
from vit_jax.detection.data.digits_canvas import _enlarge


@pytest.fixture(scope='module')
def canvases():
  source = sources.build('digits_canvas', 'test', segments=True, masks=True)
  return source, source.read(np.arange(100))


@pytest.mark.filterwarnings('ignore:__array__:DeprecationWarning')  # pycocotools'
def test_boxes_and_masks_are_exact(canvases):
  source, examples = canvases
  truth = source.truth(masks=True)
  for i, example in enumerate(examples):
    rows = np.flatnonzero(truth.image == i)
    masks = [mask_lib.decode(truth.masks[row]).astype(bool) for row in rows]
    assert 1 <= len(rows) <= 4
    assert not (np.sum(masks, 0) > 1).any()
    segments = np.zeros((64, 64), int)
    for row, mask, box, label in zip(
      rows, masks, example['boxes'] * 64, example['label'], strict=True
    ):
      y, x = np.nonzero(mask)
      top, left, bottom, right = y.min(), x.min(), y.max() + 1, x.max() + 1
      np.testing.assert_array_equal(box, [top, left, bottom, right])
      corners = [left, top, right - left, bottom - top]
      np.testing.assert_array_equal(truth.boxes[row], corners)
      assert truth.category[row] == label
      assert truth.areas[row] == mask.sum()
      segments[mask] = 1 + label
      # Inside the mask it is bright, and no ink as bright is around the box.
      ground = np.median(example['image'])
      assert (example['image'][mask] > ground).all()
    np.testing.assert_array_equal(example['segments'], segments)
    np.testing.assert_array_equal(example['extents'], example['boxes'])


def test_numbers_and_classes_vary(canvases):
  _, examples = canvases
  numbers = np.bincount([len(x['label']) for x in examples], minlength=5)
  assert numbers[0] == 0
  assert (numbers[1:] > 8).all()
  labels = np.concatenate([x['label'] for x in examples])
  assert (np.bincount(labels, minlength=10) > 5).all()


def test_the_same_alone_and_in_any_slice(canvases):
  _, examples = canvases
  (alone,) = sources.build(
    'digits_canvas', 'test[7:9]', segments=True, masks=True
  ).read([0])
  for key, value in alone.items():
    np.testing.assert_array_equal(value, examples[7][key])
  # A release must not change them: notes cite numbers on these.
  sums = [int(x['image'].sum(dtype=np.int64)) for x in examples[:3]]
  assert sums == [217185, 63305, 372691]


def test_train_and_test_share_no_digit():
  pools = [
    {image.tobytes() for image in source._digits[name].images}
    for name, source in (
      (name, sources.build('digits_canvas', f'{name}[:1]'))
      for name in ('train', 'test')
    )
  ]
  assert not pools[0] & pools[1]


@pytest.mark.parametrize('shape', [(9, 14), (112, 56), (131, 20), (1, 225)])
def test_cells_of_masks_hold_the_share_that_is_covered(shape):
  h, w = shape
  mask = np.random.default_rng(0).random(shape) < 0.4
  mask[[0, -1]] = mask[:, [0, -1]] = True
  canvas = np.zeros((h + 5, w + 7), bool)
  canvas[2 : 2 + h, 3 : 3 + w] = mask
  features = objects.encode_masks([canvas])
  expected = np.divide([2, 3, 2 + h, 3 + w], [h + 5, w + 7] * 2)
  np.testing.assert_allclose(features['extents'][0], expected, atol=1e-7)
  # Pixels and cells are both made of parts of 1 / 112 of a pixel.
  parts = mask.repeat(112, 0).reshape(112, h, w).mean(1)
  shares = parts.repeat(112, 1).reshape(112, 112, w).mean(2)
  # Rounded to the nearest level.
  np.testing.assert_allclose(features['masks'][0], 255 * shares, atol=0.5 + 1e-6)


def test_enlarging():
  image = np.arange(64).reshape(8, 8)
  np.testing.assert_array_equal(_enlarge(image, 8), image)
  # Twice as large: quarters between neighbours, the outermost as they are.
  np.testing.assert_array_equal(
    _enlarge(np.diag([256] * 8), 16)[:4, :4],
    [[256, 192, 64, 0], [192, 160, 96, 48], [64, 96, 160, 144], [0, 48, 144, 160]],
  )
