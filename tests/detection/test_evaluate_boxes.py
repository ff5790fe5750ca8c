"""evaluate of a detector whose answers are known."""

import csv
import json

import pytest

from tests.support import bright_detector, commands, stand_in
from vit_jax import cli
from vit_jax.tools import evaluate, source

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture(autouse=True)
def detector(monkeypatch):
  monkeypatch.setattr(source, 'load', lambda args: bright_detector.loaded())


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  root = tmp_path_factory.mktemp('coco')
  bright_detector.write_data(root)
  return root


def options(data):
  return '--data', f'coco:{data}/G.json,{data}', '--split', 'train'


def test_the_twelve_numbers_and_files(data, tmp_path, capsys):
  argv = ['D', *options(data), '--out', str(tmp_path / 'out'), '--json']
  assert cli.run(evaluate.main, argv) == 0
  record = json.loads(capsys.readouterr().out)
  assert (record['step'], record['split'], record['examples']) == (7, 'train', 12)
  # All dogs are found, and no cat.
  assert record['ap50'] == pytest.approx(0.5)
  assert 0.3 < record['ap'] < 0.5
  assert record['ap_large'] == -1
  out = tmp_path / 'out'
  assert json.loads((out / 'summary.json').read_text()) == record
  with (out / 'per_class.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [(row['class'], row['name'], row['objects']) for row in rows] == [
    ('3', 'dog', '12'),
    ('7', 'cat', '3'),
  ]
  assert float(rows[0]['ap50']) == pytest.approx(1)
  results = json.loads((out / 'detections.json').read_text())
  assert len(results) == 12 * 2  # the data has no birds
  best = max(results, key=lambda row: row['score'])
  assert best.keys() == {'image_id', 'category_id', 'bbox', 'score'}
  assert best['category_id'] == 3


def test_the_text(data, capsys):
  assert cli.run(evaluate.main, ['D', *options(data), '--batch', '5']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[:2] == ['step         7', 'examples     12']
  assert lines[3].split() == ['AP', 'IoU', '0.50', '0.5000']
  assert len(lines) == 2 + 12


def test_a_run_repeats_its_own_evaluation(data, tmp_path, capsys):
  name, split = f'coco:{data}/G.json,{data}', 'train[:8]'
  pp = f'{bright_detector.PP}|pad_to(boxes=2, label=2)'
  evals = {'val': {'type': 'coco', 'data': {'source': name, 'split': split, 'pp': pp}}}
  config = {'model': {'name': 'detr'}, 'task': {'name': 'detect'}, 'evals': evals}
  stand_in.write_run(tmp_path, config)
  (tmp_path / 'checkpoints').mkdir()
  assert cli.run(evaluate.main, [str(tmp_path), '--json']) == 0
  record = json.loads(capsys.readouterr().out)
  assert (record['evaluation'], record['split']) == ('val', split)
  assert (record['examples'], record['ap50']) == (8, pytest.approx(0.5))


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
def test_refusals_are_one_line(data, capsys, more, facts):
  commands.assert_refused(evaluate.main, capsys, ('D', *options(data), *more), facts)
