"""VTAB's tasks are those of the benchmark's own code, run on the same miniature data.

Run by `make peer`, where TASK_ADAPTATION names a checkout of
github.com/google-research/task_adaptation.
"""

import importlib
import os
import sys
import types

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
# Its module and class, and the arguments.
PEERS = """\
caltech101 caltech.Caltech101
cifar100 cifar.CifarData num_classes=100
dtd dtd.DTDData
flowers102 oxford_flowers102.OxfordFlowers102Data
pets oxford_iiit_pet.OxfordIIITPetData
sun397 sun397.Sun397Data config=tfds
svhn svhn.SvhnData
camelyon patch_camelyon.PatchCamelyonData
eurosat eurosat.EurosatData subset=rgb data_key=image
resisc45 resisc45.Resisc45Data
retinopathy diabetic_retinopathy.RetinopathyData config=btgraham-300
clevr_count clevr.CLEVRData task=count_all
clevr_dist clevr.CLEVRData task=closest_object_distance
dmlab dmlab.DmlabData
dspr_loc dsprites.DSpritesData predicted_attribute=label_x_position num_classes=16
dspr_ori dsprites.DSpritesData predicted_attribute=label_orientation num_classes=16
kitti_dist kitti.KittiData task=closest_vehicle_distance
snorb_azim smallnorb.SmallNORBData predicted_attribute=label_azimuth
snorb_elev smallnorb.SmallNORBData predicted_attribute=label_elevation
"""
PEERS = {name: words for name, *words in map(str.split, PEERS.splitlines())}


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
    path, *words = PEERS[name]
    module, kind = path.split('.')
    options = {
      k: int(v) if v.isdigit() else v for k, v in (w.split('=') for w in words)
    }
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
