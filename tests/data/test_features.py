"""Examples with boxes: declared by a source, moved by ops, padded, the same everywhere."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from tests.support.image_folder import take
from vit_jax.data import pipeline, sources
from vit_jax.data.features import Feature, ImageFeature
from vit_jax.errors import UserError

COUNT, BROKEN, LENGTH = 21, 5, 3
PP = 'decode|resize(8)|flip_lr|value_range(-1, 1)|pad_to(boxes=3, label=3)'


def example(index):
  """Returns (image uint8 [h, w, 3], boxes [n, 4], labels [n]), n from 0 to 4.

  Each box has a colour that occurs nowhere outside of it.
  """
  rng = np.random.default_rng(index)
  size = 8 * (1 + rng.integers(1, 4, 2))
  image = np.zeros((*size, 3), np.uint8)
  n = index % 5
  top, left = rng.uniform(0, 0.6, (2, n))
  boxes = np.stack([top, left, top + 0.2, left + 0.3], 1).astype(np.float32)
  return image, boxes.reshape(n, 4), rng.integers(0, 7, n)


class Boxes(sources.Source):
  """Encoded images, or arrays of one shape, with any number of boxes."""

  num_classes, fingerprint = 7, 'toy'

  def __init__(self, target, split):
    self.name, self._encoded = f'boxes:{target}', target == 'encoded'
    self.features = {
      'image': ImageFeature(None if self._encoded else (16, 16, 3)),
      'boxes': Feature((None, 4), 'float32', located=True),
      'label': Feature((None,)),
      'size': Feature((2,)),
    }

  def __len__(self):
    return COUNT

  def read(self, indices):
    return [self._one(int(i)) for i in indices]

  def _one(self, index):
    image, boxes, label = example(index)
    size = image.shape[:2]
    if not self._encoded:
      image = np.full((16, 16, 3), index, np.uint8)
      image[:, :8] += 100
    else:
      image[:, : size[1] // 2] = 200  # bright on the left
      data = io.BytesIO()
      Image.fromarray(image).save(data, 'PNG')
      image = data.getvalue()[: 60 if index == BROKEN else None]
    return {'image': image, 'boxes': boxes, 'label': label, 'size': size}


@pytest.fixture(autouse=True)
def boxes(monkeypatch):
  monkeypatch.setitem(sources.SOURCES.data, 'boxes', Boxes)


def train(kind='encoded', pp=PP):
  pp = pp if kind == 'encoded' else pp.removeprefix('decode|')
  return pipeline.TrainBatches(
    f'boxes:{kind}', 'train', pp, 6, seed=3, max_bad_fraction=1
  )


@pytest.mark.parametrize('kind', ['encoded', 'arrays'])
def test_boxes_follow_their_images(kind):
  batches = train(kind)
  spec = {k: (s.shape, s.dtype) for k, s in batches.spec.items()}
  assert spec['image'] == ((6, 8, 8, 3), np.uint8)
  assert spec['boxes'] == ((6, LENGTH, 4), np.float32)
  assert spec['label_mask'] == ((6, LENGTH), np.float32)
  flipped = set()
  for batch in take(batches.iterate(), 7):  # two epochs
    assert {k: (x.shape, x.dtype) for k, x in batch.items()} == spec
    for row in range(6):
      image, expected, label = example(batch['index'][row])
      if kind == 'encoded' and batch['index'][row] == BROKEN:
        assert batch['mask'][row] == 0
        assert not any(batch[k][row].any() for k in ('image', 'boxes', 'boxes_mask'))
        continue
      left, right = batch['image'][row, :, :3].mean(), batch['image'][row, :, 5:].mean()
      flipped.add(left < right)
      if left < right:
        expected = expected[:, [0, 3, 2, 1]] * [1, -1, 1, -1] + [0, 1, 0, 1]
      n = min(len(expected), LENGTH)
      np.testing.assert_allclose(batch['boxes'][row, :n], expected[:n], atol=1e-6)
      np.testing.assert_array_equal(batch['label'][row, :n], label[:n])
      assert not batch['boxes'][row, n:].any()
      for name in ('boxes_mask', 'label_mask'):
        np.testing.assert_array_equal(batch[name][row], np.arange(LENGTH) < n)
      np.testing.assert_array_equal(batch['size'][row], image.shape[:2])
  assert flipped == {True, False}


START = PP.rpartition('|')[0]
# A pipeline, and the words of the error.
REFUSED = [
  # Ops that would part boxes from images.
  (PP.replace('|', '|inception_crop(4)|', 1), ('inception_crop(4)', 'boxes')),
  (PP.replace('|', '|trim(1)|', 1), ('trim(1)', 'boxes:encoded')),
  # Features of different lengths make no batch.
  (START, ('boxes', 'pad_to(boxes=')),
  (f'{START}|pad_to(boxes=3)', ('label', 'pad_to(label=')),
  (f'{START}|pad_to(boxes=3, lable=3)', ("'lable'",)),
]


@pytest.mark.parametrize(('pp', 'words'), REFUSED)
def test_wrong_pipelines(pp, words):
  with pytest.raises(UserError, match=naming(*words)):
    _ = train(pp=pp).spec
