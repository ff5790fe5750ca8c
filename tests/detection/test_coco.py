"""COCO's files, metric and masks, against pycocotools' numbers and closed forms."""

import json

import numpy as np
import pytest

from tests.support import coco_files, commands, naming
from vit_jax.detection.coco import average_precision, files, rle
from vit_jax.detection.coco.objects import Detections, Truth
from vit_jax.detection.tools import coco_ap
from vit_jax.errors import UserError

# Sums in another order; measured 0.
EXACT = 1e-9
# As pycocotools a precision is right / (right + wrong + 2.2e-16).
ONE = pytest.approx(1, abs=1e-15)


@pytest.fixture(scope='module')
def golden(tmp_path_factory):
  return coco_files.golden(), coco_files.write_golden(tmp_path_factory.mktemp('coco'))


@pytest.mark.parametrize('kind', average_precision.KINDS)
def test_the_numbers_of_pycocotools(golden, capsys, kind):
  expected, (gt, dt) = golden
  truth = files.truth(gt, masks=kind == 'segm')
  measured = average_precision.measure(
    truth, files.detections(dt, truth, masks=kind == 'segm'), kind
  )
  close = lambda ours, key: np.testing.assert_allclose(
    ours, expected[f'{kind}_{key}'], rtol=0, atol=EXACT
  )
  close(list(measured.numbers().values()), 'stats')
  close(measured.precision[..., 0, 2], 'precision')
  close(measured.recall, 'recall')
  close([measured.of_category(k)['ap'] for k in range(3)], 'ap_per_category')
  # The command gives the same.
  argv = '--gt', gt, '--dt', dt, '--type', kind, '--json', '--per_class'
  code, out, _ = commands.run(coco_ap.main, capsys, *argv)
  record = json.loads(out)
  assert code == 0
  close(record['stats'], 'stats')
  assert record['stats'] == [record[name] for name in average_precision.NAMES]
  assert (record['images'], record['objects'], record['detections']) == (10, 47, 210)
  close([x['ap'] for x in record['per_class'].values()], 'ap_per_category')


def test_the_text_of_the_command(golden, capsys):
  expected, (gt, dt) = golden
  code, out, _ = commands.run(
    coco_ap.main, capsys, '--gt', gt, '--dt', dt, '--per_class'
  )
  lines = out.splitlines()
  assert (code, len(lines)) == (0, 1 + 12 + 1 + 3)
  numbers = [float(line.split()[-1]) for line in lines[1:13]]
  assert numbers == expected['bbox_stats'].round(4).tolist()
  assert 'thing' in out


def _one_image(boxes, scores, truths, crowd=(), areas=None):
  crowd = np.array([*crowd, *[False] * (len(truths) - len(crowd))], bool)
  truths = np.array(truths, np.float64).reshape(-1, 4)
  areas = truths[:, 2:].prod(1) if areas is None else np.array(areas)
  zeros = lambda x: np.zeros(len(x), np.int64)
  truth = Truth(
    *('', [1], [1], [''], np.zeros((1, 2)), ['']),
    *(zeros(truths), zeros(truths), truths, areas, crowd),
  )
  boxes = np.array(boxes, np.float64).reshape(-1, 4)
  detections = Detections(zeros(boxes), zeros(boxes), np.array(scores, float), boxes)
  return average_precision.measure(truth, detections).numbers()


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
  # Found twice: the second is wrong, but below the first.
  assert _one_image([BOX, BOX], [0.9, 0.8], [BOX])['ap'] == ONE
  assert _one_image([], [], [BOX])['ap'] == 0
  none = _one_image([BOX], [1], [])
  assert set(none.values()) == {-1}


def test_crowds_and_areas():
  inside = [[0, 0, 5, 5], [5, 5, 5, 5]]
  # Any number in a crowd; none of them counts.
  got = _one_image([*inside, FAR], [0.9, 0.8, 0.7], [BOX, FAR], crowd=[True])
  assert got['ap'] == ONE
  # A crowd alone is no object.
  assert _one_image(inside, [0.9, 0.8], [BOX], crowd=[True])['ap'] == -1
  # A free object goes before a crowd that overlaps more.
  assert _one_image([BOX], [1], [BOX, [0, 0, 10, 8]], crowd=[True])['ap50'] == ONE
  # The area is the annotated one.
  got = _one_image([BOX], [1], [BOX], areas=[40**2])
  assert (got['ap_small'], got['ap_medium']) == (-1, ONE)
  # Both ends of a range belong to it.
  for area, names in ((32**2, ('small', 'medium')), (96**2, ('medium', 'large'))):
    got = _one_image([BOX], [1], [BOX], areas=[area])
    assert [got[f'ap_{name}'] for name in names] == [ONE, ONE]


def test_an_annotation_with_id_0_is_an_object(tmp_path):
  # pycocotools 2.0.11 takes the id for "nothing" and counts the match as wrong.
  z = {
    'images': [{'id': 0, 'height': 20, 'width': 20}],
    'categories': [{'id': 0, 'name': 'a'}],
    'annotations': [
      {'id': 0, 'image_id': 0, 'category_id': 0, 'bbox': BOX, 'area': 100}
    ],
  }
  detections = [{'image_id': 0, 'category_id': 0, 'bbox': BOX, 'score': 1}]
  truth = files.truth(coco_files.write(tmp_path / 'G.json', z))
  detections = files.detections(
    coco_files.write(tmp_path / 'D.json', detections), truth
  )
  assert average_precision.measure(truth, detections).numbers()['ap'] == ONE


