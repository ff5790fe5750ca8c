"""Evaluation of weights: exact counts, tables, and classes that do not fit."""

import csv
import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pytest
from sklearn import metrics

from tests.support import GOLDEN, image_folder, naming, stand_in
from vit_jax import cli, inference, models, terminal, weights
from vit_jax.data import sources
from vit_jax.evaluators import predictions
from vit_jax.tools import evaluate, out_folder, source

SOURCE = str(GOLDEN / 'vit_google_token.npz')


pytestmark = pytest.mark.usefixtures('one_device')


def run(*args):
  return cli.run(evaluate.main, [str(a) for a in args])


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """46 images of 10 classes; class c has c images, class 0 has one."""
  names = [f'val/class{c}/{i}.png' for c in range(10) for i in range(max(c, 1))]
  return image_folder.write_noise(tmp_path_factory.mktemp('data'), names)


def expected(data, source=SOURCE):
  """(true, predicted) classes, one image after the other."""
  paths = sorted((data / 'val').rglob('*.png'))
  predicted = inference.predict_images(weights.load(source), paths)
  true = [int(path.parent.name.removeprefix('class')) for path in paths]
  return np.array(true), predicted.logits.argmax(-1)


def test_counts_and_tables(data, tmp_path, capfd, monkeypatch):
  often = functools.partial(terminal.progress, every=0.01)
  monkeypatch.setattr(terminal, 'progress', often)
  out = tmp_path / 'tables'
  args = (SOURCE, '--data', f'folder:{data}', '--split', 'val', '--batch', 8)
  assert run(*args, '--out', out, '--json') == 0
  output = capfd.readouterr()
  assert f'folder:{data}, val: 0 of 6 batches' in output.err
  record = json.loads(output.out)
  true, predicted = expected(data)
  assert record['examples'] == 46
  assert isinstance(record['examples'], int)
  assert record['top1'] == pytest.approx(np.mean(true == predicted))
  with (out / 'confusion.csv').open() as file:
    rows = list(csv.reader(file))
  assert rows[0][1:] == [f'class{c}' for c in range(10)]
  matrix = np.array([row[1:] for row in rows[1:]], int)
  counts = np.zeros((10, 10), int)
  np.add.at(counts, (true, predicted), 1)
  np.testing.assert_array_equal(matrix, counts)
  with (out / 'per_class.csv').open() as file:
    classes = list(csv.DictReader(file))
  assert [int(row['examples']) for row in classes] == counts.sum(1).tolist()
  assert [int(row['right']) for row in classes] == counts.diagonal().tolist()
  # A class that is never predicted has no precision.
  scores = metrics.precision_recall_fscore_support(
    true, predicted, labels=range(10), zero_division=np.nan
  )
  for name, expected_scores in zip(('precision', 'recall', 'f1'), scores, strict=False):
    ours = [float(row[name] or 'nan') for row in classes]
    np.testing.assert_allclose(ours, expected_scores, atol=1e-6)
  balanced = metrics.balanced_accuracy_score(true, predicted)
  assert record['balanced_accuracy'] == pytest.approx(balanced)
  macro = metrics.f1_score(true, predicted, average='macro', zero_division=0)
  assert record['macro_f1'] == pytest.approx(macro)
  assert json.loads((out / 'summary.json').read_text()) == record
  stored = predictions.read(out)['val']
  again = np.zeros((10, 10), int)
  np.add.at(again, (stored['label'], stored['top'][:, 0]), 1)
  np.testing.assert_array_equal(again, counts)


def test_data_of_boxes_is_named(capsys):
  assert run(SOURCE, '--data', 'yolo:photos', '--split', 'train') == 2
  facts = ('yolo:photos', 'boxes', SOURCE, 'detector')
  assert re.search(naming(*facts), capsys.readouterr().err)


def test_classes_in_another_order_are_matched_by_name(data, tmp_path, capsys):
  names = [f'class{c}' for c in reversed(range(10))]
  origin = weights.read(SOURCE)
  renamed = dataclasses.replace(origin, class_names=names)
  weights.write(renamed, tmp_path / 'a.npz', 'google')
  args = ('--data', f'folder:{data}', '--split', 'val', '--json')
  assert run(tmp_path / 'a.npz', *args) == 0
  text, note = capsys.readouterr()
  assert re.search(naming('name'), note)
  true, predicted = expected(data)
  top1 = json.loads(text)['top1']
  assert top1 == pytest.approx(np.mean(true == 9 - predicted))


def test_several_labels_per_image(tmp_path, capsys):
  rng = np.random.default_rng(0)
  labels = np.eye(10, dtype=bool)
  labels[:, 0] = True
  images = rng.integers(0, 256, (10, 32, 32, 3), np.uint8)
  np.savez(tmp_path / 'a.npz', test_images=images, test_labels=labels)
  args = (SOURCE, '--data', f'arrays:{tmp_path}/a.npz', '--split', 'test')
  assert run(*args, '--json') == 0
  record = json.loads(capsys.readouterr().out)
  predicted = inference.predict_images(weights.load(SOURCE), list(images))
  right = labels[np.arange(10), predicted.logits.argmax(-1)]
  assert record['top1'] == pytest.approx(right.mean())


def test_a_run_whose_head_is_larger_than_its_data(tmp_path, capsys, monkeypatch):
  names = [str(i) for i in range(10)]  # digits; the head has two more
  data = dict(source='digits', split='test', pp='value_range(-1, 1)')
  config = {
    'model': {'name': 'vit', 'variant': 'mu/4', 'num_classes': 12},
    'resolved': dict(stand_in.RESOLVED, class_names=names),
    'evals': {'test': {'type': 'classification', 'data': data}},
    'data': data,
    'task': {'name': 'classify'},
    'optim': {},
  }
  (tmp_path / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'checkpoints').mkdir()
  model = models.build('vit', 'mu/4', num_classes=12)
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model.shapes((8, 8, 1)))
  zeros['params']['head']['bias'][0] = 1.0  # every image is of the first class
  loaded = weights.Loaded(
    model=model,
    variables=zeros,
    image_size=(8, 8),
    channels=1,
    pp='',
    class_names=None,
    source='a run',
    format='run',
    report='',
    step=3,
  )
  monkeypatch.setattr(source, 'load', lambda args: loaded)
  assert run(tmp_path, '--json') == 0
  record = json.loads(capsys.readouterr().out)
  assert record['top1'] == np.mean(sources.build('digits', 'test').labels == 0)


def test_a_spreadsheet_runs_no_cell(tmp_path):
  cells = ['=cmd|x', '+1', '-a', '@b', '-0.5', 3, 'cat']
  out_folder.write_csv(tmp_path / 'a.csv', [cells])
  assert (tmp_path / 'a.csv').read_text() == "'=cmd|x,'+1,'-a,'@b,-0.5,3,cat\n"
