"""Prediction: names, probabilities, features, and images that cannot be read."""

import csv
import json
import re
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

from tests.support import GOLDEN, commands, image_folder, naming
from vit_jax import cli, inference, sharding, weights
from vit_jax.data import single_image
from vit_jax.errors import UserError
from vit_jax.tools import predict

SOURCE = str(GOLDEN / 'vit_google_token.npz')


@pytest.fixture
def folder(tmp_path):
  """Five images, one of them broken, in a folder with a sub-folder."""
  names = ('a.png', 'sub/b.jpg', 'c.webp', 'd.bmp')
  folder = image_folder.write_noise(tmp_path / 'images', names, (40, 50))
  (folder / 'bad.png').write_text('no image')
  return folder


def run(*args):
  return cli.run(predict.main, [str(a) for a in args])


def test_logits_are_the_models(folder):
  loaded = weights.load(SOURCE)
  image = np.asarray(Image.open(folder / 'a.png').resize((32, 32)))
  predicted = inference.predict_images(loaded, [image] * 3, batch_size=2)
  x = image[None].astype(np.float32) / 127.5 - 1
  expected, _ = jax.jit(loaded.model.apply)({'params': loaded.params}, x)
  np.testing.assert_allclose(predicted.logits, np.repeat(expected, 3, 0), atol=2e-6)
  assert predicted.errors == [None] * 3


def test_options_of_the_compiler(monkeypatch):
  monkeypatch.setattr(sharding, 'compiler_options', lambda mesh: {'xla_own': 'true'})
  image = np.zeros((32, 32, 3), np.uint8)
  with pytest.raises(jax.errors.JaxRuntimeError, match='xla_own'):
    inference.predict_images(weights.load(SOURCE), [image])


def test_features_by_name_in_one_compilation(folder):
  loaded = weights.load(SOURCE)
  paths = predict.find_images([str(folder)])
  layers = ('pre_logits', 'block01')
  predicted = inference.predict_images(loaded, paths, batch_size=2, layers=layers)
  assert predicted.features['pre_logits'].shape == (5, 48)
  assert predicted.features['block01'].shape == (5, 17, 48)
  bad = [i for i, error in enumerate(predicted.errors) if error]
  assert [paths[i] for i in bad] == [str(folder / 'bad.png')]
  assert np.isnan(predicted.logits[bad]).all()
  assert np.isfinite(np.delete(predicted.logits, bad, 0)).all()
  head = loaded.params['head']
  logits = predicted.features['pre_logits'] @ head['kernel'] + head['bias']
  np.testing.assert_allclose(predicted.logits, logits, atol=1e-5)
  with pytest.raises(UserError, match=naming('blok01', 'block01')):
    inference.predict_images(loaded, paths, layers=['blok01'])
  assert inference.predict_images(loaded, []).logits.shape == (0, 10)


def test_a_batch_has_no_more_rows_than_there_are_images(folder):
  loaded = weights.load(SOURCE)
  sizes = lambda variables, batch: {
    'size': jax.numpy.full(len(batch['image']), len(batch['image']))
  }
  image = np.zeros((40, 50, 3), np.uint8)
  for number, size in ((1, 1), (3, 3), (4, 4), (5, 4)):
    preprocess = single_image.SingleImage(loaded.pp)
    rows, _ = inference.run(loaded, [image] * number, preprocess, 4, sizes)
    assert rows['size'].tolist() == [size] * number
  mesh = sharding.make_mesh()
  divisor = sharding.batch_divisor(mesh)
  with jax.set_mesh(mesh):
    ((rows, _),) = inference.stream(
      loaded, [image], preprocess, 4 * divisor, sizes, mesh
    )
  assert rows['size'].tolist() == [divisor]


def test_other_files_of_a_folder_are_counted(folder, capfd):
  # Other files in a folder are counted, as at the start of a run.
  (folder / 'a.txt').touch()
  (folder / 'sub' / 'b.txt').touch()
  (folder / 'Thumbs.db').touch()
  assert len(predict.find_images([str(folder)])) == 5
  assert capfd.readouterr().err == f'{folder}: left out: 2 .txt, 1 .db.\n'


