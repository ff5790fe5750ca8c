"""Sharded record files: names, splits, labels, weights, bad records."""

import os
import re

import numpy as np
import pytest

from tests.support import example_records, naming
from tests.support.example_records import (
  KEYS,
  NAMES,
  encoded,
  example,
  serialised,
  write,
)
from vit_jax.data import pipeline, sources
from vit_jax.errors import UserError

PP = 'decode|resize(4)|value_range(-1, 1)'


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  return example_records.write_all(tmp_path_factory)


# --- files and splits --------------------------------------------------------------


@pytest.mark.parametrize('key', NAMES)
@pytest.mark.parametrize(
  ('split', 'labels'),
  [
    ('train', range(20)),
    ('val', range(20, 27)),
    ('train[3:7]+val[-4:]', [3, 4, 5, 6, 23, 24, 25, 26]),
    ('train[:50%]', range(10)),
    ('val+train[90%:]', [*range(20, 27), 18, 19]),
  ],
)
def test_splits(written, key, split, labels):
  source = sources.build(f'records:{written[key]}', split)
  labels = list(labels)
  assert len(source) == len(labels)
  order = np.random.default_rng(0).permutation(len(source))
  for i, got in zip(order, source.read(order), strict=True):
    assert got == {'image': encoded(labels[i]), 'label': labels[i]}
  assert source.read(order[:0]) == []


def test_names_are_files_and_records(written):
  source = sources.build(f'records:{written["tfrecord"]}', 'val+train[5:]')
  shards = ['val-00000-of-00002.tfrecord#0', 'train-00002-of-00004.tfrecord#0']
  assert [os.path.basename(source.name_of(i)) for i in (0, 7)] == shards
  assert source.name_of(6).endswith('val-00001-of-00002.tfrecord#2')


def test_patterns(written, tmp_path):
  folder = written['tfrecord']
  some = sources.build(f'records:{folder}/train-0000[02]-*', 'train[1:]')
  assert [x['label'] for x in some.read(np.arange(len(some)))] == [
    *range(1, 5),
    *range(5, 14),
  ]
  every = sources.build(f'records:{folder}/*', 'train')
  assert len(every) == 20
  assert len(sources.build(f'records:{folder}/*', 'val+train')) == 27
  # Files with other names, in several directories, are all 'train'.
  write(tmp_path / 'b' / 'two.tfrecord', [example(2)])
  write(tmp_path / 'a' / 'one.tfrecord', [example(0), example(1)])
  both = sources.build(f'records:{tmp_path}/*/*.tfrecord', 'train')
  assert [x['label'] for x in both.read(np.arange(3))] == [0, 1, 2]
  assert len(sources.build(f'records:{tmp_path}/a', 'train')) == 2


def test_fingerprint_sees_split_and_files(written):
  build = lambda key, split: sources.build(f'records:{written[key]}', split).fingerprint
  assert build('tfrecord', 'train') == build('tfrecord', 'train')
  seen = {build(k, s) for k in ('tfrecord', 'bare') for s in ('train', 'train[1:]')}
  assert len(seen) == 4


@pytest.mark.parametrize('key', ['tfrecord', 'array_record'])
def test_a_shard_that_is_missing(written, tmp_path, key):
  import shutil

  shutil.copytree(written[key], tmp_path / 'x')
  os.remove(tmp_path / 'x' / NAMES[key].format(split='train', i=2, n=4))
  with pytest.raises(UserError, match=naming("'train'", 3, 4, '[2]')):
    sources.build(f'records:{tmp_path}/x', 'train')
  assert len(sources.build(f'records:{tmp_path}/x/*', 'train')) == 11
  (tmp_path / 'x' / NAMES[key].format(split='train', i=2, n=4)).write_bytes(b'no' * 50)
  with pytest.raises(
    UserError, match=naming(NAMES[key].format(split='train', i=2, n=4))
  ):
    sources.build(f'records:{tmp_path}/x', 'train')


