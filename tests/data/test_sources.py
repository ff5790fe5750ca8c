"""Bundled, synthetic and array sources: splits, labels, names; names that are not sources."""

import io
import zipfile

import numpy as np
import pytest

from tests.support import naming
from vit_jax.data import sources
from vit_jax.data.sources import base
from vit_jax.errors import UserError


def test_digits():
  from sklearn import datasets

  train, test = (sources.build('digits', split) for split in ('train', 'test'))
  assert (len(train), len(test)) == (1437, 360)
  assert train.num_classes == 10
  bunch = datasets.load_digits()
  for source, indices in ((test, [0, 3, 359]), (train, [0, 3])):
    for i, example in zip(indices, source.read(np.array(indices)), strict=True):
      row = int(source.name_of(i).removeprefix('digits#'))
      assert row == (5 * i if source is test else i + i // 4 + 1)
      assert example['label'] == bunch.target[row]
      expected = np.round(bunch.images[row, ..., None] * 255 / 16)
      np.testing.assert_array_equal(example['image'], expected)
  assert train.images.dtype == np.uint8
  assert len(sources.build('digits', 'train[:10%]+test')) == 144 + 360
  assert train.fingerprint != test.fingerprint
  assert train.fingerprint == sources.build('digits', 'train').fingerprint


def test_synthetic():
  options = {'size': (6, 4), 'num_classes': 7, 'num_examples': 50}
  source = sources.build('synthetic', 'train', **options)
  part = sources.build('synthetic', 'train[10:]', **options)
  assert (len(source), source.num_classes) == (50, 7)
  a, b = source.read(np.array([12, 13]))
  np.testing.assert_array_equal(part.read(np.array([2]))[0]['image'], a['image'])
  assert a['image'].shape == (6, 4, 3)
  assert (a['label'], b['label']) == (5, 6)
  assert np.any(a['image'] != b['image'])
  default = sources.build('synthetic', 'test')
  assert default.image_shape == (224, 224, 3)


# --- arrays ------------------------------------------------------------------------


def test_arrays_of_one_split(tmp_path):
  images = np.random.default_rng(0).integers(0, 256, (10, 4, 5), np.uint8)
  np.savez(tmp_path / 'a.npz', images=images, labels=np.arange(10) % 4)
  source = sources.build(f'{tmp_path}/a.npz', 'train[-4:]')
  assert (len(source), source.num_classes, source.image_shape) == (4, 4, (4, 5, 1))
  (example,) = source.read(np.array([1]))
  np.testing.assert_array_equal(example['image'][..., 0], images[7])
  assert example['label'] == 3


@pytest.mark.parametrize(
  'keys',
  [
    ('x_train', 'y_train', 'x_test', 'y_test'),  # Keras's
    ('train_images', 'train_labels', 'test_images', 'test_labels'),
  ],
)
def test_arrays_of_several_splits(tmp_path, keys):
  images = np.zeros((6, 4, 4, 3), np.uint8)
  labels = np.array([[0], [1], [2], [0], [1], [4]])  # [N, 1], as Keras's CIFAR
  arrays = zip(keys, (images, labels, images[:2], labels[:2]), strict=True)
  np.savez(tmp_path / 'a.npz', class_names=['a', 'b', 'c', 'd', 'e'], **dict(arrays))
  source = sources.build(f'arrays:{tmp_path}/a.npz', 'test')
  assert (len(source), source.num_classes) == (2, 5)
  assert source.class_names == ['a', 'b', 'c', 'd', 'e']


IMAGES = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 1), np.uint8)
GOOD = {'images': IMAGES, 'labels': np.arange(3)}


def npy(array) -> bytes:
  np.save(file := io.BytesIO(), array)
  return file.getvalue()


def zipped(**members: bytes) -> bytes:
  with zipfile.ZipFile(file := io.BytesIO(), 'w', zipfile.ZIP_DEFLATED) as archive:
    for name, data in members.items():
      archive.writestr(name, data)
  return file.getvalue()


