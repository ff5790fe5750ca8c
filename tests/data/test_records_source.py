"""Sharded record files: names, splits, labels, weights, bad records."""

import os
import re
import shutil

import numpy as np
import pytest

from tests.support import example_records, naming
from tests.support.example_records import KEYS, NAMES, encoded, example, serialised
from vit_jax.data import bad_images, pipeline, sources
from vit_jax.errors import UserError

IMAGE, LABEL = KEYS
PP = 'decode|resize(4)|value_range(-1, 1)'
SHARD = 'train-00000-of-00001'


def write(folder, *rows, name=SHARD):
  """Writes records, bytes or features, to a file of a folder; returns the source."""
  items = [row if isinstance(row, bytes) else serialised(row) for row in rows]
  example_records.write(folder / name, items)
  return f'records:{folder}'


def labels(source):
  return [x['label'] for x in source.read(np.arange(len(source)))]


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  return example_records.write_all(tmp_path_factory)


# --- files and splits --------------------------------------------------------------


@pytest.mark.parametrize('key', NAMES)
@pytest.mark.parametrize(
  ('split', 'labels'),
  [
    ('train', range(20)),
    ('train[3:7]+val[-4:]', [3, 4, 5, 6, 23, 24, 25, 26]),
    ('val+train[90%:]', [*range(20, 27), 18, 19]),
  ],
)
def test_splits(written, key, split, labels):
  source = sources.build(f'records:{written[key]}', split)
  assert len(source) == len(labels)
  order = np.random.default_rng(0).permutation(len(source))
  for i, result in zip(order, source.read(order), strict=True):
    assert result == {'image': encoded(labels[i]), 'label': labels[i]}
  assert source.read(order[:0]) == []


def test_names_and_patterns(written, tmp_path):
  folder = written['tfrecord']
  source = sources.build(f'records:{folder}', 'val+train[5:]')
  names = [os.path.basename(source.name_of(i)) for i in (6, 7)]
  assert names == ['val-00001-of-00002.tfrecord#2', 'train-00002-of-00004.tfrecord#0']
  some = sources.build(f'records:{folder}/train-0000[02]-*', 'train[1:]')
  assert labels(some) == [*range(1, 5), *range(5, 14)]
  assert len(sources.build(f'records:{folder}/*', 'val+train')) == 27
  # Files with other names, in several directories, are all 'train'.
  write(tmp_path / 'b', example(2), name='two.tfrecord')
  write(tmp_path / 'a', example(0), example(1), name='one.tfrecord')
  both = sources.build(f'records:{tmp_path}/*/*.tfrecord', 'train')
  assert labels(both) == [0, 1, 2]
  assert len(sources.build(f'records:{tmp_path}/a', 'train')) == 2


def test_fingerprint_sees_split_and_files(written):
  build = lambda key, split: sources.build(f'records:{written[key]}', split).fingerprint
  assert build('tfrecord', 'train') == build('tfrecord', 'train')
  cases = {build(k, s) for k in ('tfrecord', 'bare') for s in ('train', 'train[1:]')}
  assert len(cases) == 4


@pytest.mark.parametrize('key', ['tfrecord', 'array_record'])
def test_a_shard_that_is_missing_or_damaged(written, tmp_path, key):
  shutil.copytree(written[key], tmp_path / 'x')
  shard = tmp_path / 'x' / NAMES[key].format(split='train', i=2, n=4)
  shard.unlink()
  with pytest.raises(UserError, match=naming("'train'", 3, 4, '[2]')):
    sources.build(f'records:{tmp_path}/x', 'train')
  assert len(sources.build(f'records:{tmp_path}/x/*', 'train')) == 11
  shard.write_bytes(b'no' * 50)
  with pytest.raises(UserError, match=naming(shard.name)):
    sources.build(f'records:{tmp_path}/x', 'train')


# What stands behind the folder, options, and the words of the error.
REFUSED = [
  ('/nothing', {}, ('/nothing', '.tfrecord', '.array_record')),
  ('', {'image_key': 'image/encode'}, ("'image/encode'", IMAGE, 'data.source_options')),
  ('', {'image_key': 'image/encode'}, ("'image_key': ...",)),
  ('', {'label_key': 'label'}, ("'label'", LABEL, "'label_key': ...")),
  ('', {'shuffle_buffer': 9}, ('shuffle_buffer=9', "'stream': True")),
  ('', {'weight_key': 'w', 'multi_label': False}, ("weight_key='w'", 'multi_label')),
]


@pytest.mark.parametrize(('target', 'options', 'words'), REFUSED)
def test_mistakes(written, target, options, words):
  with pytest.raises(UserError, match=naming(*words)):
    sources.build(f'records:{written["tfrecord"]}{target}', 'train', **options)


# --- labels ------------------------------------------------------------------------