@pytest.mark.parametrize(
  ('target', 'split', 'options', 'facts'),
  [
    ('{}', 'trian', {}, ("'trian'", 'train')),
    ('{}', 'train[5:5]', {}, ("'train[5:5]'",)),
    ('{}', 'train[:21]', {}, ("'train[:21]'", 20)),
    ('{}/nothing', 'train', {}, ('/nothing', '.tfrecord', '.array_record')),
    (
      '{}',
      'train',
      {'image_key': 'image/encode'},
      ("'image/encode'", 'image/encoded', 'data.source_options', "'image_key': ..."),
    ),
    ('{}', 'train', {'label_key': 'label'}, ("'label'", KEYS[1], "'label_key': ...")),
    ('{}', 'train', {'shuffle_buffer': 9}, ('shuffle_buffer=9', "'stream': True")),
    ('{}', 'train', {'stream': True, 'shuffle_buffer': 0}, ('shuffle_buffer=0',)),
    (
      '{}',
      'train',
      {'weight_key': 'w', 'multi_label': False},
      ("weight_key='w'", 'multi_label=True'),
    ),
    ('{}', 'train', {'image_kye': 'x'}, ('image_kye', 'image_key')),
    ('', 'train', {}, ("'records'", 'records:FOLDER')),
  ],
)
def test_mistakes(written, target, split, options, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    sources.build(
      f'records:{target.format(written["tfrecord"])}'.rstrip(':'), split, **options
    )


# --- labels ------------------------------------------------------------------------


def test_several_labels_and_their_weights(tmp_path):
  image, label = KEYS
  rows = [
    ({label: [0, 17_999], 'w': [0.25, 1.0]}, {0: 0.25, 17_999: 1}),
    ({label: [5]}, {5: 1}),  # without weights: 1
    ({label: [7, 8, 9], 'w': [0.5, 0.0, 2.0]}, {7: 0.5, 8: 0, 9: 2}),
    ({label: []}, {}),
    ({}, {}),
  ]
  items = [serialised({image: encoded(i), **row}) for i, (row, _) in enumerate(rows)]
  write(tmp_path / 'train-00000-of-00001', items)
  options = {'source_options': {'weight_key': 'w'}, 'num_classes': 18_000}
  for pp, off, on in ((PP, 0, 1), (f'{PP}|onehot(on=0.9, off=0.1)', 0.1, 0.9)):
    args = (f'records:{tmp_path}', 'train', pp, 5)
    (batch,) = pipeline.evaluate(*args, **options).iterate()
    want = np.full((5, 18_000), off, np.float32)
    for row, (_, weights) in zip(want, rows, strict=True):
      for k, weight in weights.items():
        row[k] = off + (on - off) * weight
    assert batch['label'].dtype == np.float32
    # Two float32 operations where `on` and `off` are not 1 and 0.
    np.testing.assert_allclose(batch['label'], want, atol=0 if on == 1 else 1e-7)
    assert batch['mask'].all()
  # Without the key, as the first record has it: multi-hot, no weights.
  (batch,) = pipeline.evaluate(*args[:2], PP, 5, num_classes=18_000).iterate()
  assert sorted(set(batch['label'].ravel())) == [0, 1]


def test_a_second_label_where_one_is_expected(tmp_path):
  image, label = KEYS
  items = [example(0), serialised({image: encoded(0), label: [1, 2]})]
  write(tmp_path / 'train-00000-of-00001', items)
  batches = pipeline.evaluate(f'records:{tmp_path}', 'train', PP, 2, num_classes=9)
  facts = ('train-00000-of-00001#1', 2, "data.source_options={'multi_label': True}")
  with pytest.raises(UserError, match=naming(*facts)):
    list(batches.iterate())
  source = sources.build(f'records:{tmp_path}', 'train', multi_label=True)
  assert [list(x['label']) for x in source.read(np.arange(2))] == [[0], [1, 2]]


def test_classes_counted_from_one(written):
  options = {'label_offset': -1}
  source = sources.build(f'records:{written["bare"]}', 'val', **options)
  assert source.read(np.array([0]))[0]['label'] == 19
  args = (f'records:{written["bare"]}', 'train', PP, 20)
  batches = pipeline.evaluate(*args, num_classes=20, source_options=options)
  with pytest.raises(
    UserError, match=naming('train-00000-of-00004#0', 'label -1', 'num_classes=20')
  ):
    list(batches.iterate())
  with pytest.raises(UserError, match=naming('#5', 'label 19', 'num_classes=19')):
    list(pipeline.evaluate(*args, num_classes=19).iterate())
  with pytest.raises(UserError, match=naming(args[0], 'num_classes')):
    pipeline.evaluate(*args)


# --- bad records -------------------------------------------------------------------


@pytest.mark.parametrize('name', ['train-00000-of-00001', 'a.array_record'])
def test_bad_records_are_masked_and_listed(tmp_path, name):
  from vit_jax.data import bad_images

  image, label = KEYS
  items = [
    example(0),
    b'\xff' * 30,
    serialised({label: [2]}),
    serialised({image: encoded(3)}),
    serialised({image: b'', label: [4]}),
    serialised({image: encoded(5), label: [0.5]}),
    example(6),
  ]
  write(tmp_path / 'data' / name, items)
  log = str(tmp_path / 'log')
  args = (f'records:{tmp_path}/data', 'train', PP, 8)
  options = {'num_classes': 9, 'bad_log': log, 'max_bad_fraction': 1}
  (batch,) = pipeline.evaluate(*args, **options).iterate()
  np.testing.assert_array_equal(batch['mask'], [1, 0, 0, 0, 0, 0, 1, 0])
  np.testing.assert_array_equal(batch['label'][batch['mask'] == 1], [0, 6])
  lines = bad_images.read_log(log)
  reasons = {int(line['path'].split('#')[1]): line['reason'] for line in lines}
  assert 'tf.train.Example' in reasons[1]
  assert 'image/encoded' in reasons[2]
  assert 'image/class/label' in reasons[3]
  assert 'empty' in reasons[4]
  assert re.search(naming('image/class/label', 'integers'), reasons[5])
  assert len(lines) == 5


def test_weights_that_do_not_match_labels(tmp_path):
  image, label = KEYS
  rows = [{label: [1], 'w': [1.0]}, {label: [1], 'w': [1.0, 2.0]}]
  rows += [{label: [1], 'w': [float('nan')]}]
  items = [serialised({image: encoded(0), **row}) for row in rows]
  write(tmp_path / 'train-00000-of-00001', items)
  source = sources.build(f'records:{tmp_path}', 'train', weight_key='w')
  first, longer, nan = (x.get('error') for x in source.read(np.arange(3)))
  assert first is None
  assert re.search(naming(1, '[1.0, 2.0]'), longer)
  assert re.search(naming(1, '[nan]'), nan)


# --- batches -----------------------------------------------------------------------