def patched(first: dict, central: dict) -> bytes:
  """Returns an archive with other bytes from its start and in its first central entry."""
  images, labels = npy(np.arange(4096) // 16), npy(np.arange(3))
  data = bytearray(zipped(**{'images.npy': images, 'labels.npy': labels}))
  entry = data.index(b'PK\x01\x02')
  for at, value in [*first.items(), *((entry + i, x) for i, x in central.items())]:
    data[at] = value
  return bytes(data)


def bomb() -> bytes:  # made in its test alone, because it takes a second or two
  zeros = np.broadcast_to(np.uint8(0), (4 * 10**8,))
  return zipped(**{'images.npy': npy(zeros)})


FOUR = {**GOOD, 'labels': np.eye(3), 'class_names': list('abcd')}
# Arrays, or the bytes of a file or what makes them, and the words of the error.
REFUSED = [
  ({'images': IMAGES}, ("['images']", 'labels', 'train_labels', 'y_train')),
  ({**GOOD, 'labels': np.zeros(2, int)}, ('3 images', '2 labels')),
  ({**GOOD, 'images': IMAGES / 255}, ('images', 'float64', 'uint8')),
  ({**GOOD, 'images': IMAGES[:, :0]}, ('images', '(3, 0, 4, 1)')),
  ({**GOOD, 'labels': np.zeros(3)}, ('labels', 'float64', 'integers')),
  ({**GOOD, 'labels': np.array([1, None, 2])}, ('allow_pickle',)),
  ({**GOOD, 'labels': np.full(3, 2**62)}, ('labels', 2**62)),
  ({**GOOD, 'class_names': np.array('a')}, ('class_names', 'K=3')),
  ({**GOOD, 'class_names': ['a', 'b']}, ('class_names', 'K=3')),
  ({**GOOD, 'class_names': [b'a'] * 3}, ('class_names', '|S1')),
  (FOUR, ('3 classes', '4 names')),
  (b'no npz', ()),
  (npy(IMAGES), ()),
  (zipped(images=b'abc', labels=b'abc'), ('images',)),
  (bomb, ('400,000,128 bytes',)),
  (patched({6: 1}, {8: 1}), ('images', 'encrypted')),
  (patched({8: 99}, {10: 99}), ('images', 'compression method')),
  (patched({150 + i: 85 for i in range(40)}, {}), ('images',)),
  (None, ('numpy.savez',)),
]


@pytest.mark.parametrize(('content', 'words'), REFUSED)
def test_wrong_arrays(tmp_path, content, words):
  path = tmp_path / 'a.npz'
  if callable(content):
    content = content()
  if isinstance(content, bytes):
    path.write_bytes(content)
  elif content is not None:
    np.savez(path, **content)
  with pytest.raises(UserError, match=naming(path, *words)):
    sources.build(f'arrays:{path}', 'train')


def test_labels_out_of_range(tmp_path):
  np.savez(tmp_path / 'a.npz', images=IMAGES, labels=np.array([0, 5, 1]))
  source = sources.build(f'{tmp_path}/a.npz', 'train')
  base.check_labels(source, 6)
  with pytest.raises(ValueError, match=naming('0 to 5', 'num_classes=5', 'a.npz#1')):
    base.check_labels(source, 5)


def test_a_single_class_is_pointed_out(tmp_path):
  np.savez(tmp_path / 'a.npz', images=IMAGES, labels=np.zeros(3, int))
  line = sources.build(f'{tmp_path}/a.npz', 'train').describe()
  assert 'nothing to tell apart' in line


# --- the table ---------------------------------------------------------------------


@pytest.mark.parametrize(
  ('source', 'options', 'facts'),
  [
    ('digits', {}, ("'folder:digits'",)),  # a folder has the name
    ('folder:/no/such/dir', {}, ("'/no/such/dir'", 'DIR/train/CLASS/IMAGE')),
    ('./nothing', {}, ("'./nothing'", 'folder:PATH')),
    ('flder:/tmp', {}, ("'flder'", 'folder')),
    ('folder', {}, ("'folder'", 'folder:PATH')),
    ('', {}, ("data.source is ''", 'digits', 'tfds:NAME')),
    ('digits:x', {}, ("'digits'", "'x'")),
    ('synthetic', {'siez': 3}, ('source_options.siez', 'size')),
  ],
)
def test_wrong_sources(tmp_path, monkeypatch, source, options, facts):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'digits').mkdir()
  with pytest.raises(UserError, match=naming(*facts)):
    sources.build(source, 'train', **options)


def test_fingerprint_separates_its_parts():
  assert base.fingerprint(['ab', 'c']) != base.fingerprint(['a', 'bc'])
