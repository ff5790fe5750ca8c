"""predict and evaluate of a detector of bright rectangles."""

import csv
import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from tests.support import bright_detector, commands, naming, stand_in
from tests.support.bright_detector import SCORES
from vit_jax import models
from vit_jax.detection import drawing, inference
from vit_jax.detection.coco import files, rle
from vit_jax.errors import UserError
from vit_jax.tools import evaluate, predict, source

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture(autouse=True)
def detector(monkeypatch):
  monkeypatch.setitem(models.MODELS.data, 'bright', bright_detector.FAMILY)
  monkeypatch.setattr(source, 'load', lambda args: bright_detector.loaded())


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  root = tmp_path_factory.mktemp('coco')
  bright_detector.write_data(root)
  return root


@pytest.fixture
def folder(data, tmp_path):
  """A folder with three of the images, of 48, 64 and 80 pixels, and a bad one."""
  (root := tmp_path / 'images').mkdir()
  for name in ('0.png', '1.png', '2.png'):
    shutil.copy(data / name, root)
  (root / 'bad.png').write_bytes(b'nothing')
  return root


def run(main, capsys, *argv) -> str:
  code, out, _ = commands.run(main, capsys, 'D', *argv)
  assert code == 0
  return out


# -- predict ------------------------------------------------------------------------------


def predicted(capsys, *argv):
  record = json.loads(run(predict.main, capsys, *argv, '--json'))
  return record, {x['path'].rpartition('/')[2]: x for x in record['images']}


@pytest.mark.parametrize('batch', [(), ('--batch', 5)])
def test_boxes_in_pixels_of_the_files(data, capsys, batch):
  record, images = predicted(capsys, data, *batch)
  assert (record['step'], record['threshold']) == (7, 0.7)
  truth = json.loads((data / 'G.json').read_text())
  dogs = [x['bbox'] for x in truth['annotations'] if x['category_id'] == 3]
  assert len(images) == len(dogs) == 12
  for i, box in enumerate(dogs):
    image = images[f'{i}.png']
    for key in ('height', 'width'):
      assert image[key] == truth['images'][i][key]
    (one,) = image['detections']
    assert (one['category_id'], one['category']) == (1, 'dog')
    assert one['score'] == pytest.approx(SCORES[0])
    # Images are made smaller, with antialiasing.
    np.testing.assert_allclose(one['bbox'], box, atol=2.1)


def test_the_threshold(data, capsys):
  _, images = predicted(capsys, data / '1.png', '--threshold', 0.5)
  dog, bird = images['1.png']['detections']
  assert (dog['category'], bird['category']) == ('dog', 'bird')
  assert dog['score'] > bird['score'] == pytest.approx(SCORES[1])
  assert bird['bbox'][3] == pytest.approx(dog['bbox'][3] / 2)
  out = run(predict.main, capsys, data / '1.png', '--threshold', 0.99)
  assert re.search('no box.* 0.99', out)


def test_the_text_and_the_table(folder, tmp_path, capsys):
  table = tmp_path / 'new' / 'boxes.csv'
  out = run(predict.main, capsys, folder, '--csv', table)
  box = r'1\.png \(64 x 64 pixels\)\n +94\.8 %  dog( +\d+\.\d){4}\n'
  assert re.search(box, out)
  assert re.search(r'bad\.png\n  not read: ', out)
  with table.open() as file:
    rows = {Path(row['image']).name: row for row in csv.DictReader(file)}
  row = rows['1.png']
  corners = ' +'.join(row[key].replace('.', r'\.') for key in ('x0', 'y0', 'x1', 'y1'))
  assert re.search(rf'1\.png .*\n +94\.8 %  dog +{corners}\n', out)
  assert (row['class'], row['name']) == ('1', 'dog')
  assert float(row['score']) == pytest.approx(SCORES[0], abs=1e-6)
  assert rows['bad.png']['name'].startswith('not read: ')


def test_drawings(folder, tmp_path, capsys):
  (folder / 'more').mkdir()
  Image.new('L', (30, 20), 255).save(folder / 'more' / '0.jpg')
  out = tmp_path / 'new' / 'boxes'
  _, images = predicted(capsys, folder, '--draw', out)
  names = ['000_0.png', '001_1.png', '002_2.png', '004_0.png']
  assert sorted(path.name for path in out.iterdir()) == names
  image = Image.open(images['1.png']['drawing'])
  assert image.size == (7 * 64, 7 * 64)  # enlarged, for the labels
  pixels = np.asarray(image).reshape(-1, 3)
  colours = [(213, 94, 0), (86, 180, 233)]  # a dog's, and of no class
  assert [(pixels == colour).all(1).any() for colour in colours] == [True, False]
  assert 'drawing' not in images['bad.png']


