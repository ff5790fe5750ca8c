"""predict of a detector: boxes in pixels of the files, thresholds, drawings, refusals."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.support import bright_detector, commands, naming
from tests.support.bright_detector import SCORES
from vit_jax import cli
from vit_jax.detection import drawing, inference
from vit_jax.errors import UserError
from vit_jax.tools import predict, source

# Name, height and width, and the bright box: left, top, right, bottom in pixels.
FILES = {
  'wide.png': ((64, 96), (12, 8, 60, 40)),
  'tall.png': ((96, 64), (8, 40, 40, 92)),
  'square.png': ((64, 64), (32, 0, 64, 64)),
}
WITHIN = 2.1  # pixels: images are halved, with antialiasing


@pytest.fixture(autouse=True)
def detector(monkeypatch):
  monkeypatch.setattr(source, 'load', lambda args: bright_detector.loaded())


@pytest.fixture
def folder(tmp_path):
  root = tmp_path / 'images'
  root.mkdir()
  for name, (size, (left, top, right, bottom)) in FILES.items():
    image = np.zeros((*size, 3), np.uint8)
    image[top:bottom, left:right] = 255
    Image.fromarray(image).save(root / name)
  return root


def run(*args):
  return cli.run(predict.main, [str(a) for a in args])


def predicted(capsys, *args):
  assert run('D', *args, '--json') == 0
  record = json.loads(capsys.readouterr().out)
  return record, {x['path'].rpartition('/')[2]: x for x in record['images']}


@pytest.mark.parametrize('batch', [(), ('--batch', 2)])
def test_boxes_in_pixels_of_the_files(folder, capsys, batch):
  record, images = predicted(capsys, folder, *batch)
  assert (record['step'], record['threshold']) == (7, 0.7)
  for name, ((height, width), (left, top, right, bottom)) in FILES.items():
    image = images[name]
    assert (image['height'], image['width']) == (height, width)
    (one,) = image['detections']
    assert (one['category_id'], one['category']) == (1, 'dog')
    assert one['score'] == pytest.approx(SCORES[0])
    expected = left, top, right - left, bottom - top
    np.testing.assert_allclose(one['bbox'], expected, atol=WITHIN)


def test_the_threshold(folder, capsys):
  _, images = predicted(capsys, folder / 'wide.png', '--threshold', 0.5)
  dog, bird = images['wide.png']['detections']
  assert (dog['category'], bird['category']) == ('dog', 'bird')
  assert dog['score'] > bird['score'] == pytest.approx(SCORES[1])
  assert bird['bbox'][3] == pytest.approx(dog['bbox'][3] / 2)
  _, images = predicted(capsys, folder / 'wide.png', '--threshold', 0)
  assert len(images['wide.png']['detections']) == 3
  assert run('D', folder / 'wide.png', '--threshold', 0.99) == 0
  assert re.search('no box.* 0.99', capsys.readouterr().out)


def test_the_text(folder, tmp_path, capsys):
  names = tmp_path / 'names.txt'
  names.write_text('a\nlong name\nc')
  (folder / 'bad.png').write_bytes(b'nothing')
  assert run('D', folder, '--names', names) == 0
  out = capsys.readouterr().out
  assert re.search(
    r'wide\.png \(96 x 64 pixels\)\n +94\.8 %  long name( +\d+\.\d){4}\n', out
  )
  assert re.search(r'bad\.png\n  not read: ', out)


def test_drawings(folder, tmp_path, capsys):
  (folder / 'more').mkdir()
  Image.new('L', (30, 20), 255).save(folder / 'more' / 'wide.jpg')
  (folder / 'bad.png').write_bytes(b'nothing')
  out = tmp_path / 'new' / 'drawn'
  _, images = predicted(capsys, folder, '--draw', out)
  names = ['001_wide.png', '002_square.png', '003_tall.png', '004_wide.png']
  assert sorted(path.name for path in out.iterdir()) == names
  image = Image.open(images['tall.png']['drawing'])
  sky = (86, 180, 233)  # not a colour of these classes
  vermilion = (213, 94, 0)
  pixels = np.asarray(image).reshape(-1, 3)
  assert (pixels == vermilion).all(1).any()
  assert not (pixels == sky).all(1).any()
  assert 'drawing' not in images['bad.png']


@pytest.mark.parametrize(
  ('options', 'facts'),
  [
    (('--top', 3), ('--top', '--threshold')),
    (('--threshold', 'x'), ('--threshold', "'x'")),
    (('--draw', '{tmp}/images'), ('--draw', 'images', 'folder')),
    (('--pp', 'decode|central_crop(48)|value_range(-1, 1)'), ('central_crop', 'boxes')),
  ],
)
def test_refusals_are_one_line(folder, tmp_path, capsys, options, facts):
  argv = [str(x).format(tmp=tmp_path) for x in options]
  commands.assert_refused(predict.main, capsys, ('D', folder, *argv), facts)


def test_images_that_cannot_be_read(folder):
  (folder / 'bad.png').write_bytes(b'nothing')
  inputs = [folder / 'bad.png', folder / 'wide.png', np.zeros((8, 8, 3), np.uint8)]
  out = inference.detect_images(bright_detector.loaded(), inputs, batch_size=2)
  assert [error is None for error in out.errors] == [False, True, True]
  assert np.isnan(out.boxes[0]).all()
  assert (out.labels[0] == -1).all()
  np.testing.assert_array_equal(out.sizes, [(-1, -1), (64, 96), (8, 8)])
  assert inference.detect_images(bright_detector.loaded(), []).boxes.shape == (0, 3, 4)
  with pytest.raises(UserError, match=naming('list')):
    inference.detect_images(bright_detector.loaded(), inputs[1])


def test_photographs_as_they_are_held(tmp_path, capsys):
  # Turned by EXIF, and a JPEG that is decoded at a fraction of its size.
  image = np.zeros((400, 800, 3), np.uint8)
  image[100:300, 80:240] = 255
  exif = Image.Exif()
  exif[0x0112] = 6  # to be turned clockwise
  Image.fromarray(image).save(tmp_path / 'a.jpg', exif=exif, quality=95)
  pp = 'decode|resize(48)|value_range(-1, 1)'
  for change in ((), ('--pp', pp)):
    _, images = predicted(capsys, tmp_path / 'a.jpg', *change)
    (one,) = images['a.jpg']['detections']
    assert (images['a.jpg']['height'], images['a.jpg']['width']) == (800, 400)
    np.testing.assert_allclose(one['bbox'], [100, 80, 200, 160], atol=18)


# -- drawing ------------------------------------------------------------------------------


def test_a_box_is_drawn_where_it_is():
  image = np.zeros((500, 600, 1), np.uint8)
  drawn = np.asarray(drawing.draw(image, [(100, 200, 300, 400)], ['cat'], [2]))
  assert drawn.shape == (500, 600, 3)
  green = (drawn == (0, 158, 115)).all(-1)
  assert green[180:199, 100:110].any()  # the label
  green[:200] = False
  rows, columns = np.nonzero(green)
  edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
  assert edges == (100, 200, 300, 400)
  assert not green[205:395, 105:295].any()  # not filled


def test_boxes_may_leave_the_image():
  image = np.zeros((40, 60, 3), np.uint8)
  drawn = drawing.draw(image, [(-50, -50, 90, 90), (30, 38, 30, 38)], ['', ''], [0, 1])
  assert drawn.size == (600, 400)  # enlarged, for the labels
  assert drawn.getpixel((0, 399)) == (0, 114, 178)
