"""VTAB's tasks are those of the benchmark's own code, run on the same miniature data.

Run by `make peer`, where TASK_ADAPTATION names a checkout of
github.com/google-research/task_adaptation.
"""

import importlib
import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tests.support import vtab_fakes
from tests.support.peers import MARKS
from vit_jax.data import sources
from vit_jax.data.ops import decode
from vit_jax.lab.data.vtab_tasks import TASKS

pytestmark = MARKS

CHECKOUT = os.environ.get('TASK_ADAPTATION')
# Versions that it names and that TFDS does not make, or that are wrong.
NEWER = {'oxford_iiit_pet:3.*.*': 'oxford_iiit_pet:4.*.*', 'kitti:3.1.0': 'kitti:3.*.*'}
# Task -> its module and class, and the arguments.
PEERS = json.loads(Path(__file__).with_name('vtab.json').read_text())['peers']


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  if not CHECKOUT:
    pytest.skip('TASK_ADAPTATION names no checkout of google-research/task_adaptation')
  directory = tmp_path_factory.mktemp('vtab')
  # In a format, and of sizes, that TFDS reads as a `tf.data.Dataset`.
  vtab_fakes.write(directory, file_format='tfrecord', full_size=True)
  return str(directory)


@pytest.fixture
def peer(monkeypatch, data):
  """A task's name -> the benchmark's own object of it."""
  import tensorflow_datasets as tfds

  monkeypatch.syspath_prepend(CHECKOUT)
  # No longer made for this TensorFlow; used for retinas, to turn and colour them.
  addons = types.ModuleType('tensorflow_addons.image')
  monkeypatch.setitem(sys.modules, addons.__name__, addons)
  package = types.ModuleType('tensorflow_addons')
  package.image = addons
  monkeypatch.setitem(sys.modules, package.__name__, package)
  build = tfds.builder
  monkeypatch.setattr(
    tfds, 'builder', lambda name, **k: build(NEWER.get(name, name), **k)
  )

  def make(name):
    path, options = PEERS[name]
    module, kind = path.split('.')
    module = importlib.import_module(f'task_adaptation.data.{module}')
    return getattr(module, kind)(data_dir=data, **options)

  return make


@pytest.mark.parametrize('name', TASKS)
def test_a_task_is_that_of_the_benchmark(peer, data, name):
  theirs = peer(name)
  assert theirs.get_num_classes() == TASKS[name].classes

  def both(split):
    examples = theirs._get_dataset_split(split, shuffle_files=False)
    examples = examples.map(theirs._image_decoder).map(theirs._base_preprocess_fn)
    source = sources.build(f'vtab:{name}', split, data_dir=data)
    return source.read(np.arange(len(source))), list(examples.as_numpy_iterator())

  for split in ('train800', 'val200', 'test'):
    for our, their in zip(*both(split), strict=True):
      assert our['label'] == their['label']
      image = decode.decode(our['image'], 1, None, channels=3, precise=False)
      np.testing.assert_array_equal(image, their['image'])
  # TFDS reads the two parts of this split in turns.
  our, their = (sorted(int(e['label']) for e in one) for one in both('train800val200'))
  assert our == their