def test_a_box_is_drawn_where_it_is():
  image = np.zeros((500, 600, 1), np.uint8)
  image[9, 19] = 255
  pixels = np.asarray(drawing.draw(image, [(100, 200, 300, 400)], ['cat'], [2]))
  assert pixels.shape == (500, 600, 3)
  assert (pixels[9, 19] == 255).all()
  green = (pixels == (0, 158, 115)).all(-1)
  assert green[180:199, 100:110].any()  # the label
  green[:200] = False
  rows, columns = np.nonzero(green)
  edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
  assert edges == (100, 200, 300, 400)
  assert not green[205:395, 105:295].any()  # not filled
  # Another box does not cross the label.
  corners = [(110, 100, 400, 300), (100, 200, 300, 400)]
  both = np.asarray(drawing.draw(image, corners, ['dog', 'cat'], [1, 2]))
  label = np.s_[189:196, 100:120]
  np.testing.assert_array_equal(both[label], pixels[label])


@pytest.mark.parametrize(
  ('options', 'facts'),
  [
    (('--top', 3), ('--top', '--threshold')),
    (('--threshold', 'x'), ('--threshold', "'x'")),
    (('--draw', '{tmp}/images'), ('--draw', 'images', 'folder')),
    (('--pp', 'decode|central_crop(48)|value_range(-1, 1)'), ('central_crop', 'boxes')),
  ],
)
def test_predictions_that_are_refused(folder, tmp_path, capsys, options, facts):
  argv = [str(x).format(tmp=tmp_path) for x in options]
  commands.assert_refused(predict.main, capsys, ('D', folder, *argv), facts)


def test_images_that_cannot_be_read(folder):
  inputs = [folder / 'bad.png', folder / '2.png', np.zeros((8, 9, 3), np.uint8)]
  out = inference.detect_images(bright_detector.loaded(), inputs, batch_size=2)
  assert [error is None for error in out.errors] == [False, True, True]
  assert np.isnan(out.boxes[0]).all()
  assert (out.labels[0] == -1).all()
  assert [sorted(size) for size in out.sizes.tolist()] == [[-1, -1], [64, 80], [8, 9]]
  assert inference.detect_images(bright_detector.loaded(), []).boxes.shape == (0, 3, 4)
  with pytest.raises(UserError, match=naming('list')):
    inference.detect_images(bright_detector.loaded(), inputs[1])


def test_photographs_as_they_are_held(tmp_path, capsys):
  # EXIF turns it, and the JPEG is decoded at a fraction of its size.
  image = np.zeros((400, 800, 3), np.uint8)
  image[100:300, 80:240] = 255
  exif = Image.Exif()
  exif[0x0112] = 6  # a quarter turn clockwise
  Image.fromarray(image).save(tmp_path / 'a.jpg', exif=exif, quality=95)
  pp = 'decode|resize(48)|value_range(-1, 1)'
  for change in ((), ('--pp', pp)):
    _, images = predicted(capsys, tmp_path / 'a.jpg', *change)
    (one,) = images['a.jpg']['detections']
    assert (images['a.jpg']['height'], images['a.jpg']['width']) == (800, 400)
    np.testing.assert_allclose(one['bbox'], [100, 80, 200, 160], atol=18)


@pytest.fixture
def regions(monkeypatch):
  """The detector with masks in the place of the other."""
  model = bright_detector.BrightRegions()
  monkeypatch.setitem(models.MODELS.data, 'regions', bright_detector.REGIONS)
  monkeypatch.setattr(source, 'load', lambda args: bright_detector.loaded(model))


def test_classes_without_names_have_the_numbers_of_their_origin(
  data, capsys, monkeypatch
):
  for origin, number in (('detectron2', '1'), ('torchvision', '2')):
    model = bright_detector.BrightDetector()
    object.__setattr__(model, 'origin', origin)
    loaded = dataclasses.replace(bright_detector.loaded(model), class_names=None)
    monkeypatch.setattr(source, 'load', lambda args, loaded=loaded: loaded)
    _, images = predicted(capsys, data / '1.png')
    (dog,) = images['1.png']['detections']
    assert (dog['category_id'], dog['category']) == (1, number)