def test_images_that_cannot_be_read_end_with_an_error(folder, capsys):
  assert run(SOURCE, folder / 'bad.png') == 2
  assert re.search(naming(1, 'images'), commands.one_line(capsys.readouterr().err))


def test_an_image_in_place_of_the_source_is_named(folder, capsys):
  image = folder / 'a.png'
  assert run(image, SOURCE) == 2
  line = commands.one_line(capsys.readouterr().err)
  assert re.search(naming(str(image), 'SOURCE', f'predict {SOURCE} {image}'), line)


def test_table_and_json(folder, capsys):
  assert run(SOURCE, folder, '--top', 3, '--json') == 0
  images = json.loads(capsys.readouterr().out)['images']
  by_name = {image['path'].rsplit('/', 1)[1]: image for image in images}
  assert by_name.keys() == {'a.png', 'b.jpg', 'c.webp', 'd.bmp', 'bad.png'}
  assert 'not an image' in by_name['bad.png']['error']
  top = by_name['a.png']['top']
  assert len(top) == 3
  assert top == sorted(top, key=lambda t: -t['probability'])
  assert run(SOURCE, folder, '--top', 3) == 0
  text = capsys.readouterr().out
  assert 'not read: not an image' in text
  assert f'{100 * top[0]["probability"]:5.1f} %  {top[0]["name"]}' in text
  names = [f'no {k}' for k in range(10)]
  (folder / 'names.txt').write_text('\n'.join(names))
  assert run(SOURCE, folder / 'a.png', '--class_names', folder / 'names.txt') == 0
  assert names[top[0]['class']] in capsys.readouterr().out


def test_threshold_and_csv(folder, tmp_path, capsys):
  table = tmp_path / 'new' / 'table.csv'
  assert run(SOURCE, folder, '--json') == 0
  images = json.loads(capsys.readouterr().out)['images']
  best = {i['path']: i['top'][0]['probability'] for i in images if 'top' in i}
  sure, *unsure = sorted(best, key=lambda path: -best[path])
  least = (best[sure] + best[unsure[0]]) / 2
  assert run(SOURCE, folder, '--threshold', least, '--csv', table) == 0
  text = capsys.readouterr().out
  assert text.count('none of these') == len(unsure) == 3
  with table.open() as file:
    rows = {row['image']: row for row in csv.DictReader(file)}
  assert rows.keys() == {image['path'] for image in images}
  assert rows[sure]['rank'] == '1'
  assert float(rows[sure]['probability']) == pytest.approx(best[sure], abs=1e-6)
  assert [rows[path]['name'] for path in unsure] == ['none of these'] * 3
  assert rows[str(folder / 'bad.png')]['name'].startswith('not read: ')


def test_a_single_image_is_refused(folder):
  loaded = weights.load(SOURCE)
  for image in (str(folder / 'a.png'), folder / 'a.png', b'\x89PNG'):
    with pytest.raises(UserError, match=naming(type(image).__name__, 'list')):
      inference.predict_images(loaded, image)
  with pytest.raises(UserError, match=naming('batch_size=0')):
    inference.predict_images(loaded, [], batch_size=0)


def test_a_larger_image_size_keeps_pixels_interpolation_and_crop_ratio(tmp_path):
  shutil.copytree(GOLDEN / 'vit_timm', tmp_path / 'timm')
  path = tmp_path / 'timm' / 'config.json'
  config = json.loads(path.read_text())
  config['pretrained_cfg'] |= {'mean': [0.4, 0.5, 0.6], 'std': [0.2, 0.25, 0.5]}
  path.write_text(json.dumps(config))
  levels = 'value_range((-2.0, -2.0, -1.2), (3.0, 2.0, 0.8))'
  assert weights.load(tmp_path / 'timm').pp.endswith(f'|{levels}')
  at_64 = weights.load(tmp_path / 'timm', image_size=64)
  assert jax.tree.leaves(at_64.params)[0].dtype == np.float32
  small = "resize_small(71, method='bicubic', rounding='nearest')"  # int(64 / 0.9)
  assert (
    at_64.pp == f"decode(whole=True)|{small}|central_crop(64, half='even')|{levels}"
  )