def test_several_labels_and_their_weights(tmp_path):
  rows = [
    ({LABEL: [0, 17_999], 'w': [0.25, 1.0]}, {0: 0.25, 17_999: 1}),
    ({LABEL: [5]}, {5: 1}),  # without weights: 1
    ({LABEL: [7, 8, 9], 'w': [0.5, 0.0, 2.0]}, {7: 0.5, 8: 0, 9: 2}),
    ({LABEL: []}, {}),
    ({}, {}),
  ]
  source = write(
    tmp_path, *({IMAGE: encoded(i), **row} for i, (row, _) in enumerate(rows))
  )
  options = {'source_options': {'weight_key': 'w'}, 'num_classes': 18_000}
  (batch,) = pipeline.EvalBatches(source, 'train', PP, 5, **options).iterate()
  expected = np.zeros((5, 18_000), np.float32)
  for row, (_, weights) in zip(expected, rows, strict=True):
    for k, weight in weights.items():
      row[k] = weight
  assert batch['label'].dtype == np.float32
  np.testing.assert_array_equal(batch['label'], expected)
  assert batch['mask'].all()
  # Without the key, as the first record has it: multi-hot, no weights.
  (batch,) = pipeline.EvalBatches(source, 'train', PP, 5, num_classes=18_000).iterate()
  assert sorted(set(batch['label'].ravel())) == [0, 1]


def test_a_second_label_where_one_is_expected(tmp_path):
  source = write(tmp_path, example(0), {IMAGE: encoded(0), LABEL: [1, 2]})
  batches = pipeline.EvalBatches(source, 'train', PP, 2, num_classes=9)
  facts = (f'{SHARD}#1', 2, "data.source_options={'multi_label': True}")
  with pytest.raises(UserError, match=naming(*facts)):
    list(batches.iterate())
  several = labels(sources.build(source, 'train', multi_label=True))
  assert [list(x) for x in several] == [[0], [1, 2]]


def test_classes_counted_from_one(written):
  options = {'label_offset': -1}
  source = sources.build(f'records:{written["bare"]}', 'val', **options)
  assert labels(source) == [*range(19, 26)]
  with pytest.raises(UserError, match=naming(source.name, 'num_classes')):
    pipeline.EvalBatches(source.name, 'train', PP, 20)


@pytest.mark.parametrize(
  ('split', 'offset', 'words'),
  [
    ('train', -1, ('train-00000-of-00004#0', 'label -1', 'num_classes=20')),
    ('val', 0, ('val-00000-of-00002#0', 'label 20', 'num_classes=20')),
  ],
)
def test_a_label_out_of_range_is_reported_when_it_is_read(
  written, split, offset, words
):
  options = {'num_classes': 20, 'source_options': {'label_offset': offset}}
  batches = pipeline.EvalBatches(f'records:{written["bare"]}', split, PP, 20, **options)
  with pytest.raises(UserError, match=naming(*words)):
    list(batches.iterate())


# --- bad records -------------------------------------------------------------------


@pytest.mark.parametrize('name', [SHARD, 'a.array_record'])
def test_bad_records_are_masked_and_listed(tmp_path, name):
  bad = {
    1: (b'\xff' * 30, 'tf.train.Example'),
    2: ({LABEL: [2]}, 'image/encoded'),
    3: ({IMAGE: encoded(3)}, 'image/class/label'),
    4: ({IMAGE: b'', LABEL: [4]}, 'empty'),
    5: ({IMAGE: encoded(5), LABEL: [0.5]}, 'integers'),
  }
  rows = [example(0), *(row for row, _ in bad.values()), example(6)]
  source, log = write(tmp_path / 'data', *rows, name=name), str(tmp_path / 'log')
  options = {'num_classes': 9, 'bad_log': log, 'max_bad_fraction': 1}
  (batch,) = pipeline.EvalBatches(source, 'train', PP, 8, **options).iterate()
  np.testing.assert_array_equal(batch['mask'], [1, 0, 0, 0, 0, 0, 1, 0])
  np.testing.assert_array_equal(batch['label'][batch['mask'] == 1], [0, 6])
  lines = bad_images.read_log(log)
  reasons = {int(line['path'].split('#')[1]): line['reason'] for line in lines}
  assert reasons.keys() == bad.keys()
  for i, (_, fact) in bad.items():
    assert fact in reasons[i]


def test_weights_that_do_not_match_labels(tmp_path):
  rows = [{IMAGE: encoded(0), LABEL: [1], 'w': w} for w in ([1.0], [1.0, 2.0])]
  rows.append({IMAGE: encoded(0), LABEL: [1], 'w': [float('nan')]})
  source = sources.build(write(tmp_path, *rows), 'train', weight_key='w')
  first, longer, nan = (x.get('error') for x in source.read(np.arange(3)))
  assert first is None
  assert re.search(naming(1, '[1.0, 2.0]'), longer)
  assert re.search(naming(1, '[nan]'), nan)
