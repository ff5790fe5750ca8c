"""Batches: order, exactness, restarts, hosts, mistakes, closing."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image

from tests.support import image_folder, naming
from tests.support.hostile_images import encode, picture
from tests.support.image_folder import FOLDER, same, take, together
from tests.support.run_ops import run
from vit_jax.data import philox, pipeline, sources
from vit_jax.errors import UserError

DIGITS = 'random_affine(degrees=10, translate=0.1)|flip_lr|value_range(-1, 1)'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return image_folder.write(tmp_path_factory.mktemp('images'))


@pytest.mark.parametrize('kind', ['arrays', 'encoded'])
def test_same_batches_for_any_parallelism_restart_and_hosts(folder, kind):
  args = ('digits', 'train[:100]', DIGITS, 12)
  if kind == 'encoded':
    args = (str(folder), 'train', FOLDER, 12)
  train = lambda seed=3, **more: pipeline.TrainBatches(*args, seed=seed, **more)
  whole = take(train().iterate(), 12)  # several epochs
  assert all(b['mask'].all() for b in whole)
  same(take(train(workers=5).iterate(), 12), whole)
  for start in (1, 11):
    same(take(train().iterate(start), 12 - start), whole[start:])
  hosts = [take(train(workers=1, host=h, hosts=3).iterate(2), 3) for h in range(3)]
  same(together(hosts), whole[2:5])
  (other,) = take(train(seed=4).iterate(), 1)
  assert np.any(other['image'] != whole[0]['image'])


def test_images_are_those_of_the_source():
  batches = pipeline.TrainBatches('digits', 'train', 'value_range(-1, 1)', 1437, seed=5)
  source = sources.build('digits', 'train')
  for epoch, batch in enumerate(take(batches.iterate(), 2)):
    order = np.random.Generator(np.random.Philox([5, epoch])).permutation(1437)
    np.testing.assert_array_equal(batch['image'], source.images[order])
    np.testing.assert_array_equal(batch['label'], source.labels[order])


@pytest.mark.parametrize('ops', ['random_crop(5)|flip_lr', 'inception_crop(8)|flip_lr'])
def test_numbers_are_those_of_position_and_op(tmp_path, ops):
  source, images = 'digits', sources.build('digits', 'train').images
  if encoded := ops.startswith('inception_crop'):  # decoded in the crop only
    source = str(tmp_path)
    (tmp_path / 'a').mkdir()
    for i in range(7):
      picture(seed=i).save(tmp_path / 'a' / f'{i}.png')
  pp = f'{"decode|" * encoded}{ops}|value_range(-1, 1)'
  batches = pipeline.TrainBatches(source, 'train', pp, 12, seed=3)
  if encoded:
    images = [Image.open(batches.source.name_of(i)) for i in range(7)]
  for step, batch in enumerate(take(batches.iterate(), 3)):
    epochs, offsets = np.divmod(12 * step + np.arange(12), len(images))
    order = []
    for epoch, offset in zip(epochs, offsets, strict=True):
      permutation = np.random.Generator(np.random.Philox([3, epoch])).permutation
      order.append(permutation(len(images))[offset])
    np.testing.assert_array_equal(batch['index'], order)
    np.testing.assert_array_equal(batch['label'], batches.source.labels[order])
    u = philox.uniforms(3, 12 * step + np.arange(12), (2, 1))
    for image, index, numbers in zip(batch['image'], batch['index'], u, strict=True):
      expected = run(ops, np.asarray(images[index]), numbers)
      np.testing.assert_array_equal(image, expected)


def test_on_device_scales_uint8():
  batches = pipeline.EvalBatches('digits', 'test', 'value_range(-1, 1, clip=True)', 8)
  (batch,) = take(batches.iterate(), 1)
  assert batch['image'].dtype == np.uint8
  scaled = jax.jit(batches.finish_on_device)(batch)
  assert scaled['image'].dtype == np.float32
  assert scaled.keys() == batch.keys()
  # Three float32 operations on values up to 2.
  expected = batch['image'].astype(float) / 127.5 - 1
  np.testing.assert_allclose(scaled['image'], expected, atol=5e-7)
  # Not last: done on the host, and left alone on the device.
  hosts = pipeline.EvalBatches('digits', 'test', 'value_range(-1, 1)|resize(4)', 8)
  (batch,) = take(hosts.iterate(), 1)
  assert batch['image'].dtype == hosts.spec['image'].dtype == np.float32
  same([hosts.finish_on_device(batch)], [batch])


def test_labels_for_several_classes(tmp_path):
  labels = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
  images = np.zeros((3, 4, 4, 1), np.uint8)
  np.savez(tmp_path / 'a.npz', images=images, labels=labels)
  args = (f'{tmp_path}/a.npz', 'train', 'value_range(-1,1)', 4)
  (batch,) = pipeline.EvalBatches(*args, num_classes=4).iterate()
  assert batch['label'].dtype == np.float32
  np.testing.assert_array_equal(batch['label'][:3, :3], labels)
  assert not batch['label'][3].any()
  assert pipeline.EvalBatches(*args).spec['label'].shape == (4, 3)


@pytest.mark.parametrize(
  ('count', 'hosts', 'batch_size'), [(1, 3, 6), (39, 4, 8), (24, 2, 8), (25, 2, 8)]
)
def test_evaluation_is_exact(count, hosts, batch_size):
  options = {'size': 2, 'num_examples': count, 'num_classes': 10_000}
  labels = []
  for host in range(hosts):
    batches = pipeline.EvalBatches(
      *('synthetic', 'test', 'value_range(-1, 1)', batch_size),
      source_options=options,
      host=host,
      hosts=hosts,
    )
    result = list(batches.iterate())
    assert len(result) == len(batches) == -(-count // batch_size)
    for batch in result:
      assert batch['image'].shape == (batch_size // hosts, 2, 2, 3)
      assert set(batch['mask']) <= {0, 1}
      assert not batch['image'][batch['mask'] == 0].any()
      labels += list(batch['label'][batch['mask'] == 1])
  assert sorted(labels) == list(range(count))  # the label is the index here


def test_evaluation_of_encoded_images_is_exact_and_in_order(folder):
  pp = 'decode|resize_small(16)|central_crop(8)|value_range(-1, 1)'
  batches = pipeline.EvalBatches(str(folder), 'val', pp, 4)
  result = list(batches.iterate())
  (joined,) = together([[batch] for batch in result])
  np.testing.assert_array_equal(joined['mask'], [1] * 15 + [0])
  np.testing.assert_array_equal(joined['label'][:15], batches.source.labels)
  assert batches.bad_images == 0  # padding does not count as bad
  same(list(batches.iterate()), result)


def test_orientation_is_that_of_the_folder(tmp_path):
  image = np.zeros((20, 10, 3), np.uint8)
  image[:10] = 200  # stored: bright at the top; upright: bright on the right
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / '0.jpg').write_bytes(encode(Image.fromarray(image), 'JPEG', 6))
  for crop in ('resize((4, 8))', 'inception_crop((4, 8), 100, 100, (2, 2))'):
    pp = f'decode|{crop}|value_range(-1, 1)'
    (batch,) = pipeline.EvalBatches(str(tmp_path), 'train', pp, 1).iterate()
    columns = batch['image'][0].mean((0, 2))
    assert columns[:3].max() < 20
    assert columns[-3:].min() > 180


# --- mistakes ----------------------------------------------------------------------


def specify(**arguments):
  _ = pipeline.TrainBatches(**arguments).spec


# What is called, its arguments ('folder' is one of images), and the words of the error.
DEFAULTS = {'source': 'digits', 'split': 'train', 'pp': DIGITS, 'batch_size': 8}
PLAIN = 'value_range(0,1)'
WHOLE, LARGE = f'decode|{PLAIN}', f'central_crop(9)|{PLAIN}'
REFUSED = [
  *(
    (call, change, words)
    for call in (pipeline.TrainBatches, pipeline.EvalBatches)
    for change, words in (
      ({'pp': 'resize(8)'}, ("'resize(8)'", 'one value_range')),
      ({'num_classes': 9}, ('0 to 9', 'num_classes=9', '0 to 8', 'digits#9')),
      ({'batch_size': 7, 'host': 0, 'hosts': 2}, ('batch_size=7', 2)),
      ({'source_options': {'size': 3}}, ('config.data.source_options.size',)),
    )
  ),
  (
    pipeline.TrainBatches,
    {'source': 'folder', 'pp': f'resize(8)|{PLAIN}'},
    ('folder', "'decode'"),
  ),
  (specify, {'source': 'folder', 'pp': WHOLE}, (WHOLE, 'resize(size)')),
  (specify, {'source': 'digits', 'pp': LARGE}, (LARGE, '9x9')),
]


@pytest.mark.parametrize(('call', 'arguments', 'words'), REFUSED)
def test_mistakes_are_reported(folder, call, arguments, words):
  arguments = DEFAULTS | arguments
  if arguments['source'] == 'folder':
    arguments['source'] = str(folder)
  with pytest.raises(UserError, match=naming(*words)):
    call(**arguments)


# --- ends --------------------------------------------------------------------------


def test_closing_leaves_no_thread(folder):
  batches = pipeline.TrainBatches(str(folder), 'train', FOLDER, 8)
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
    f'it = pipeline.TrainBatches({str(folder)!r}, "train", {FOLDER!r}, 8, host=0, hosts=1)'
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
