"""COCO's metric and its masks, against pycocotools' numbers and closed forms."""

import numpy as np
import pytest

from tests.support import coco_files
from vit_jax.detection.coco import average_precision, files, rle
from vit_jax.detection.coco.objects import Detections, Truth

# Sums in another order; measured 0.
EXACT = 1e-9
# As pycocotools a precision is right / (right + wrong + 2.2e-16).
ONE = pytest.approx(1, abs=1e-15)


@pytest.fixture(scope='module')
def golden(tmp_path_factory):
  return coco_files.golden(), coco_files.write_golden(tmp_path_factory.mktemp('coco'))


@pytest.mark.parametrize('kind', average_precision.KINDS)
def test_the_numbers_of_pycocotools(golden, kind):
  want, (gt, dt) = golden
  truth = files.truth(gt, masks=kind == 'segm')
  measured = average_precision.measure(
    truth, files.detections(dt, truth, masks=kind == 'segm'), kind
  )
  close = lambda ours, key: np.testing.assert_allclose(
    ours, want[f'{kind}_{key}'], rtol=0, atol=EXACT
  )
  close(list(measured.numbers().values()), 'stats')
  close(measured.precision[..., 0, 2], 'precision')
  close(measured.recall, 'recall')
  close([measured.of_category(k)['ap'] for k in range(3)], 'ap_per_category')


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
  found = Detections(zeros(boxes), zeros(boxes), np.array(scores, float), boxes)
  return average_precision.measure(truth, found).numbers()


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
  found = [{'image_id': 0, 'category_id': 0, 'bbox': BOX, 'score': 1}]
  truth = files.truth(coco_files.write(tmp_path / 'G.json', z))
  found = files.detections(coco_files.write(tmp_path / 'D.json', found), truth)
  assert average_precision.measure(truth, found).numbers()['ap'] == ONE


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