class Canvas(bright_detector.BrightDetector):
  """Answers with the size of its canvas in per cent, as that of its last box."""

  def __call__(self, images, mask=None, train=False):
    outputs, out = super().__call__(images, mask)
    boxes = (
      outputs['boxes'].at[:, 2].set(jnp.array([0.5, 0.5, *images.shape[1:3]]) / 100)
    )
    return {**outputs, 'boxes': boxes}, out


def test_the_canvas_follows_the_images(folder, monkeypatch):
  family = dataclasses.replace(bright_detector.FAMILY, model=Canvas)
  monkeypatch.setitem(models.MODELS.data, 'canvas', family)
  loaded = bright_detector.loaded(Canvas())

  def canvases(*names, **options):
    paths = [folder / name for name in names]
    detections = inference.detect_images(loaded, paths, **options)
    sides = detections.boxes[:, 2, 2:] - detections.boxes[:, 2, :2]
    return (100 * sides / detections.sizes[:, ::-1]).round().tolist()

  # 1.png is a square of 32 pixels on its canvas; the longer side of 2.png is 40.
  assert canvases('1.png', 'bad.png')[0] == [32, 32]
  (wide,) = canvases('2.png')
  assert sorted(wide) == [32, 48]
  assert canvases('1.png', '2.png', batch_size=2) == [wide, wide]
  # Some models of the family have a table of positions, as CLIP's of all ResNets.
  family = dataclasses.replace(family, positions=(('table', 'hw'),))
  monkeypatch.setitem(models.MODELS.data, 'canvas', family)
  assert canvases('1.png') == [[32, 32]]
  # It would be resized for another canvas.
  loaded = dataclasses.replace(loaded, variables={'params': {'table': np.zeros(1)}})
  assert canvases('1.png') == [[48, 48]]


@pytest.mark.usefixtures('regions')
def test_masks_are_printed_and_drawn(folder, tmp_path, capsys):
  out = tmp_path / 'drawn'
  record, images = predicted(capsys, folder, '--draw', out)
  assert record['threshold'] == 0.5  # detectron2's, and what is not valid is left out
  dog, bird = images['1.png']['detections']
  pixels = np.asarray(Image.open(folder / '1.png').convert('L')) > 128
  mask = rle.decode(dog['segmentation'])
  # The network sees the image smaller.
  assert (mask != pixels).mean() < 0.05
  assert dog['area'] == mask.sum()
  assert bird['area'] == pytest.approx(dog['area'] / 2, rel=0.1)
  drawn = np.asarray(Image.open(images['1.png']['drawing']).resize((64, 64), 0))
  orange, sky = drawn[mask & ~rle.decode(bird['segmentation'])], drawn[~pixels & ~mask]
  assert (np.median(orange, 0) == (234, 174, 127)).all()  # half white, half its colour
  assert (np.median(sky, 0) == 0).all()
  text = run(predict.main, capsys, folder)
  assert 'the last number is the area' in text
  assert re.search(rf'94\.8 %  dog .* {dog["area"]:,}\n', text)


def test_a_mask_is_drawn_on_its_pixels():
  image, mask = np.full((500, 600, 3), 100, np.uint8), np.zeros((500, 600), bool)
  mask[210:390, 120:280] = True
  pixels = np.asarray(
    drawing.draw(image, [(100, 200, 300, 400)], ['cat'], [2], masks=[mask])
  )
  assert (pixels[211:389, 121:279] == (50, 129, 107)).all()  # half green
  assert (pixels[210, 120:280] == (0, 158, 115)).all()  # the edge
  assert (pixels[205:209, 105:295] == 100).all()


# -- evaluate -----------------------------------------------------------------------------


def options(data):
  return '--data', f'coco:{data}/G.json,{data}', '--split', 'train'


