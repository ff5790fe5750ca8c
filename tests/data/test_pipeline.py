"""Batches: order, exactness, restarts, hosts, mistakes, closing."""

import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from PIL import Image

from tests.support import image_folder, naming
from tests.support.image_folder import FOLDER, same, take
from vit_jax.data import pipeline, sources
from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.errors import UserError

DIGITS = 'random_affine(degrees=10, translate=0.1)|flip_lr|value_range(-1, 1)'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return image_folder.write(tmp_path_factory.mktemp('images'))


def cases(folder):
  digits = ('digits', 'train[:100]', DIGITS, 12)
  return {'arrays': digits, 'encoded': (str(folder), 'train', FOLDER, 12)}


@pytest.mark.parametrize('kind', ['arrays', 'encoded'])
def test_same_batches_for_any_parallelism_restart_and_hosts(folder, kind):
  args = cases(folder)[kind]
  whole = take(pipeline.train(*args, seed=3).iterate(), 12)  # several epochs
  assert all(b['mask'].all() for b in whole)
  same(take(pipeline.train(*args, seed=3, workers=5, prefetch=1).iterate(), 12), whole)
  for start in (1, 11):
    rest = pipeline.train(*args, seed=3).iterate(start)
    same(take(rest, 12 - start), whole[start:])
  parts = [
    take(pipeline.train(*args, seed=3, workers=1, host=h, hosts=3).iterate(2), 3)
    for h in range(3)
  ]
  joined = [
    {k: np.concatenate([part[i][k] for part in parts]) for k in parts[0][0]}
    for i in range(3)
  ]
  same(joined, whole[2:5])
  other = take(pipeline.train(*args, seed=4).iterate(), 1)
  assert np.any(other[0]['image'] != whole[0]['image'])


def test_images_are_those_of_the_source():
  batches = pipeline.train('digits', 'train', 'value_range(-1, 1)', 1437)
  source = sources.build('digits', 'train')
  for epoch, batch in enumerate(take(batches.iterate(), 2)):
    order = np.random.Generator(np.random.Philox([0, epoch])).permutation(1437)
    np.testing.assert_array_equal(batch['image'], source.images[order])
    np.testing.assert_array_equal(batch['label'], source.labels[order])


def test_on_device_scales_uint8():
  batches = pipeline.evaluate('digits', 'test', 'value_range(-1, 1, clip=True)', 8)
  (batch, *_) = take(batches.iterate(), 1)
  assert batch['image'].dtype == np.uint8
  got = jax.jit(batches.on_device)(batch)
  assert got['image'].dtype == np.float32
  want = batch['image'].astype(float) / 127.5 - 1
  # Three float32 operations on values up to 2.
  np.testing.assert_allclose(got['image'], want, atol=5e-7)
  assert got.keys() == batch.keys()
  # Not last: done on the host, and left alone on the device.
  hosts = pipeline.evaluate('digits', 'test', 'value_range(-1, 1)|resize(4)', 8)
  (batch,) = take(hosts.iterate(), 1)
  assert batch['image'].dtype == np.float32
  assert hosts.spec['image'].dtype == np.float32
  same([hosts.on_device(batch)], [batch])


def test_labels_for_several_classes(tmp_path):
  labels = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
  images = np.zeros((3, 4, 4, 1), np.uint8)
  np.savez(tmp_path / 'a.npz', images=images, labels=labels)
  args = (f'{tmp_path}/a.npz', 'train', 'value_range(-1,1)', 4)
  (batch,) = pipeline.evaluate(*args, num_classes=4).iterate()
  assert batch['label'].dtype == np.float32
  np.testing.assert_array_equal(batch['label'][:3, :3], labels)
  assert not batch['label'][3].any()
  assert pipeline.evaluate(*args).spec['label'].shape == (4, 3)
  digits = pipeline.evaluate('digits', 'test', 'value_range(-1,1)|onehot(off=0.1)', 4)
  (batch,) = take(digits.iterate(), 1)
  assert digits.spec['label'].shape == batch['label'].shape == (4, 10)
  np.testing.assert_allclose(batch['label'][1], np.eye(10)[5] * 0.9 + 0.1)


