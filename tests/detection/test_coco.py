"""COCO's files, metric and masks, against pycocotools' numbers and closed forms."""

import json
import math

import numpy as np
import pytest

from tests.support import GOLDEN, naming
from vit_jax.detection.coco import average_precision, files, rle
from vit_jax.detection.coco.objects import Detections, Truth
from vit_jax.errors import UserError

# Sums in another order; measured 1e-16.
EXACT = 1e-9
# pycocotools' precision is right / (right + wrong + 2.2e-16).
ONE = pytest.approx(1, abs=1e-15)


@pytest.fixture
def write(tmp_path):
  """Writes JSON content as G.json; returns its path."""

  def write(content):
    (tmp_path / 'G.json').write_text(json.dumps(content))
    return tmp_path / 'G.json'

  return write


def lengths(mask):
  """Returns the lengths of the runs of a mask, column by column."""
  pixels = np.asarray(mask, bool).T.reshape(-1)
  toggles = np.flatnonzero(np.diff(pixels, prepend=False))
  return np.diff(toggles, prepend=0, append=pixels.size).tolist()


@pytest.mark.parametrize('kind', average_precision.KINDS)
def test_the_numbers_of_pycocotools(write, kind):
  with np.load(GOLDEN / 'coco_ap.npz') as file:
    z = dict(file)
  H, W = int(z['height']), int(z['width'])

  def masks(key):
    return np.unpackbits(z[key], axis=1)[:, : H * W].reshape(-1, H, W)

  names = 'image_id', 'category_id', 'bbox', 'area', 'iscrowd'
  columns = [z[f'gt_{k}'] for k in ('image', 'category', 'box', 'area', 'crowd')]
  annotations = [
    dict(zip(names, row, strict=True))
    | {'id': i, 'segmentation': {'size': [H, W], 'counts': lengths(mask)}}
    for i, (*row, mask) in enumerate(
      zip(*(x.tolist() for x in columns), masks('gt_mask_bits'), strict=True)
    )
  ]
  content = {
    'images': [{'id': i, 'height': H, 'width': W} for i in z['image_ids'].tolist()],
    'categories': [{'id': i, 'name': f'{i}'} for i in z['category_ids'].tolist()],
    'annotations': annotations,
  }
  truth = files.truth(write(content), masks=kind == 'segm')
  detections = Detections(
    image=np.searchsorted(truth.image_ids, z['dt_image']),
    category=np.searchsorted(truth.category_ids, z['dt_category']),
    scores=z['dt_score'],
    boxes=z['dt_box'],
    masks=[rle.encode(mask) for mask in masks('dt_mask_bits')],
  )
  numbers, of_class, _ = average_precision.measure(truth, detections, kind)
  close = lambda ours, key: np.testing.assert_allclose(
    ours, z[f'{kind}_{key}'], rtol=0, atol=EXACT
  )
  close(list(numbers.values()), 'stats')
  close(of_class[:, 0], 'ap_per_category')
  np.testing.assert_allclose(of_class.mean(0), list(numbers.values())[:3], atol=EXACT)


def _one_image(boxes, scores, truths, crowd=(), areas=None):
  crowd = np.array([*crowd, *[False] * (len(truths) - len(crowd))], bool)
  truths = np.array(truths, np.float64).reshape(-1, 4)
  areas = truths[:, 2:].prod(1) if areas is None else np.array(areas)
  zeros = lambda x: np.zeros(len(x), np.int64)
  truth = Truth(
    *([1], [1], [''], np.zeros((1, 2)), ['']),
    *(zeros(truths), zeros(truths), truths, areas, crowd),
  )
  boxes = np.array(boxes, np.float64).reshape(-1, 4)
  detections = Detections(zeros(boxes), zeros(boxes), np.array(scores, float), boxes)
  return average_precision.measure(truth, detections)[0]


BOX, FAR = [0, 0, 10, 10], [50, 50, 10, 10]


def test_closed_forms():
  assert _one_image([BOX], [1], [BOX])['ap'] == ONE
  # The wrong one comes first: precision 1/2 at every recall.
  assert _one_image([FAR, BOX], [0.9, 0.5], [BOX])['ap'] == pytest.approx(0.5)
  # One of two objects: recalls 0 to 0.5 of the 101 have precision 1.
  half = _one_image([BOX], [1], [BOX, FAR])
  assert half['ap'] == pytest.approx(51 / 101)
  assert half['ar_100'] == 0.5
  # Overlap 0.8: right for the thresholds 0.5 to 0.75 (0.8 is reached, too).
  assert _one_image([[0, 0, 10, 8]], [1], [BOX])['ap'] == pytest.approx(0.7)
  assert _one_image([], [], [BOX])['ap'] == 0
  assert set(_one_image([BOX], [1], []).values()) == {-1}


def test_crowds_and_areas():
  inside = [[0, 0, 5, 5], [5, 5, 5, 5]]
  # Any number in a crowd; none of them counts.
  numbers = _one_image([*inside, FAR], [0.9, 0.8, 0.7], [BOX, FAR], crowd=[True])
  assert numbers['ap'] == ONE
  # A crowd alone is no object.
  assert _one_image(inside, [0.9, 0.8], [BOX], crowd=[True])['ap'] == -1
  # The area is the annotated one.
  numbers = _one_image([BOX], [1], [BOX], areas=[40**2])
  assert (numbers['ap_small'], numbers['ap_medium']) == (-1, ONE)


# -- masks --------------------------------------------------------------------------------