def test_the_twelve_numbers_and_files(data, tmp_path, capsys):
  out = tmp_path / 'out'
  record = json.loads(
    run(evaluate.main, capsys, *options(data), '--out', out, '--json')
  )
  assert (record['step'], record['split'], record['examples']) == (7, 'train', 12)
  # It detects all dogs, and no cat.
  assert record['ap50'] == pytest.approx(0.5)
  assert 0.3 < record['ap'] < 0.5
  assert 'ap_large' not in record
  assert json.loads((out / 'summary.json').read_text()) == record
  with (out / 'per_class.csv').open() as file:
    rows = list(csv.DictReader(file))
  classes = [(row['class'], row['name'], row['objects']) for row in rows]
  assert classes == [('3', 'dog', '12'), ('7', 'cat', '3')]
  assert float(rows[0]['ap50']) == pytest.approx(1)
  results = json.loads((out / 'detections.json').read_text())
  assert len(results) == 12 * 2  # the data has no birds
  best = max(results, key=lambda row: row['score'])
  assert best.keys() == {'image_id', 'category_id', 'bbox', 'score'}
  assert best['category_id'] == 3


def test_the_text_of_an_evaluation(data, capsys):
  lines = run(evaluate.main, capsys, *options(data), '--batch', 5).splitlines()
  assert lines[0] == 'step            7'
  assert lines[1].split()[-1] == 'train'
  assert lines[3].split() == ['ap50', '50.00%']
  assert lines[-1] == 'examples        12'


def test_a_run_repeats_its_own_evaluation(data, tmp_path, capsys):
  name, split = f'coco:{data}/G.json,{data}', 'train[:8]'
  pp = f'{bright_detector.PP}|pad_to(boxes=2, label=2)'
  evals = {'val': {'type': 'coco', 'data': {'source': name, 'split': split, 'pp': pp}}}
  config = {'model': {'name': 'detr'}, 'task': {'name': 'detect'}, 'evals': evals}
  stand_in.write_run(tmp_path, config)
  (tmp_path / 'checkpoints').mkdir()
  code, out, _ = commands.run(evaluate.main, capsys, tmp_path, '--json')
  record = json.loads(out)
  assert (code, record['evaluation'], record['split']) == (0, 'val', split)
  assert (record['examples'], record['ap50']) == (8, pytest.approx(0.5))


@pytest.mark.usefixtures('regions')
def test_masks_are_evaluated_where_the_data_has_any(data, tmp_path, capsys):
  out = tmp_path / 'out'
  argv = *options(data), '--out', out, '--json'
  record = json.loads(run(evaluate.main, capsys, *argv))
  # All dogs, by boxes and by masks, and no cat.
  assert record['ap50'] == record['mask_ap50'] == pytest.approx(0.5)
  assert 'mask_ap_large' not in record
  results = json.loads((out / 'detections.json').read_text())
  assert len(results) == 12  # no birds
  truth = files.truth(data / 'G.json', masks=True)
  best = [rle.decode(row['segmentation']) for row in results]
  dogs = [rle.decode(x) for x in truth.masks if x['size'][0] * x['size'][1]]
  areas = sorted(mask.sum() for mask in best)
  dogs = sorted(x.sum() for x, k in zip(dogs, truth.category, strict=True) if k == 0)
  np.testing.assert_allclose(areas, dogs, rtol=0.15)
  with (out / 'per_class.csv').open() as file:
    assert float(next(csv.DictReader(file))['mask_ap50']) == pytest.approx(1)
  text = run(evaluate.main, capsys, *options(data))
  assert re.search(r'mask_ap50 +50.00%', text)
  # Without masks in the data, boxes alone.
  content = json.loads((data / 'G.json').read_text())
  for row in content['annotations']:
    del row['segmentation']
  (tmp_path / 'G.json').write_text(json.dumps(content))
  argv = 'D', '--data', f'coco:{tmp_path}/G.json,{data}', '--split', 'train', '--json'
  code, record, why = commands.run(evaluate.main, capsys, *argv)
  assert code == 0
  assert 'Masks are not compared: ' in why
  assert {'ap50'} == {'ap50', 'mask_ap50'} & json.loads(record).keys()


@pytest.mark.parametrize(
  ('more', 'facts'),
  [
    (('--loss', 'sigmoid'), ('--loss', 'detector')),
    (('--pp', 'decode|resize(32)|value_range(-1, 1)'), ('(32, 32, 3)', '(48, 48, 3)')),
    (
      ('--data', 'digits', '--split', 'test', '--pp', 'value_range(-1, 1)'),
      ('no boxes',),
    ),
    (('--data', 'digits_canvas', '--split', 'test[:4]'), ("'0'", 'class')),
  ],
)
def test_evaluations_that_are_refused(data, capsys, more, facts):
  commands.assert_refused(evaluate.main, capsys, ('D', *options(data), *more), facts)
