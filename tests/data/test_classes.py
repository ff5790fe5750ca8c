"""`classes`: which examples, in which order, with which labels; and everything sees it."""

import os

import numpy as np
import pytest

from tests.support import naming
from tests.support.image_folder import write
from vit_jax import config as config_lib
from vit_jax import evaluators
from vit_jax.data import pipeline, sources
from vit_jax.errors import UserError
from vit_jax.evaluators.classification import Classification
from vit_jax.train import schema

PP = 'value_range(-1, 1)'
UPPER = [5, 6, 7, 8, 9]


def expected(split, classes):
  """(images, labels) of digits by hand: all of a split, then those of the classes."""
  whole = sources.build('digits', split)
  rows = [i for i, label in enumerate(whole.labels) if label in classes]
  return whole.images[rows], [classes.index(whole.labels[i]) for i in rows]


@pytest.mark.parametrize('classes', [UPPER, [9, 0, 4]])
def test_keeps_the_order_and_numbers_the_classes_as_listed(classes):
  part = sources.build('digits', 'train', classes=classes)
  images, labels = expected('train', classes)
  assert len(part) == len(images)
  assert part.labels.tolist() == labels
  assert part.num_classes == len(classes)
  assert part.class_names == [str(c) for c in classes]
  read = part.read(np.arange(len(part))[::-7])
  assert [example['label'] for example in read] == labels[::-7]
  np.testing.assert_array_equal([x['image'] for x in read], images[::-7])
  names = sources.build('digits', 'train', classes=[str(c) for c in classes])
  assert names.fingerprint == part.fingerprint


def test_splits_count_the_examples_of_these_classes():
  images, labels = expected('train', UPPER)
  n, test = len(images), expected('test', UPPER)[1]
  for split, rows in {
    'train[:80]': np.arange(80),
    'train[-10%:]': np.arange(n - round(n / 10), n),
    'train[3:5]+train[:1]': np.array([3, 4, 0]),
  }.items():
    part = sources.build('digits', split, classes=UPPER)
    assert part.labels.tolist() == [labels[i] for i in rows]
    read = part.read(np.arange(len(part)))
    np.testing.assert_array_equal([x['image'] for x in read], images[rows])
  # Each of several splits is cut by itself.
  both = sources.build('digits', 'test[:50%]+train[:80]', classes=UPPER)
  joined = test[: round(len(test) / 2)] + labels[:80]
  assert both.labels.tolist() == joined
  assert [x['label'] for x in both.read(np.arange(len(both)))] == joined


def test_a_folder_with_a_missing_image(tmp_path):
  root = write(tmp_path)
  build = lambda classes: sources.build(f'folder:{root}', 'val', classes=classes)
  part = build(['c', 'b'])
  assert part.class_names == ['c', 'b']
  folders = [part.name_of(i).split('/')[-2] for i in range(len(part))]
  assert part.labels.tolist() == ['cb'.index(name) for name in folders]
  os.remove(part.name_of(0))
  first, second = part.read(np.arange(2))
  assert 'error' in first
  assert second['label'] == part.labels[1]
  choices = (None, ['a', 'b', 'c'], ['b', 'c'], ['c', 'b'])
  assert len({build(classes).fingerprint for classes in choices}) == 4


def test_parts_of_a_mixture():
  parts = [
    {'source': 'digits', 'classes': UPPER, 'weight': 1},
    {'source': 'digits', 'classes': [0], 'label_offset': 5, 'weight': 1},
  ]
  data = pipeline.TrainBatches(parts, 'train', PP, 8)
  assert data.num_classes == 6
  assert all(line.startswith('digits: ') for line in data.describe())
  assert data.class_names == ['5', '6', '7', '8', '9', '0']
  assert data.num_examples == len(expected('train', [*UPPER, 0])[0])


# A source, `classes`, and the words of the error.
REFUSED = [
  ('digits', [], ('config.data.classes', 'empty')),
  ('digits', [1, 2, 1], ('1', 'twice')),
  ('digits', [1, '1'], ("'1'", 'twice')),
  ('digits', [-1], ('-1', '0')),
  ('digits', [3, 10], ('digits', '10', '0 to 9')),
  ('digits', ['tree'], ('digits', "'tree'", "'0'")),
  ('synthetic', ['tree'], ('synthetic', "'tree'", 'index')),
  ([{'source': 'digits'}], [1], ('classes', 'list', "'classes'")),
  ('arrays:several.npz', [0], ('several.npz', 'classes', 'folder')),
]


@pytest.mark.parametrize(('source', 'classes', 'words'), REFUSED)
def test_what_is_refused(tmp_path, monkeypatch, source, classes, words):
  monkeypatch.chdir(tmp_path)
  np.savez('several.npz', images=np.zeros((3, 4, 4, 1), np.uint8), labels=np.eye(3) > 0)
  with pytest.raises(UserError, match=naming(*words)):
    pipeline.TrainBatches(source, 'train', PP, 4, classes=classes)


def test_an_evaluation_numbers_the_classes_as_training_does(monkeypatch):
  class Mine(Classification):
    pass

  monkeypatch.setitem(evaluators.EVALUATORS.data, 'mine', Mine)

  def checked(*flags):
    config = config_lib.load('digits:debug,warmup=1')
    config_lib.override(config, list(flags))
    return schema.check(config)

  ours, theirs = 'data.classes=[5, 6]', 'evals.test.data.classes'
  evals = checked(ours, 'evals.test.type=mine')['evals']
  assert evals['test']['data']['classes'] == [5, 6]
  assert evals['test_ema']['data']['classes'] == [5, 6]
  for other in ('[6, 5]', 'None'):
    with pytest.raises(UserError, match=naming(f'config.{theirs}', other)):
      checked(ours, f'{theirs}={other}')
  with pytest.raises(UserError, match=naming('config.data.classes')):
    checked('data.classes=five')