def test_run_lengths_of_many_masks():
  masks = np.random.default_rng(0).random((300, 7, 5)) < 0.5
  runs = [rle.encode(mask) for mask in masks]
  np.testing.assert_array_equal(rle.areas(runs), masks.sum((1, 2)))
  np.testing.assert_array_equal([rle.decode(x) for x in runs], masks)
  assert len(rle.areas([])) == 0


def test_masks_in_files_are_those_of_pixels():
  rng = np.random.default_rng(0)
  for mask in rng.random((12, 70, 90)) < rng.uniform(0, 1, (12, 1, 1)):
    runs = rle.encode(mask)
    for counts in lengths(mask), runs['counts'].decode():
      assert rle.read({'size': [70, 90], 'counts': counts}, 70, 90) == runs
  # A polygon with corners on pixels' edges holds exactly the pixels inside.
  square = np.zeros((12, 16), bool)
  square[1:7, 2:9] = True
  polygon = [2, 1, 9, 1, 9, 7, 2, 7]
  assert rle.read([polygon], 12, 16) == rle.encode(square)
  square[8:10, 2:4] = True
  second = [2, 8, 4, 8, 4, 10, 2, 10]
  assert rle.read([polygon, second], 12, 16) == rle.encode(square)


# -- files --------------------------------------------------------------------------------


def _content():
  box = {'image_id': 7, 'category_id': 1, 'bbox': [1, 2, 3, 4], 'area': 12}
  mask = {'size': [10, 10], 'counts': [5, 5, 90]}
  return {
    'images': [{'id': 7, 'height': 10, 'width': 10}],
    'categories': [{'id': 1, 'name': 'cat'}, {'id': 4, 'name': 'dog'}],
    'annotations': [box | {'id': 3, 'segmentation': mask}],
  }


def test_results_name_images_and_categories_by_their_ids(write):
  truth = files.truth(write(_content()), masks=True)
  zero, one = np.array([0]), np.array([1])
  detections = Detections(zero, one, np.array([0.5]), truth.boxes)
  assert files.results(truth, detections) == [
    {'image_id': 7, 'category_id': 4, 'bbox': [1, 2, 3, 4], 'score': 0.5}
  ]


MASK = {'size': [10, 10], 'counts': [5, 5, 90]}
WRAPS = [2**62, 2**62, 2**62, 2**62 + 100]  # 100 in 64 bits


@pytest.mark.parametrize(
  ('key', 'change', 'facts'),
  [
    ('annotations', {'image_id': 9}, ('id 3', 'image_id 9', '7')),
    ('annotations', {'category_id': 2}, ('category_id 2', '1, 4')),
    ('annotations', {'area': None}, ("'area'",)),
    ('annotations', {'area': float('nan')}, ('area', 'nan', 'finite')),
    ('annotations', {'area': -5}, ('area', '-5')),
    ('annotations', {'bbox': [1, 2, 3]}, ('bbox', 'left, top, width, height')),
    ('annotations', {'bbox': [1, 2, -3, 4]}, ('bbox', '-3')),
    ('annotations', {'segmentation': None}, ("'segmentation'",)),
    ('annotations', {'segmentation': MASK | {'counts': '55j'}}, ('run lengths',)),
    ('annotations', {'segmentation': MASK | {'counts': '55j23'}}, ('run lengths',)),
    ('annotations', {'segmentation': MASK | {'counts': [1, 2]}}, ('run lengths',)),
    ('annotations', {'segmentation': MASK | {'counts': [-5, 105]}}, ('run lengths',)),
    ('annotations', {'segmentation': MASK | {'counts': WRAPS}}, ('run lengths',)),
    (
      'annotations',
      {'segmentation': MASK | {'counts': [50.5, 49.5]}},
      ('run lengths',),
    ),
    ('annotations', {'segmentation': MASK | {'counts': 'o' * 10**6}}, ('run lengths',)),
    (
      'annotations',
      {'segmentation': MASK | {'size': [5, 20]}},
      ('[5, 20]', '[10, 10]'),
    ),
    ('annotations', {'segmentation': []}, ('polygons',)),
    ('annotations', {'segmentation': [[1, 2, 3, 4]]}, ('three corners',)),
    ('annotations', {'segmentation': [[0, 0, 1, 1, 1, 1e9]]}, ('outlines',)),
    ('annotations', {'segmentation': [[0, 0, 1, 1, 1, math.inf]]}, ('outlines',)),
    ('annotations', {'segmentation': [[0, 0, 99_999, 99_999] * 500]}, ('outlines',)),
    ('images', {'height': 2**20, 'width': 2**20}, ('height', 2**20)),
    ('images', {'id': None}, ("'id'",)),
    ('images', {'height': 1.5}, ('height', '1.5')),
    ('categories', {'id': 'cat'}, ("'cat'", 'number')),
    ('categories', {'id': 4}, ('categories', 'same id')),
    ('categories', {'name': None}, ("'name'",)),
  ],
)
def test_entries_that_are_refused(write, key, change, facts):
  content = _content()
  row = content[key][0] | change
  content[key][0] = {k: v for k, v in row.items() if v is not None}
  with pytest.raises(UserError, match=naming('G.json', key, *facts)):
    files.truth(write(content), masks=True)


def test_files_of_another_form(write):
  with pytest.raises(UserError, match=naming('G.json', 'images')):
    files.truth(write([]))
  path = write(_content())
  path.write_text('[{"image_id": 7,')
  with pytest.raises(UserError, match=naming('G.json', 'JSON')):
    files.truth(path)
  with pytest.raises(UserError, match=naming('none.json', 'No such file')):
    files.truth(path.with_name('none.json'))
