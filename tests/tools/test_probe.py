"""vit_jax evaluate --probe: any weights, any data, and a run's own evaluation."""

import json
import re

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from tests.support import GOLDEN, commands, naming
from vit_jax import weights
from vit_jax.tools import evaluate, source

SOURCE = str(GOLDEN / 'vit_google_token.npz')

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """(source, images, labels): 20 images to fit to, 10 to test on; labels are not 0 to K."""
  rng = np.random.default_rng(0)
  labels = np.arange(30) % 3
  images = rng.integers(0, 256, (3, 32, 32, 3))[labels] / 2
  images = (images + rng.integers(0, 128, images.shape)).astype(np.uint8)
  path = tmp_path_factory.mktemp('data') / 'a.npz'
  arrays = {'fit_images': images[:20], 'fit_labels': labels[:20]}
  arrays |= {'test_images': images[20:], 'test_labels': labels[20:]}
  np.savez(path, **arrays)
  return f'arrays:{path}', images, labels


def test_features_of_any_weights_on_any_data(data, capsys):
  name, images, labels = data
  args = (SOURCE, '--probe', 'knn', '--data', name, '--split', 'test')
  args += ('--train', 'fit', '--set', 'k=[3]', '--set', 'temperature=None')
  args += ('--pp', 'value_range(-1, 1)', '--set', 'batch_size=10')
  code, out, _ = commands.run(evaluate.main, capsys, *args, '--json')
  assert code == 0
  record = json.loads(out)
  loaded = weights.load(SOURCE)
  x = loaded.model.apply(loaded.variables, images / np.float32(127.5) - 1)[1]
  x = np.asarray(x['pre_logits'])
  expected = KNeighborsClassifier(3, metric='cosine').fit(x[:20], labels[:20])
  assert record[f'{name}_3nn'] == expected.score(x[20:], labels[20:])
  assert record['datasets'][name]['train'] == 'fit'
  assert (record['probe'], record['batch_size']) == ('knn', 10)


RESOLVED = {'image_shape': [32, 32, 3], 'total_steps': 4}


def test_a_runs_own_evaluation(data, tmp_path, monkeypatch, capsys):
  section = {
    'type': 'linear_probe',
    'datasets': {'some': {'source': data[0], 'train': 'fit', 'test': 'test'}},
    'pp': 'value_range(-1, 1)',
    'batch_size': 30,
    'every': 2,
    'use_ema': True,
  }
  (tmp_path / 'checkpoints').mkdir()
  config = {'model': {'name': 'vit'}, 'evals': {'mine': section}, 'resolved': RESOLVED}
  config['data'] = {}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  # Its evaluation is read from the folder; parameters need not be a run's.
  monkeypatch.setattr(source, 'load', lambda args: weights.load(SOURCE))
  args = (tmp_path, '--probe', 'linear_probe', '--batch', 10)
  code, out, _ = commands.run(evaluate.main, capsys, *args, '--json', '--set', 'l2=[8]')
  assert code == 0
  record = json.loads(out)
  assert record['evaluation'] == 'mine'
  assert (record['batch_size'], record['some_l2']) == (10, 8)
  code, out, _ = commands.run(evaluate.main, capsys, *args, '--set', 'l2=[8]')
  assert code == 0
  shown = ('fit', 'test', 'some_top1', f'{record["some_top1"]:.2%}', 'some_l2', 8)
  assert re.search(naming(*shown), out)
  facts = ('--train', '--data')
  commands.assert_refused(evaluate.main, capsys, (*args, '--train', 'train'), facts)
  facts = ('--data', 'knn')
  commands.assert_refused(evaluate.main, capsys, (tmp_path, '--probe', 'knn'), facts)