@pytest.mark.parametrize('seed', range(4))
def test_evaluation_is_exact(seed):
  rng = np.random.default_rng(seed)
  count, hosts = int(rng.integers(1, 40)), int(rng.integers(1, 5))
  batch_size = hosts * int(rng.integers(1, 9))
  seen, lengths = [], set()
  for host in range(hosts):
    batches = pipeline.evaluate(
      'synthetic',
      'test',
      'value_range(-1, 1)',
      batch_size,
      source_options={'size': 2, 'num_examples': count, 'num_classes': 10_000},
      host=host,
      hosts=hosts,
    )
    got = list(batches.iterate())
    lengths.add(len(got))
    assert len(got) == len(batches) == -(-count // batch_size)
    for batch in got:
      assert batch['image'].shape == (batch_size // hosts, 2, 2, 3)
      assert set(batch['mask']) <= {0, 1}
      assert not batch['image'][batch['mask'] == 0].any()
      seen += list(batch['label'][batch['mask'] == 1])
  assert sorted(seen) == list(range(count))  # the label is the index here
  assert len(lengths) == 1


def test_evaluation_of_encoded_images_is_exact_and_in_order(folder):
  pp = 'decode|resize_small(16)|central_crop(8)|value_range(-1, 1)'
  source = sources.build(str(folder), 'val')
  batches = pipeline.evaluate(str(folder), 'val', pp, 4)
  got = list(batches.iterate())
  mask = np.concatenate([b['mask'] for b in got])
  labels = np.concatenate([b['label'] for b in got])
  np.testing.assert_array_equal(mask, [1] * 15 + [0])
  np.testing.assert_array_equal(labels[:15], source.labels)
  assert batches.bad_images == 0  # padding does not count as bad
  same(list(batches.iterate()), got)


def test_orientation_is_that_of_the_folder(tmp_path):
  exif = Image.Exif()
  exif[0x0112] = 6
  image = np.zeros((20, 10, 3), np.uint8)
  image[:10] = 200  # stored: bright at the top; upright: bright on the right
  (tmp_path / 'a').mkdir()
  Image.fromarray(image).save(tmp_path / 'a' / '0.jpg', exif=exif)
  for crop in ('resize((4, 8))', 'inception_crop((4, 8), 100, 100, (2, 2))'):
    batches = pipeline.evaluate(
      str(tmp_path), 'train', f'decode|{crop}|value_range(-1, 1)', 1
    )
    (batch,) = batches.iterate()
    columns = batch['image'][0].mean((0, 2))
    assert columns[:3].max() < 20
    assert columns[-3:].min() > 180


# --- mistakes ----------------------------------------------------------------------


@pytest.mark.parametrize(
  ('change', 'facts'),
  [
    ({'pp': 'resize(8)'}, ("'resize(8)'", 'one value_range')),
    (
      {'pp': 'value_range(0,1)|value_range(0,1)'},
      ("'value_range(0,1)|value_range(0,1)'", 'one value_range'),
    ),
    (
      {'pp': 'flip_lr|decode|value_range(0,1)'},
      ("'flip_lr|decode|value_range(0,1)'", 'decode', 'first'),
    ),
    (
      {'pp': 'onehot|onehot|value_range(0,1)'},
      ("'onehot|onehot|value_range(0,1)'", 'one op', 'labels'),
    ),
    ({'pp': 'onehot(5)|value_range(0,1)'}, ('onehot(5)', 10)),
    ({'pp': 'reszie(8)|value_range(0,1)'}, ("'reszie'", 'resize')),
    ({'split': 'trian'}, ("'trian'", 'train')),
    ({'num_classes': 9}, ('0 to 9', 'num_classes=9', '0 to 8', 'digits#9')),
    ({'num_classes': 0}, ('num_classes=0',)),
    ({'batch_size': 7, 'host': 0, 'hosts': 2}, ('batch_size=7', 2)),
    ({'batch_size': 0}, ('batch_size=0',)),
    ({'source': '/no/such/folder'}, ("'/no/such/folder'",)),
    ({'source_options': {'size': 3}}, ('config.data.source_options.size',)),
  ],
)
def test_mistakes_are_found_before_anything_runs(change, facts):
  args = {'source': 'digits', 'split': 'train', 'pp': DIGITS, 'batch_size': 8} | change
  for make in (pipeline.train, pipeline.evaluate):
    with pytest.raises(UserError, match=naming(*facts)):
      make(**args)


def test_encoded_images_need_decode(folder):
  with pytest.raises(UserError, match=naming('folder', "'decode'")):
    pipeline.train(str(folder), 'train', 'resize(8)|value_range(0,1)', 8)


def test_images_of_different_sizes_make_no_batch(folder):
  batches = pipeline.train(str(folder), 'train', 'decode|value_range(0,1)', 8)
  with pytest.raises(
    UserError, match=naming('decode|value_range(0,1)', 'resize(size)')
  ):
    _ = batches.spec


def test_ops_that_cannot_fit_the_images():
  batches = pipeline.train('digits', 'train', 'central_crop(9)|value_range(0,1)', 8)
  with pytest.raises(UserError, match=naming('central_crop(9)', 'digits', '9x9')):
    _ = batches.spec


class Mislabelled(sources.Source):
  """Labels that are known only when read, one of them wrong."""

  name, num_classes, fingerprint = 'wrong', 3, '0'
  features = types.MappingProxyType(
    {'image': ImageFeature((2, 2, 1)), 'label': LabelFeature()}
  )

  def __init__(self, target, split):
    pass

  def __len__(self):
    return 10

  def read(self, indices):
    image = np.zeros((2, 2, 1), np.uint8)
    return [{'image': image, 'label': 7 if i == 4 else 0} for i in indices]


def test_a_label_out_of_range_met_on_reading(monkeypatch):
  monkeypatch.setitem(sources.SOURCES.data, 'wrong', Mislabelled)
  batches = pipeline.evaluate('wrong', 'train', 'value_range(0,1)', 5)
  with pytest.raises(UserError, match=naming('wrong#4', 7, 'num_classes=3')):
    list(batches.iterate())


# --- ends --------------------------------------------------------------------------


def test_closing_leaves_no_thread(folder):
  batches = pipeline.train(str(folder), 'train', FOLDER, 8)
  counts = []
  for _ in range(8):
    take(batches.iterate(), 1)
    counts.append(len(os.listdir('/proc/self/task')))
  # TensorFlow's own pools start with the first; nothing comes on top of them.
  assert counts[-1] <= counts[1]


@pytest.mark.parametrize('end', ['', 'raise KeyError'])
def test_interpreter_exits_with_a_stream_open(folder, end):
  code = (
    'from vit_jax.data import pipeline\n'
    f'it = pipeline.train({str(folder)!r}, "train", {FOLDER!r}, 8, host=0, hosts=1)'
    f'.iterate()\nnext(it)\n{end}'
  )
  done = subprocess.run(
    [sys.executable, '-W', 'error', '-c', code],
    capture_output=True,
    text=True,
    timeout=60,
    env=os.environ | {'TF_CPP_MIN_LOG_LEVEL': '2'},
  )
  assert done.returncode == (1 if end else 0), done.stderr
  assert done.stderr.count('Traceback') == ('KeyError' in end)
  assert 'Warning' not in done.stderr
