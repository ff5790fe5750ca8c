"""`vit_jax coco_ap`: the twelve numbers of files, and files that are refused."""

import json

import numpy as np
import pytest

from tests.support import coco_files, commands
from vit_jax.detection.coco import average_precision
from vit_jax.detection.tools import coco_ap


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  return coco_files.write_golden(tmp_path_factory.mktemp('coco'))


@pytest.mark.parametrize('kind', average_precision.KINDS)
def test_twelve_numbers(capsys, files, kind):
  gt, dt = files
  argv = '--gt', gt, '--dt', dt, '--type', kind, '--json', '--per_class'
  code, out, _ = commands.run(coco_ap.main, capsys, *argv)
  record = json.loads(out)
  want = coco_files.golden()
  assert code == 0
  np.testing.assert_allclose(record['stats'], want[f'{kind}_stats'], rtol=0, atol=1e-9)
  assert record['stats'] == [record[name] for name in average_precision.NAMES]
  assert (record['images'], record['objects'], record['detections']) == (10, 47, 210)
  np.testing.assert_allclose(
    [x['ap'] for x in record['per_class'].values()],
    want[f'{kind}_ap_per_category'],
    rtol=0,
    atol=1e-9,
  )


def test_text(capsys, files):
  gt, dt = files
  argv = '--gt', gt, '--dt', dt, '--per_class'
  code, out, _ = commands.run(coco_ap.main, capsys, *argv)
  stats = coco_files.golden()['bbox_stats']
  assert code == 0
  assert [float(x.split()[-1]) for x in out.splitlines()[1:13]] == stats.round(
    4
  ).tolist()
  assert 'thing' in out
  assert len(out.splitlines()) == 1 + 12 + 1 + 3


MASK = '55j2'  # the run lengths 5, 5, 90, compressed


def _truth():
  box = {'image_id': 7, 'category_id': 1, 'bbox': [1, 2, 3, 4], 'area': 12}
  mask = {'size': [10, 10], 'counts': [5, 5, 90]}
  return {
    'images': [{'id': 7, 'height': 10, 'width': 10}],
    'categories': [{'id': 1, 'name': 'cat'}, {'id': 4, 'name': 'dog'}],
    'annotations': [box | {'id': 3, 'segmentation': mask}],
  }


def _found():
  mask = {'size': [10, 10], 'counts': MASK}
  box = {'image_id': 7, 'category_id': 4, 'bbox': [1, 2, 3, 4], 'score': 0.5}
  return [box, box | {'segmentation': mask}]


def _change(rows, i, **change):
  rows[i] = {k: v for k, v in (rows[i] | change).items() if v is not None}


@pytest.mark.parametrize(
  ('change', 'facts'),
  [
    ({'image_id': 9}, ('detection 1', "'image_id' 9", 'G.json', '7')),
    ({'image_id': [7]}, ('detection 1', 'image')),
    ({'category_id': 2}, ('detection 1', "'category_id' 2", '1, 4')),
    ({'score': float('nan')}, ('detection 1', "'score' nan", 'finite')),
    ({'score': 'high'}, ('detection 1', "'score'", "'high'")),
    ({'score': None}, ('detection 1', "no 'score'")),
    ({'bbox': None}, ('detection 1', "no 'bbox'")),
    ({'bbox': [1, 2, 3]}, ('detection 1', "'bbox'", 'left, top, width, height')),
    ({'bbox': [1, 2, -3, 4]}, ('detection 1', "'bbox'", '-3')),
    ({'bbox': [1, 2, float('inf'), 4]}, ('detection 1', "'bbox'", 'inf')),
    ({'bbox': [1, 2, 1e308, 1e308]}, ('detection 1', "'bbox'", '1e9')),
    ({'bbox': 5}, ('detection 1', "'bbox' 5")),
    ({'bbox': [1, 2, 10**400, 4]}, ('detection 1', "'bbox'")),
  ],
)
def test_detections_that_are_refused(capsys, tmp_path, change, facts):
  found = _found()
  _change(found, 1, **change)
  _refused(capsys, tmp_path, _truth(), found, facts)


