"""--labels and --zero_shot: classes that are texts."""

import json
import runpy

import jax
import numpy as np
import pytest

from tests.support import ROOT, image_folder, pairs
from vit_jax import cli, models, weights
from vit_jax.tools import convert, evaluate, predict
from vit_jax.weights.adapt import fit

LABELS = ['a cat', 'two dogs', 'snow']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A small SigLIP with a vocabulary, and images in a folder for each class."""
  folder = pairs.siglip(tmp_path_factory.mktemp('pair') / 'siglip')
  names = [
    f'val/{name}/{i}.png' for name in ('a_cat', 'snow', 'two_dogs') for i in '01'
  ]
  image_folder.write_noise(folder / 'photos', names, (40, 50))
  return folder


def run(tool, capsys, *args):
  assert cli.run(tool.main, [*map(str, args), '--json']) == 0
  return json.loads(capsys.readouterr().out)


def test_predict_and_convert_by_labels(folder, capsys, tmp_path):
  source, photo = folder / 'w.npz', folder / 'photos/val/snow/0.png'
  labels = ('--labels', ','.join(LABELS), '--templates', 'a photo of {}')
  (image,) = run(predict, capsys, source, photo, *labels)['images']
  loaded = weights.load(str(source))
  texts = [f'a photo of {label}' for label in LABELS]
  expected = np.asarray(jax.nn.softmax(loaded.logits([photo], texts)[0]))
  computed = {x['name']: x['probability'] for x in image['top']}
  np.testing.assert_allclose([computed[x] for x in LABELS], expected, atol=1e-5)
  run(convert, capsys, source, tmp_path / 'head.npz', *labels)
  (again,) = run(predict, capsys, tmp_path / 'head.npz', photo)['images']
  assert again['top'][0]['name'] == image['top'][0]['name']
  again = {x['name']: x['probability'] for x in again['top']}
  np.testing.assert_allclose([again[x] for x in LABELS], expected, atol=1e-5)


def test_fine_tuning_starts_from_a_zero_shot_head(folder, capsys, tmp_path):
  dest = tmp_path / 'head.npz'
  run(convert, capsys, folder / 'w.npz', dest, '--labels', ','.join(LABELS))
  recipe = runpy.run_path(str(ROOT / 'configs/finetune.py'))['get_config']
  config = recipe(f'weights={dest},data=photos,keep_head=True').to_dict()
  source = weights.from_section(**config['weights'])
  section = weights.complete(config['model'], source) | {'num_classes': len(LABELS)}
  model = models.build(**section)
  _, report = fit(source.read(), model, (32, 32), skip=config['weights']['skip'])
  assert report.reinitialized == report.unused == []
  assert model.unit


def test_evaluate_takes_the_classes_of_the_data(folder, capsys):
  source, data = folder / 'w.npz', f'folder:{folder}/photos'
  data = ('--data', data, '--split', 'val')
  values = run(evaluate, capsys, source, *data, '--zero_shot', '--templates', 'my {}')
  loaded = weights.load(str(source))
  paths = sorted((folder / 'photos/val').glob('*/*.png'))
  logits = loaded.logits(paths, ['my a cat', 'my snow', 'my two dogs'])
  right = logits.argmax(1) == [0, 0, 1, 1, 2, 2]
  assert values['examples'] == 6
  assert values['top1'] == pytest.approx(right.mean())