def test_masks_in_files_are_those_of_pixels():
  rng = np.random.default_rng(0)
  for mask in rng.random((12, 7, 9)) < rng.uniform(0, 1, (12, 1, 1)):
    runs = rle.encode(mask)
    forms = coco_files.runs(mask), runs['counts'].decode()
    for counts in forms:
      assert rle.read({'size': [7, 9], 'counts': counts}, 7, 9, 100) == runs
  # A polygon with corners on pixels' edges holds exactly the pixels inside.
  square = np.zeros((12, 16), bool)
  square[1:7, 2:9] = True
  polygon = [2, 1, 9, 1, 9, 7, 2, 7]
  assert rle.read([polygon], 12, 16, 100) == rle.encode(square)
  square[8:10, 2:4] = True
  assert rle.read([polygon, [2, 8, 4, 8, 4, 10, 2, 10]], 12, 16, 100) == rle.encode(
    square
  )


# -- files that are refused ---------------------------------------------------------------


def _truth():
  box = {'image_id': 7, 'category_id': 1, 'bbox': [1, 2, 3, 4], 'area': 12}
  mask = {'size': [10, 10], 'counts': [5, 5, 90]}
  return {
    'images': [{'id': 7, 'height': 10, 'width': 10}],
    'categories': [{'id': 1, 'name': 'cat'}, {'id': 4, 'name': 'dog'}],
    'annotations': [box | {'id': 3, 'segmentation': mask}],
  }


def _detection(**change):
  mask = {'size': [10, 10], 'counts': '55j2'}  # the run lengths 5, 5, 90, compressed
  row = {'image_id': 7, 'category_id': 4, 'bbox': [1, 2, 3, 4], 'score': 0.5}
  row |= {'segmentation': mask} | change
  return {key: value for key, value in row.items() if value is not None}


MASK = {'size': [10, 10], 'counts': [5, 5, 90]}


@pytest.mark.parametrize(
  ('kind', 'change', 'facts'),
  [
    ('bbox', {'image_id': 9}, ('image_id 9', '7')),
    ('bbox', {'category_id': 2}, ('category_id 2', '1, 4')),
    ('bbox', {'score': float('nan')}, ('score', 'nan', 'finite')),
    ('bbox', {'score': 'high'}, ("'high'",)),
    ('bbox', {'bbox': None}, ("'bbox'",)),
    ('bbox', {'bbox': [1, 2, 3]}, ('bbox', 'left, top, width, height')),
    ('bbox', {'bbox': [1, 2, -3, 4]}, ('bbox', '-3')),
    ('bbox', {'bbox': [1, 2, 1e308, 1e308]}, ('bbox', '1e9')),
    ('segm', {'segmentation': None}, ("'segmentation'",)),
    ('segm', {'segmentation': MASK | {'counts': 'o'}}, ('RLE',)),
    ('segm', {'segmentation': MASK | {'counts': [1, 2]}}, ('run lengths',)),
    ('segm', {'segmentation': MASK | {'counts': [-5, 105]}}, ('run lengths',)),
    ('segm', {'segmentation': MASK | {'size': [5, 20]}}, ('[5, 20]', '[10, 10]')),
    ('segm', {'segmentation': []}, ('polygon',)),
    ('segm', {'segmentation': [[1, 2, 3, 4]]}, ('three corners',)),
    ('segm', {'segmentation': [[0, 0, 1, 1, 1, 1e9]]}, ('corner',)),
  ],
)
def test_detections_that_are_refused(tmp_path, kind, change, facts):
  truth = files.truth(coco_files.write(tmp_path / 'G.json', _truth()))
  path = coco_files.write(tmp_path / 'D.json', [_detection(), _detection(**change)])
  with pytest.raises(UserError, match=naming('D.json', 'detection 1', *facts)):
    files.detections(path, truth, masks=kind == 'segm')


@pytest.mark.parametrize(
  ('key', 'change', 'facts'),
  [
    ('annotations', {'category_id': 2}, ('annotation 0', 'id 3', 'category_id 2')),
    ('annotations', {'area': None}, ('annotation 0', "'area'")),
    ('images', {'id': None}, ('image 0', "'id'")),
    ('images', {'height': 1e308}, ('image 0', 'height')),
    ('categories', {'id': 'cat'}, ('category', 'int', 'str')),
    ('categories', {'id': 4}, ('category', 'same id')),
    ('categories', {'name': None}, ('category 0', "'name'")),
  ],
)
def test_a_ground_truth_that_is_refused(tmp_path, key, change, facts):
  truth = _truth()
  row = truth[key][0] | change
  truth[key][0] = {k: v for k, v in row.items() if v is not None}
  with pytest.raises(UserError, match=naming('G.json', *facts)):
    files.truth(coco_files.write(tmp_path / 'G.json', truth))


def test_files_of_another_form(tmp_path, capsys):
  good = coco_files.write(tmp_path / 'G.json', _truth())
  (tmp_path / 'D.json').write_text('[{"image_id": 7,')
  for gt, dt, facts in (
    (coco_files.write(tmp_path / 'a', []), good, ('a', 'images')),
    (good, coco_files.write(tmp_path / 'b', {}), ('b', 'list')),
    (good, coco_files.write(tmp_path / 'c', [3]), ('c', 'detection 0')),
    (good, tmp_path / 'none.json', ('none.json', 'No such file')),
    (good, tmp_path / 'D.json', ('D.json', 'JSON')),
  ):
    commands.assert_refused(coco_ap.main, capsys, ('--gt', gt, '--dt', dt), facts)
