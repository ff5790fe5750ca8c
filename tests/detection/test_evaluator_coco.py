"""The evaluator 'coco': exact in original pixels, on any devices, with bad images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import bright_detector, naming
from tests.support.figures import decoded
from vit_jax import evaluators, sharding
from vit_jax.data import sources
from vit_jax.detection import boxes
from vit_jax.detection.coco import average_precision, rle
from vit_jax.detection.coco.objects import Detections
from vit_jax.detection.tools import report_objects
from vit_jax.errors import UserError
from vit_jax.evaluators.class_match import Classes
from vit_jax.tools.report import page
from vit_jax.tools.report.folder import Run

QUERIES, SPLIT = 5, 'test[:13]'
PP = 'value_range(-1, 1)|pad_to(boxes=1, label=1)'  # the truth is not what pp keeps


def build(devices=1, model=None, masks=False, **change):
  data = dict(source='digits_canvas', split=SPLIT, pp=PP, batch_size=8) | change
  mesh = sharding.make_mesh(devices=jax.devices()[:devices])
  return evaluators.build('coco', mesh, data=data, model=model, masks=masks)


def table(truth, classes, columns=range(10), noise=0.0):
  """Returns outputs {'logits' [N, Q, K+1], 'boxes' [N, Q, 4]}: the truth, moved at random.

  Queries without an object answer with none.

  Args:
    columns: the model's class of each category.
  """
  rng = np.random.default_rng(0)
  N = len(truth.image_ids)
  logits = np.zeros((N, QUERIES, classes + 1), np.float32)
  logits[..., -1] = 9
  centres = np.full((N, QUERIES, 4), 0.5, np.float32)
  for i in range(N):
    for q, row in enumerate(np.flatnonzero(truth.image == i)):
      left, top, width, height = truth.boxes[row] / np.tile(truth.sizes[i][::-1], 2)
      centres[i, q] = left + width / 2, top + height / 2, width, height
      logits[i, q, [columns[truth.category[row]], -1]] = rng.uniform(1, 4), 0
  centres *= 1 + noise * rng.normal(size=centres.shape)
  return {'logits': logits, 'boxes': centres.astype(np.float32)}


def predict(params, batch):
  # NaN where there is no image, as a norm layer might give there.
  lost = jnp.where(batch['mask'] > 0, 0, jnp.nan)[:, None, None]
  return {k: x[batch['index']] + lost for k, x in params.items()}


@pytest.fixture(scope='module')
def truth():
  return sources.build('digits_canvas', SPLIT).truth()


def test_perfect_answers(truth):
  numbers = build().run(predict, table(truth, 10))
  assert numbers['examples'] == 13
  for name in ('ap', 'ap50', 'ap75', 'ar_100', 'ap_small'):
    assert numbers[name] == pytest.approx(1)
  # Numbers that nothing counts for are left out: no digit is large.
  assert 'ap_large' not in numbers
  assert all(isinstance(x, float | int) for x in numbers.values())


@pytest.fixture(scope='module')
def regions():
  """Outputs with boxes and masks, all of them right, and a row that is not valid."""
  truth = sources.build('digits_canvas', SPLIT).truth(masks=True)
  N = len(truth.image_ids)
  out = {
    'boxes': np.zeros((N, QUERIES, 4), np.float32),
    'scores': np.full((N, QUERIES), 0.9, np.float32),
    'labels': np.zeros((N, QUERIES), np.int32),
    'valid': np.zeros((N, QUERIES), bool),
    'masks': np.zeros((N, QUERIES, 28, 28), np.float32),
  }
  for i in range(N):
    for q, row in enumerate(np.flatnonzero(truth.image == i)):
      left, top, w, h = truth.boxes[row].astype(int)
      out['boxes'][i, q] = np.divide([left, top, left + w, top + h], 64)
      out['labels'][i, q], out['valid'][i, q] = truth.category[row], True
      pixels = rle.decode(truth.masks[row])[top : top + h, left : left + w]
      nearest = [np.arange(28) * n // 28 for n in (h, w)]
      out['masks'][i, q] = pixels[np.ix_(*nearest)]
  return out


def numbers_of(regions, devices=1, **change):
  predict = lambda params, batch: {k: x[batch['index']] for k, x in params.items()}
  return build(devices, masks=True).run(predict, regions | change)


@pytest.mark.parametrize('devices', [1, 8])
def test_masks(regions, devices):
  numbers = numbers_of(regions, devices)
  assert numbers['ap'] == pytest.approx(1)
  assert numbers['mask_ap50'] == pytest.approx(1)
  assert numbers['mask_ap'] > 0.7  # 28 cells over up to 28 pixels
  assert 'mask_ap_large' not in numbers
  # Boxes do not depend on masks, nor numbers of masks on boxes' classes alone.
  lost = numbers_of(regions, devices, masks=1 - regions['masks'])
  assert lost['ap'] == pytest.approx(1)
  assert lost['mask_ap50'] < 0.2
  none = numbers_of(regions, devices, valid=np.zeros_like(regions['valid']))
  assert none['ap'] == none['mask_ap'] == 0


def test_a_mask_counts_in_the_pixels_of_the_image(regions):
  # As pycocotools counts pixels that are pasted one by one.
  evaluator = build(masks=True)
  predict = lambda params, batch: {k: x[batch['index']] for k, x in params.items()}
  evaluator.run(predict, regions)
  truth, found = evaluator.compared
  assert len(found.masks) == regions['valid'].sum()
  for image, box, mask in zip(found.image, found.boxes, found.masks, strict=True):
    pixels = rle.decode(mask)
    assert pixels.shape == tuple(truth.sizes[image])
    rows, columns = (np.flatnonzero(pixels.any(axis)) for axis in (1, 0))
    left, top, w, h = box
    assert top - 1 <= rows.min() <= rows.max() <= top + h
    assert left - 1 <= columns.min() <= columns.max() <= left + w


def test_unsure_answers_are_drawn_too(truth):
  outputs = table(truth, 10)
  # No answer of a digit scores 30 %.
  outputs['logits'][..., -1] = 9
  evaluator = build()
  evaluator.run(predict, outputs)
  boxes = evaluator.predictions['boxes']
  assert boxes[:, 2].max() < 0.3
  assert np.unique(boxes[:, 0], return_counts=True)[1].tolist() == [3] * 8
  for place in range(8):
    scores = boxes[boxes[:, 0] == place, 2]
    _, detections = evaluator.compared
    rows = detections.image == evaluator.predictions['index'][place]
    np.testing.assert_allclose(np.sort(scores), np.sort(detections.scores[rows])[-3:])


def test_masks_that_are_not_there(truth):
  with pytest.raises(UserError, match=naming('masks=True', 'boxes without masks')):
    build(masks=True).run(predict, table(truth, 10))


def test_the_page_of_a_run_draws_boxes_where_objects_are(truth):
  evaluator = build()
  evaluator.run(predict, table(truth, 10))
  answers = evaluator.predictions
  np.testing.assert_allclose(answers['precision'], 1)
  assert answers['objects'].sum() == len(truth.image)
  data = dict(source='digits_canvas', split=SPLIT, pp=PP)
  config = {'model': {'name': 'detr'}, 'resolved': {}, 'data': data}
  config['evals'] = {'test': {'type': 'coco', 'data': data}}
  run = Run(None, '', config, {}, [], [], [], {'test': answers}, [])
  part = report_objects.boxes(run, 'test')
  assert not part['why']
  assert len(part['pictures']) == 8
  assert {row[3] for row in part['rows'] if row[1] != '0'} == {'100.0%'}  # AP50
  for place, (_, *pictures) in enumerate(part['pictures']):
    expected = truth.boxes[truth.image == answers['index'][place]]
    given = answers['boxes'][answers['boxes'][:, 0] == place, 3:]
    pairs = [x for x in zip(pictures, (expected, given), strict=True) if len(x[1])]
    for picture, (left, top, _, height) in ((x, rows.T) for x, rows in pairs):
      colour = np.ptp(decoded(picture).astype(int), -1) > 25  # frames; digits are gray
      rows, columns = (np.flatnonzero(colour.any(k)) * 64 / 360 for k in (1, 0))
      assert columns.min() == pytest.approx(left.min(), abs=2.5)
      assert rows.max() == pytest.approx((top + height).max(), abs=2.5)
  # Pictures stand before results and curves.
  answers['step'] = 7
  html, _ = page.render([run])
  places = [html.index(x) for x in ('Pictures beside', 'id="results"', 'id="curves"')]
  assert places == sorted(places)


def test_as_computed_from_all_detections(truth):
  outputs = table(truth, 10, noise=0.05)
  answers = boxes.postprocess(outputs)
  corners = 64 * np.asarray(answers['boxes'], np.float64).reshape(-1, 4)
  expected, *_ = average_precision.measure(
    truth,
    Detections(
      np.repeat(np.arange(13), QUERIES),
      np.asarray(answers['labels']).reshape(-1),
      np.asarray(answers['scores'], np.float64).reshape(-1),
      np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1),
    ),
  )
  assert 0.1 < expected['ap'] < 0.95
  for devices in (1, 8):  # 13 images in batches of 8: three are padding
    numbers = build(devices).run(predict, outputs)
    for name in ('ap', 'ap50', 'ap75', 'ar_1'):
      assert numbers[name] == pytest.approx(expected[name], abs=1e-6)


def test_classes_are_matched_by_name_or_number(truth):
  outputs = table(truth, 10)
  assert build(model=Classes(None, 10)).run(predict, outputs)['ap'] == pytest.approx(1)
  with pytest.raises(UserError, match=naming('10 classes', '12')):
    build(model=Classes(None, 12))
  with pytest.raises(UserError, match=naming('digits_canvas', "'0'", 'class')):
    build(model=Classes(['cat', *map(str, range(1, 10))], 10))
  # As the published models' 91 classes, of which 80 are categories.
  names = ['N/A', *(str(k) for k in reversed(range(10))), 'N/A']
  evaluator = build(model=Classes(names, 12))
  outputs = table(truth, 12, [names.index(str(k)) for k in range(10)])
  outputs['logits'][:, -1, 11] = 20  # sure of a class that the data does not have
  assert evaluator.run(predict, outputs)['ap'] == pytest.approx(1)
  assert {*evaluator.compared[1].category} <= {*range(10)}


def test_images_of_all_sizes_one_of_them_broken(tmp_path):
  bright_detector.write_data(tmp_path)
  (tmp_path / '2.png').write_bytes(b'broken')
  change = dict(
    source=f'coco:{tmp_path}/G.json,{tmp_path}',
    split='train',
    pp=f'decode|detr_resize(8, 16)|canvas(16)|{PP}',
    max_bad_fraction=1,
  )
  whole = sources.build(change['source'], 'train').truth()
  numbers = build(**change).run(predict, table(whole, 2))
  assert numbers['ap'] == pytest.approx(1)
  assert (numbers['examples'], numbers['bad_images']) == (11, 1)


@pytest.mark.parametrize(
  ('change', 'facts'),
  [
    ({'source': 'digits', 'pp': 'value_range(-1, 1)'}, ('digits', 'boxes')),
    ({'pp': f'flip_lr|{PP}'}, ('flip_lr', 'moves')),
    ({'pp': f'central_crop(8)|{PP}'}, ('central_crop(8)', 'moves')),
  ],
)
def test_data_that_does_not_fit(change, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    build(**change)
