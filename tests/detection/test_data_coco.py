"""Images and objects in COCO's format: examples, the truth, and bad files."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from tests.support.image_folder import take
from vit_jax.data import pipeline, sources
from vit_jax.detection.coco.objects import Truth
from vit_jax.errors import UserError

PP = 'decode|flip_lr|detr_resize(16)|canvas((16, 32))|value_range(-1, 1)'
PP += '|pad_to(boxes=3, label=3)'
# (image's id, category, box, crowd) of images 20 high and 30 wide.
OBJECTS = [
  (7, 18, [3, 5, 6, 10], 0),
  (7, 2, [-3, 5, 6, 10], 0),  # cut off at the left
  (7, 18, [0, 0, 30, 20], 1),
  (4, 2, [29, 19, 10, 10], 0),  # cut off at the bottom right
  (4, 2, [30, 2, 5, 5], 0),  # outside
  (4, 2, [3, 3, 0, 5], 0),  # without an area
]
IMAGES = {9: 'c.png', 4: 'a.png', 7: 'b.png'}  # the one with the id 9 is empty


def annotations():
  names = 'image_id', 'category_id', 'bbox', 'iscrowd'
  polygon = {'area': 60, 'segmentation': [[0, 0, 9, 0, 9, 9]]}
  return {
    'images': [
      {'id': i, 'file_name': name, 'height': 20, 'width': 30}
      for i, name in IMAGES.items()
    ],
    'categories': [{'id': 18, 'name': 'dog'}, {'id': 2, 'name': 'bicycle'}],
    'annotations': [
      dict(zip(names, row, strict=True), id=k, **polygon)
      for k, row in enumerate(OBJECTS)
    ],
  }


@pytest.fixture
def root(tmp_path):
  """A folder as COCO is unpacked, with one split, 'val2017'."""
  (tmp_path / 'val2017').mkdir()
  (tmp_path / 'annotations').mkdir()
  for i, name in IMAGES.items():
    Image.new('RGB', (30, 20), (i, 0, 0)).save(tmp_path / 'val2017' / name)
  write(tmp_path, annotations())
  return tmp_path


def write(root, content):
  path = root / 'annotations' / 'instances_val2017.json'
  path.write_text(json.dumps(content))


def test_examples(root):
  source = sources.build(f'coco:{root}', 'val2017[:100%]')
  assert (len(source), source.num_classes) == (3, 2)
  assert source.class_names == ['bicycle', 'dog']
  low, middle, empty = source.read(np.arange(3))
  # Top, left, bottom, right from 0 to 1; of crowds and what is outside none.
  np.testing.assert_allclose(low['boxes'], [[0.95, 29 / 30, 1, 1]], atol=1e-6)
  expected = [[0.25, 0.1, 0.75, 0.3], [0.25, 0, 0.75, 0.1]]
  np.testing.assert_allclose(middle['boxes'], expected, atol=1e-6)
  np.testing.assert_array_equal(middle['label'], [1, 0])
  assert empty['boxes'].shape == (0, 4)
  assert source.name_of(1).endswith('val2017/b.png')
  text = source.describe('val2017')
  assert '3 images, 2 classes' in text
  facts = ('6 objects', '1 crowds', '2 boxes cut off', '2 boxes without an area')
  assert all(fact in text for fact in facts)


def test_the_truth_is_whole(root):
  source = sources.build(f'coco:{root}', 'val2017')
  truth = source.truth(masks=True)
  assert truth.image_ids == [4, 7, 9]
  assert len(truth.boxes) == len(truth.masks) == len(OBJECTS)
  assert truth.crowd.sum() == 1
  np.testing.assert_array_equal(truth.boxes[truth.image == 1][1], [-3, 5, 6, 10])
  last = sources.build(f'coco:{root}', 'val2017[1:2]').truth()
  assert last.image_ids == [7]
  assert last.image.tolist() == [0, 0, 0]


def test_images_of_a_truth():
  truth = Truth(
    *([1, 2, 3], [1], ['a', 'b', 'c'], np.arange(6).reshape(3, 2), ['x']),
    *(np.array([2, 0, 2]), np.zeros(3, int), np.arange(12.0).reshape(3, 4)),
    *(np.arange(3.0), np.zeros(3, bool), ['m', 'n', 'o']),
  )
  some = truth.select(np.array([2, 1, 2]))
  assert (some.image_ids, some.file_names) == ([3, 2, 3], ['c', 'b', 'c'])
  assert (some.image.tolist(), some.areas.tolist()) == ([0, 0, 2, 2], [0, 2, 0, 2])
  assert some.masks == ['m', 'o', 'm', 'o']
  assert len(truth.select(np.array([1])).boxes) == 0


def test_batches(root):
  target = f'coco:{root}/annotations/instances_val2017.json,{root}/val2017'
  batches = pipeline.TrainBatches(target, 'train', PP, 3, seed=1)
  spec = {k: x.shape for k, x in batches.spec.items()}
  assert spec['image'] == (3, 16, 32, 3)
  assert spec['image_mask'] == (3, 16, 32)
  assert spec['boxes'] == (3, 3, 4)
  (batch,) = take(batches.iterate(), 1)
  assert batch['mask'].all()
  number = dict(zip(batch['index'].tolist(), batch['boxes_mask'].sum(1), strict=True))
  assert number == {0: 1, 1: 2, 2: 0}
  assert (batch['image_mask'].sum((1, 2)) == 16 * 24).all()


# Corners of polygons, and of the pixels that they cover: rows, columns.
SQUARES = [
  ([3, 5, 9, 5, 9, 15, 3, 15], (slice(5, 15), slice(3, 9))),
  ([-3, 5, 3, 5, 3, 15, -3, 15], (slice(5, 15), slice(0, 3))),  # partly outside
  ([0, 0, 30, 0, 30, 20, 0, 20], None),  # a crowd
  ([29, 19, 39, 19, 39, 29, 29, 29], (slice(19, 20), slice(29, 30))),
  ([30, 2, 35, 2, 35, 7, 30, 7], None),  # its box is outside
  ([3, 3, 3, 8, 3, 5], None),  # its box has no area
  ([40, 2, 50, 2, 50, 7, 40, 7], None),  # the mask is outside, its box is not
]


def with_masks():
  content = annotations()
  row = content['annotations'][0] | {'id': 9, 'image_id': 9}
  content['annotations'].append(row)
  for row, (polygon, _) in zip(content['annotations'], SQUARES, strict=True):
    row['segmentation'] = [polygon]
  return content


def test_masks(root):
  write(root, with_masks())
  plain = sources.build(f'coco:{root}', 'val2017')
  source = sources.build(f'coco:{root}', 'val2017', masks=True)
  assert plain.fingerprint != source.fingerprint
  low, middle, empty = source.read(np.arange(3))
  # One object is left out: no pixel of its mask is in the image.
  assert (empty['masks'].shape, empty['extents'].shape) == ((0, 112, 112), (0, 4))
  text = source.describe('val2017')
  facts = ('7 objects', '1 crowds', '2 boxes without', '1 masks without a pixel')
  assert all(fact in text for fact in facts)
  for example, places in ((low, [3]), (middle, [0, 1])):
    boxes = [
      [r.start, c.start, r.stop, c.stop] for r, c in (SQUARES[i][1] for i in places)
    ]
    np.testing.assert_allclose(
      example['extents'], np.divide(boxes, [20, 30] * 2), atol=1e-6
    )
    assert (example['masks'] == 255).all()
  truth = source.truth(masks=True)
  assert len(truth.masks) == 7
  assert plain.truth().masks is None
  content = with_masks()
  content['annotations'][0]['segmentation'] = [[1, 2, 3, 4]]
  write(root, content)
  assert len(sources.build(f'coco:{root}', 'val2017')) == 3
  with pytest.raises(UserError, match=naming('annotations[0]', 'polygons')):
    sources.build(f'coco:{root}', 'val2017', masks=True)


def test_batches_with_masks(root):
  write(root, with_masks())
  pp = PP.replace('label=3', 'label=3, masks=3, extents=3')
  name, options = f'coco:{root}', {'masks': True}
  with pytest.raises(UserError, match=naming('masks', 'pad_to')):
    _ = pipeline.TrainBatches(name, 'val2017', PP, 3, source_options=options).spec
  batches = pipeline.TrainBatches(name, 'val2017', pp, 3, source_options=options)
  spec = batches.spec['masks']
  assert (spec.shape, spec.dtype) == ((3, 3, 112, 112), np.uint8)
  (batch,) = take(batches.iterate(), 1)
  shown = batch['boxes_mask'] > 0
  assert shown.sum() == 3
  np.testing.assert_array_equal(batch['masks'].mean((2, 3)), 255 * shown)
  # Flipped or not, masks fill their boxes.
  np.testing.assert_allclose(batch['extents'], batch['boxes'], atol=1e-6)
  with pytest.raises(UserError, match=naming('pad_to', "'masks'")):
    _ = pipeline.TrainBatches(name, 'val2017', pp, 3).spec
  text = ''.join(batches.describe())
  assert 'cut off at the border' in text
  assert 'more than' not in text


def test_objects_beyond_the_length_are_counted(root):
  content = annotations()
  content['annotations'] += [
    content['annotations'][0] | {'id': 50 + i} for i in range(100)
  ]
  write(root, content)
  batches = pipeline.EvalBatches(f'coco:{root}', 'val2017', PP, 3)
  assert ''.join(batches.describe()).endswith(
    '; 1 with more than 3 boxes, the others cut off'
  )
  (batch,) = take(batches.iterate(), 1)
  assert batch['boxes_mask'].sum(1).tolist() == [1, 3, 0]


def test_splits_files_and_folders_that_are_not_there(root):
  with pytest.raises(ValueError, match=naming('train', 'val2017')):
    sources.build(f'coco:{root}', 'train')
  with pytest.raises(ValueError, match=naming('annotations/instances_*.json', 'none')):
    sources.build(f'coco:{root}/none', 'val')
  file = root / 'annotations' / 'instances_val2017.json'
  with pytest.raises(ValueError, match=naming('3 of 3', 'pictures')):
    sources.build(f'coco:{file},{root}/pictures', 'train')
  for change, facts in (
    ({'file_name': 'no.jpg'}, ('no.jpg', '1 of 3')),
    ({'height': 0}, ('id 9', 'size')),
  ):
    content = annotations()
    content['images'][0].update(change)
    write(root, content)
    with pytest.raises(ValueError, match=naming(*facts)):
      sources.build(f'coco:{root}', 'val2017')


def test_an_image_of_another_size_or_broken_is_a_bad_image(root):
  Image.new('RGB', (20, 30)).save(root / 'val2017' / 'b.png')
  (root / 'val2017' / 'c.png').write_bytes(b'no image')
  source = sources.build(f'coco:{root}', 'val2017')
  (example,) = source.read(np.array([1]))
  assert example['error'] == 'is 30 x 20, annotated as 20 x 30'
  batches = pipeline.EvalBatches(f'coco:{root}', 'val2017', PP, 3, max_bad_fraction=1)
  (batch,) = take(batches.iterate(), 1)
  assert batch['mask'].tolist() == [1, 0, 0]
  assert batches.bad_images == 2