@pytest.mark.parametrize(
  ('change', 'facts'),
  [
    ({'counts': '~'}, ('detection 1', 'not the text of run lengths')),
    ({'counts': 'o'}, ('detection 1', 'not the text of run lengths')),
    ({'counts': 'oooooooooo0'}, ('detection 1', '40 bits')),
    ({'counts': [1, 2]}, ('detection 1', '3 pixels')),
    ({'counts': [-5, 105]}, ('detection 1', 'run lengths')),
    ({'size': [5, 20]}, ('detection 1', 'size is [5, 20]')),
    ({'counts': None}, ('detection 1', 'counts')),
  ],
)
def test_masks_that_are_refused(capsys, tmp_path, change, facts):
  found = _found()[1:] * 2
  _change(found, 1, segmentation=found[1]['segmentation'] | change)
  _refused(capsys, tmp_path, _truth(), found, facts, '--type', 'segm')


@pytest.mark.parametrize(
  'polygons',
  [
    [],
    [[1, 2, 3, 4]],
    [[1, 2, 3, 4, 5, 'x']],
    [[1, 2, 3, 4, 5]],
    [[0, 0, 1, 1, 1, 1e9]],
  ],
)
def test_polygons_that_are_refused(capsys, tmp_path, polygons):
  truth = _truth()
  _change(truth['annotations'], 0, segmentation=polygons)
  facts = ('annotation 0', 'id 3', 'segmentation')
  _refused(capsys, tmp_path, truth, _found()[1:], facts, '--type', 'segm')


@pytest.mark.parametrize(
  ('key', 'change', 'facts'),
  [
    ('annotations', {'category_id': 2}, ('annotation 0', 'id 3', "'category_id' 2")),
    ('annotations', {'image_id': 2}, ('annotation 0', "'image_id' 2")),
    ('annotations', {'area': None}, ('annotation 0', "no 'area'")),
    ('annotations', {'area': 'big'}, ('annotation 0', "'area' 'big'")),
    ('images', {'id': None}, ('image 0', "no 'id'")),
    ('images', {'id': 1.5}, ('image 0', '1.5')),
    ('images', {'height': 1e308}, ('image 0', "'height'", 'whole number')),
    ('categories', {'id': 'cat'}, ('category 1', 'id 4', 'text')),
    ('categories', {'id': 4}, ('category 1', '4', 'another')),
    ('categories', {'name': None}, ('category 0', "no 'name'")),
  ],
)
def test_ground_truth_that_is_refused(capsys, tmp_path, key, change, facts):
  truth = _truth()
  _change(truth[key], 0, **change)
  _refused(capsys, tmp_path, truth, _found(), facts)


@pytest.mark.parametrize(
  ('truth', 'found', 'facts'),
  [
    ([], [], ('G.json', 'images')),
    ({'images': []}, [], ('G.json', 'categories')),
    (_truth() | {'annotations': [5]}, [], ('annotation 0', '5')),
    (_truth(), {'image_id': 7}, ('D.json', 'list')),
    (_truth(), [3], ('detection 0', '3')),
  ],
)
def test_files_of_another_form(capsys, tmp_path, truth, found, facts):
  _refused(capsys, tmp_path, truth, found, facts)


def test_files_that_are_not_there_or_not_json(capsys, tmp_path):
  gt = coco_files.write(tmp_path / 'G.json', _truth())
  argv = '--gt', gt, '--dt', tmp_path / 'none.json'
  commands.assert_refused(coco_ap.main, capsys, argv, ('none.json', 'No such file'))
  (tmp_path / 'D.json').write_text('[{"image_id": 7,')
  argv = '--gt', gt, '--dt', tmp_path / 'D.json'
  commands.assert_refused(coco_ap.main, capsys, argv, ('D.json', 'JSON'))


def _refused(capsys, folder, truth, found, facts, *more):
  gt = coco_files.write(folder / 'G.json', truth)
  dt = coco_files.write(folder / 'D.json', found)
  argv = '--gt', gt, '--dt', dt, '--json', *more
  commands.assert_refused(coco_ap.main, capsys, argv, facts)
