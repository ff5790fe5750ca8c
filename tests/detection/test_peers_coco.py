"""pycocotools computes what we compute, of random objects with ties and odd shapes.

Run by `make peer`.
"""

import contextlib
import io

import numpy as np
import pytest

from tests.support import coco_files
from vit_jax.detection.coco import average_precision, files, polygon, rle

pytestmark = [
  pytest.mark.peer,
  pytest.mark.filterwarnings('default'),
]

HEIGHT, WIDTH = 120, 170


@pytest.fixture(scope='module')
def theirs():
  return pytest.importorskip('pycocotools.mask', reason='pycocotools is not installed')


def _corners(rng, reach=1.3):
  n = rng.integers(3, 12)
  corners = rng.uniform(-0.2, reach, (n, 2)) * [WIDTH, HEIGHT]
  # Also corners on the centres and edges of pixels, and equal ones.
  return np.round(corners * rng.choice([1, 2, 10])) / rng.choice([1, 2, 10])


def test_polygons_and_run_lengths(theirs):
  rng = np.random.default_rng(0)
  for _ in range(500):
    parts = [_corners(rng) for _ in range(rng.integers(1, 4))]
    flat = [part.reshape(-1).tolist() for part in parts]
    packed = theirs.frPyObjects(flat, HEIGHT, WIDTH)
    each = [polygon.counts(part, HEIGHT, WIDTH) for part in parts]
    for one, counts in zip(packed, each, strict=True):
      np.testing.assert_array_equal(
        rle.decode(counts, HEIGHT, WIDTH), theirs.decode(one)
      )
    whole = theirs.merge(packed)
    np.testing.assert_array_equal(
      rle.decode(rle.union(each), HEIGHT, WIDTH), theirs.decode(whole)
    )
    text = whole['counts'].decode()
    counts = rle.of_string(text)
    assert rle.area(counts) == theirs.area(whole)
    assert rle.to_string(counts) == text


def _objects(rng, images, number):
  """Boxes near one another, so that many overlap; polygons in them."""
  for i in range(number):
    low = rng.uniform(0, [WIDTH - 30, HEIGHT - 30])
    low = np.round(low / 15) * 15 + rng.normal(0, 1.5, 2)
    sides = rng.choice([8, 30, 60, 100]) * rng.uniform(0.8, 1.2, 2)
    angles = np.sort(rng.uniform(0, 2 * np.pi, 7))
    corners = low + sides / 2 * (1 + np.stack([np.cos(angles), np.sin(angles)], 1))
    yield {
      'id': i + 1,
      'image_id': int(rng.choice(images)),
      'category_id': int(rng.choice([3, 7, 20])),
      'bbox': [*low.tolist(), *sides.tolist()],
      'segmentation': [corners.reshape(-1).tolist()],
    }


def _moved(rng, x):
  by = np.round(rng.normal(0, 2, 2))
  corners = np.array(x['segmentation'][0]).reshape(-1, 2) + by
  return x | {
    'bbox': (np.array(x['bbox']) + [*by, 0, 0]).tolist(),
    'segmentation': [corners.reshape(-1).tolist()],
  }


@pytest.mark.parametrize('seed', range(3))
def test_average_precision(theirs, tmp_path, seed):
  from pycocotools.coco import COCO
  from pycocotools.cocoeval import COCOeval

  rng = np.random.default_rng(seed)
  images = list(range(40, 60))
  truth = {
    'images': [{'id': i, 'height': HEIGHT, 'width': WIDTH} for i in images],
    'categories': [{'id': i, 'name': str(i)} for i in (3, 7, 20, 90)],
    'annotations': [
      x
      | {
        'area': float(np.prod(x['bbox'][2:]) * 0.7),
        'iscrowd': int(rng.random() < 0.15),
      }
      for x in _objects(rng, images[:-2], 150)
    ],
  }
  # Scores that are often equal; one category is crowded beyond the limit of 100.
  some = [*_objects(rng, images[2:], 90), *_objects(rng, images[3:4], 400)]
  found = [
    {k: v for k, v in x.items() if k not in ('id', 'area', 'iscrowd')}
    | {'score': float(np.round(rng.random(), 1))}
    for x in some + [_moved(rng, x) for x in truth['annotations'] for _ in range(3)]
  ]
  gt = coco_files.write(tmp_path / 'G.json', truth)
  for kind in average_precision.KINDS:
    # pycocotools takes the area of a box where there is one, also of masks.
    drop = 'bbox' if kind == 'segm' else 'segmentation'
    packed = []
    for x in found:
      row = {k: v for k, v in x.items() if k != drop}
      if kind == 'segm':
        mask = theirs.merge(theirs.frPyObjects(x['segmentation'], HEIGHT, WIDTH))
        row['segmentation'] = mask | {'counts': mask['counts'].decode()}
      packed.append(row)
    dt = coco_files.write(tmp_path / 'D.json', packed)
    with contextlib.redirect_stdout(io.StringIO()):
      their_truth = COCO(str(gt))
      judge = COCOeval(their_truth, their_truth.loadRes(str(dt)), kind)
      judge.evaluate()
      judge.accumulate()
      judge.summarize()
    ours = files.truth(gt, masks=kind == 'segm')
    measured = average_precision.measure(
      ours, files.detections(dt, ours, masks=kind == 'segm'), kind
    )
    np.testing.assert_allclose(
      list(measured.numbers().values()), judge.stats, rtol=0, atol=1e-9
    )
    assert measured.numbers()['ap'] > 0.05
    np.testing.assert_allclose(
      measured.precision, judge.eval['precision'], rtol=0, atol=1e-9
    )
    np.testing.assert_allclose(measured.recall, judge.eval['recall'], rtol=0, atol=1e-9)
