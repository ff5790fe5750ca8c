"""Every source: splits, options, labels, names, and what is missing."""

import concurrent.futures
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import naming
from PIL import Image

from vit_jax import paths
from vit_jax.data import sources
from vit_jax.data.sources import base, listing, record_files
from vit_jax.errors import UserError


def test_digits():
  train, test = (sources.build('digits', split) for split in ('train', 'test'))
  assert (len(train), len(test)) == (1437, 360)
  assert train.num_classes == 10
  from sklearn import datasets

  bunch = datasets.load_digits()
  examples = test.read(np.array([0, 3, 359]))
  for i, example in zip((0, 15, 1795), examples, strict=True):
    assert example['label'] == bunch.target[i]
    assert example['image'].shape == (8, 8, 1)
    assert example['image'].dtype == np.uint8
    np.testing.assert_array_equal(
      example['image'][..., 0], np.round(bunch.images[i] * 255 / 16)
    )
  assert test.name_of(3) == 'digits#15'
  assert train.name_of(3) == 'digits#4'
  assert np.bincount(test.labels).min() > 25
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
  source = sources.build(f'arrays:{tmp_path}/a.npz', 'train[-4:]')
  assert (len(source), source.num_classes, source.image_shape) == (4, 4, (4, 5, 1))
  example = source.read(np.array([1]))[0]
  np.testing.assert_array_equal(example['image'][..., 0], images[7])
  assert example['label'] == 3
  assert len(sources.build(f'{tmp_path}/a.npz', 'train')) == 10


@pytest.mark.parametrize(
  'keys', [('x_train', 'y_train', 'x_test', 'y_test'), None], ids=['keras', 'ours']
)
def test_arrays_of_several_splits(tmp_path, keys):
  keys = keys or ('train_images', 'train_labels', 'test_images', 'test_labels')
  images = np.zeros((6, 4, 4, 3), np.uint8)
  labels = np.array([[0], [1], [2], [0], [1], [4]])  # [N, 1], as Keras's CIFAR
  values = (images, labels, images[:2], labels[:2])
  np.savez(
    tmp_path / 'a.npz',
    class_names=['a', 'b', 'c', 'd', 'e'],
    **dict(zip(keys, values, strict=True)),
  )
  source = sources.build(f'{tmp_path}/a.npz', 'test')
  assert (len(source), source.num_classes) == (2, 5)
  assert source.class_names == ['a', 'b', 'c', 'd', 'e']


def test_arrays_with_several_labels_an_image(tmp_path):
  labels = np.array([[1, 0, 1], [0, 0, 0]])
  np.savez(tmp_path / 'a.npz', images=np.zeros((2, 4, 4, 1), np.uint8), labels=labels)
  source = sources.build(f'{tmp_path}/a.npz', 'train')
  assert source.features['label'].several
  assert source.num_classes == 3
  assert [list(x['label']) for x in source.read(np.array([0, 1]))] == [[0, 2], []]


IMAGES = np.zeros((3, 4, 4, 1), np.uint8)


@pytest.mark.parametrize(
  ('content', 'facts'),
  [
    ({'images': IMAGES}, ("['images']", 'labels', 'train_labels', 'y_train')),
    ({'images': IMAGES, 'labels': np.zeros(2, int)}, ('3 images', '2 labels')),
    (
      {'images': IMAGES / 255, 'labels': np.zeros(3, int)},
      ('images', 'float64', 'uint8'),
    ),
    ({'images': IMAGES, 'labels': np.zeros(3)}, ('labels', 'float64', 'integers')),
    ({'images': IMAGES, 'labels': np.array([1, None, 2])}, ('allow_pickle',)),
    (b'no npz', ()),
    (None, ('numpy.savez',)),
  ],
)
def test_wrong_arrays(tmp_path, content, facts):
  path = tmp_path / 'a.npz'
  if isinstance(content, bytes):
    path.write_bytes(content)
  elif content is not None:
    np.savez(path, **content)
  with pytest.raises(UserError, match=naming(path, *facts)):
    sources.build(f'arrays:{path}', 'train')


def test_labels_out_of_range(tmp_path):
  np.savez(tmp_path / 'a.npz', images=IMAGES, labels=np.array([0, 5, 1]))
  source = sources.build(f'{tmp_path}/a.npz', 'train')
  base.check_labels(source, 6)
  with pytest.raises(UserError, match=naming('0 to 5', 'num_classes=5', 'a.npz#1')):
    base.check_labels(source, 5)


# --- folder ------------------------------------------------------------------------


def write_folder(root, layout):
  """Writes {path: grey level} as images, text for other extensions."""
  for path, level in layout.items():
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix.lower() in ('.txt', '.db', ''):
      file.write_text('no image')
    else:
      Image.new('RGB', (6, 5), (level,) * 3).save(file)


def test_folder(tmp_path):
  layout = {f'train/dog/{i}.JPG': 10 for i in range(5)}
  layout |= {f'train/cat/deep/er/{i}.png': 20 for i in range(4)}
  layout |= {'train/cat/a.jpeg': 20, 'train/cat/notes.txt': 0, 'train/cat/.x.png': 0}
  layout |= {'val/dog/0.webp': 10, 'val/cat/1.TIFF': 20, 'val/Thumbs.db': 0}
  write_folder(tmp_path, layout)
  (tmp_path / 'train/cat/loop').symlink_to(tmp_path / 'train/cat')
  (tmp_path / 'train/dog/link.png').symlink_to(tmp_path / 'train/dog/0.JPG')
  source = sources.build(f'folder:{tmp_path}', 'train')
  assert source.class_names == ['cat', 'dog']
  assert len(source) == 5 + 4 + 1 + 1
  names = [source.name_of(i) for i in range(len(source))]
  assert len(set(names)) == len(names)
  for i, example in enumerate(source.read(np.arange(len(source)))):
    with open(names[i], 'rb') as file:
      assert example['image'] == file.read()
    assert example['label'] == source.labels[i] == ('/dog/' in names[i])
  for split in ('val', 'validation', 'valid'):
    assert len(sources.build(str(tmp_path), split)) == 2
  assert len(sources.build(str(tmp_path), 'train+val[:50%]')) == 12
  with pytest.raises(UserError, match=naming("'test'", "'train'", "'validation'")):
    sources.build(str(tmp_path), 'test')


def test_folder_without_split_folders_is_mixed(tmp_path):
  write_folder(tmp_path, {f'{c}/{i}.png': 0 for c in 'abcd' for i in range(50)})
  first = sources.build(str(tmp_path), 'train[:80%]')
  rest = sources.build(str(tmp_path), 'train[80%:]')
  names = [{s.name_of(i) for i in range(len(s))} for s in (first, rest)]
  assert (len(first), len(rest), len(names[0] | names[1])) == (160, 40, 200)
  # 40 of 200 in four equal classes: 10 each, deviation 2.4.
  assert np.bincount(rest.labels, minlength=4).min() >= 3
  # A new file moves no other file.
  before = [sources.build(str(tmp_path), 'train').name_of(i) for i in range(200)]
  write_folder(tmp_path, {'b/new.png': 0})
  more = sources.build(str(tmp_path), 'train')
  after = [more.name_of(i) for i in range(201)]
  assert [name for name in after if not name.endswith('new.png')] == before
  assert first.fingerprint != sources.build(str(tmp_path), 'train[:80%]').fingerprint


@pytest.fixture
def listed(tmp_path, monkeypatch):
  """Returns (folder of three classes, the folders that were listed since, settle)."""
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  root, calls, lists = tmp_path / 'photos', [], listing._list
  write_folder(root, {f'{c}/{i}.png': i for c in 'abc' for i in range(3)})
  write_folder(root, {'c/deep/3.png': 3})

  def recorded(directory):
    calls.append(os.path.basename(directory))
    return lists(directory)

  def settle():
    # As `_SETTLED` later, without the wait: file systems' clocks tick every 4 or 10 ms.
    monkeypatch.setattr(listing, '_SETTLED', 20 * 10**6)
    time.sleep(0.03)

  monkeypatch.setattr(listing, '_list', recorded)
  return root, calls, settle


def opened(root, **options):
  """Returns (names, labels, fingerprint) of a folder as a source."""
  source = sources.build(f'folder:{root}', 'train', **options)
  names = [os.path.relpath(source.name_of(i), root) for i in range(len(source))]
  return names, source.labels.tolist(), source.fingerprint


def test_the_order_of_a_folder_is_that_of_a_hash(listed):
  # As release 0.1 had it, and as runs that resume rely on.
  root, *_ = listed
  names, labels, fingerprint = opened(root)
  assert names == sorted(names, key=lambda x: hashlib.sha256(x.encode()).digest())
  assert labels == ['abc'.index(name[0]) for name in names]
  rows = [(x, n, (root / x).stat().st_size) for x, n in zip(names, labels, strict=True)]
  assert fingerprint == base.fingerprint((['a', 'b', 'c'], *rows))


def test_a_folder_that_did_not_change_is_not_listed_again(listed):
  root, calls, settle = listed
  first = opened(root)
  assert opened(root) == first
  assert sorted(calls) == [*'aabbcc']  # made a moment ago: it might change unseen
  settle()
  opened(root)
  calls.clear()
  assert opened(root) == first
  assert not calls
  assert opened(root, keep_listing=False) == first
  assert sorted(calls) == [*'abc']


@pytest.mark.parametrize(
  ('change', 'folders'),
  [
    (lambda root: write_folder(root, {'b/new.png': 0}), 'b'),
    (lambda root: (root / 'b/1.png').unlink(), 'b'),
    (lambda root: (root / 'b/1.png').rename(root / 'b/5.png'), 'b'),
    (lambda root: (root / 'b/1.png').rename(root / 'c/deep/1.png'), 'bc'),
    (lambda root: write_folder(root, {'c/deep/er/1.png': 0}), 'c'),
    (lambda root: write_folder(root, {'B/1.png': 0}), 'B'),
    (lambda root: shutil.rmtree(root / 'b'), ''),
    (lambda root: shutil.rmtree(root / 'c/deep'), 'c'),
    (lambda root: (root / 'b').rename(root / 'd'), 'd'),
    (lambda root: swap(root / 'a', root / 'b'), 'ab'),
    # A set time, as by tar or rsync, hides nothing.
    (lambda root: back_to_the_old_time(root / 'b'), 'b'),
    (lambda root: (root / 'c/away').symlink_to(root.parent / 'away'), 'c'),
    # Overwritten in place: all of a class.
    (lambda root: [p.write_bytes(b'') for p in (root / 'b').iterdir()], 'b'),
  ],
)
def test_what_changes_in_a_folder_is_seen(listed, change, folders):
  root, calls, settle = listed
  settle()
  before = opened(root)
  change(root)
  calls.clear()
  after = opened(root)
  assert sorted(calls) == sorted(folders)
  assert after == opened(root, keep_listing=False)
  settle()
  opened(root)
  calls.clear()
  assert opened(root) == after
  if 'c/away' in str([*root.rglob('*')]):  # leads nowhere, until it does
    assert calls == ['c']
    write_folder(root.parent / 'away', {'1.png': 0})
    assert len(opened(root)[0]) == len(before[0]) + 1
  else:
    assert not calls
    assert after != before


def swap(one, other):
  one.rename(one.parent / '.aside')
  other.rename(one)
  (one.parent / '.aside').rename(other)
  (one / 'more.png').write_bytes(b'')  # or the two were the same


def back_to_the_old_time(directory):
  times = directory.stat()
  (directory / 'more.png').write_bytes(b'')
  os.utime(directory, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize('part', [0, 10, 0.5, -1])
def test_a_damaged_listing_is_not_used(listed, part):
  root, calls, settle = listed
  settle()
  first = opened(root)
  (kept,) = paths.cache_dir().glob('listings/*')
  data = kept.read_bytes()
  changed = data.replace(b'1.png', b'7.png')
  for damaged in (data[: int(len(data) * part) if part < 1 else part], changed, b'{}'):
    kept.write_bytes(damaged)
    calls.clear()
    assert opened(root) == first
    assert sorted(calls) == [*'abc']
  calls.clear()
  opened(root)
  assert not calls  # written anew


def test_a_listing_that_cannot_be_written(listed, tmp_path, monkeypatch):
  root, _, settle = listed
  settle()
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'file'))
  assert opened(root) == opened(root)


def test_listings_written_at_once(listed):
  root, calls, settle = listed
  settle()
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    every = list(pool.map(lambda _: opened(root), range(16)))
  assert every == every[:1] * 16
  assert len([*paths.cache_dir().glob('listings/*')]) == 1
  calls.clear()
  opened(root)
  assert not calls


@pytest.mark.parametrize(
  ('layout', 'split', 'facts'),
  [
    ({'train/a/1.png': 0, 'train/b/1.txt': 0}, 'train', ('{}/train/b', '.png')),
    ({'train/a/1.png': 0, 'val/c/1.png': 0}, 'val', ('{}/val', "'c'")),
    ({'train/1.png': 0}, 'train', ('{}/train', 'class')),
    ({'1.png': 0}, 'train', ('{}', 'class')),
    (
      {'val/a/1.png': 0, 'valid/a/1.png': 0},
      'val',
      ("'val'", "'valid'", "'validation'"),
    ),
    ({'train/a/1.png': 0}, 'trian', ("'trian'", "['train']")),
  ],
)
def test_wrong_folders(tmp_path, layout, split, facts):
  write_folder(tmp_path, layout)
  facts = [fact.replace('{}', str(tmp_path)) for fact in facts]
  with pytest.raises(UserError, match=naming(*facts)):
    sources.build(f'folder:{tmp_path}', split)


def test_folder_with_an_unreadable_file(tmp_path):
  write_folder(tmp_path, {'a/1.png': 0, 'b/2.png': 0})
  source = sources.build(str(tmp_path), 'train')
  os.remove(source.name_of(1))
  first, second = source.read(np.array([0, 1]))
  assert 'image' in first
  assert second['error'] == 'cannot be read: No such file or directory'


# --- tfds --------------------------------------------------------------------------


def make_tfds(directory, file_format, name, multi_label):
  """Prepares a real TFDS data set of 23 + 7 images with a builder of our own."""
  import tensorflow_datasets as tfds

  label = tfds.features.ClassLabel(names=['a', 'b', 'c'])
  features = {'image': tfds.features.Image(), 'label': label}
  if multi_label:
    features = {
      'picture': tfds.features.Image(),
      'labels': tfds.features.Sequence(label),
    }

  def examples(count):
    for i in range(count):
      image = np.full((4 + i, 5, 3), i, np.uint8)
      labels = [k for k in range(3) if i >> k & 1]
      several = {'picture': image, 'labels': labels}
      yield i, several if multi_label else {'image': image, 'label': i % 3}

  methods = {
    'VERSION': tfds.core.Version('1.2.0'),
    '__module__': __name__,
    '_info': lambda self: tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict(features)
    ),
    '_split_generators': lambda self, _: {'train': examples(23), 'test': examples(7)},
    '_generate_examples': lambda self: None,
  }
  with tfds.core.registered.skip_registration():
    builder = type(name.title(), (tfds.core.GeneratorBasedBuilder,), methods)
  made = builder(data_dir=str(directory), file_format=file_format)
  made.download_and_prepare()


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """{file format: data_dir} of a data set that holds the same examples."""
  import warnings

  out = {}
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # TFDS's and Apache Beam's own, while writing
    for file_format in ('array_record', 'tfrecord'):
      out[file_format] = tmp_path_factory.mktemp(file_format)
      make_tfds(out[file_format], file_format, 'tiny', multi_label=False)
      make_tfds(out[file_format], file_format, 'several', multi_label=True)
  return out


@pytest.mark.parametrize('file_format', ['array_record', 'tfrecord'])
@pytest.mark.parametrize(
  'split', ['train', 'test[:50%]', 'train[3:9]+test', 'train[-5:]']
)
def test_tfds_agrees_with_tfds(prepared, file_format, split):
  import tensorflow_datasets as tfds

  source = sources.build('tfds:tiny', split, data_dir=str(prepared[file_format]))
  assert source.class_names == ['a', 'b', 'c']
  # TFDS reads only TFRecord this way; both formats hold the same order.
  directory = os.path.join(prepared['tfrecord'], 'tiny', '1.2.0')
  builder = tfds.builder_from_directory(directory)
  config = tfds.ReadConfig(interleave_cycle_length=1)
  want = list(builder.as_dataset(split=split, read_config=config).as_numpy_iterator())
  assert len(source) == len(want)
  order = np.random.default_rng(0).permutation(len(source))
  for i, example in zip(order, source.read(order), strict=True):
    assert example['label'] == want[i]['label']
    image = Image.open(io.BytesIO(example['image']))
    np.testing.assert_array_equal(image, want[i]['image'])


@pytest.mark.parametrize('file_format', ['array_record', 'tfrecord'])
def test_tfds_with_several_labels(prepared, file_format):
  options = {'data_dir': str(prepared[file_format]), 'image_key': 'picture'}
  source = sources.build('tfds:several', 'test', **options)
  assert source.features['label'].several
  assert source.num_classes == 3
  labels = {tuple(x['label']) for x in source.read(np.arange(7))}
  assert labels == {(), (0,), (1,), (0, 1), (2,), (0, 2), (1, 2)}


@pytest.mark.parametrize('file_format', ['array_record', 'tfrecord'])
def test_tfds_is_read_without_tensorflow(prepared, file_format):
  code = (
    'import sys, numpy as np\n'
    'from vit_jax.data import sources\n'
    's = sources.build("tfds:tiny", "train")\n'
    'assert len(s.read(np.arange(len(s)))) == 23\n'
    'assert "tensorflow" not in sys.modules\n'
  )
  env = os.environ | {'TFDS_DATA_DIR': str(prepared[file_format])}
  subprocess.run([sys.executable, '-c', code], check=True, timeout=60, env=env)


def test_tfds_by_directory_and_version(prepared, tmp_path):
  directory = os.path.join(prepared['array_record'], 'tiny', '1.2.0')
  assert len(sources.build(f'tfds:{directory}', 'test')) == 7
  (tmp_path / 'tiny').mkdir()
  for version in ('1.9.0', '1.10.0'):
    os.symlink(directory, tmp_path / 'tiny' / version)
  options = {'data_dir': str(tmp_path)}
  assert len(sources.build('tiny:1.9.0', 'test', **options)) == 7
  assert len(sources.build('tiny', 'test', **options)) == 7
  with pytest.raises(UserError, match=naming('tiny/2.0.0', "'1.10.0'", "'1.9.0'")):
    sources.build('tiny:2.0.0', 'test', **options)
  (tmp_path / 'two').mkdir()
  for config in ('a', 'b'):
    os.symlink(tmp_path / 'tiny', tmp_path / 'two' / config)
  assert len(sources.build('tfds:two/b', 'test', **options)) == 7
  with pytest.raises(UserError, match=naming('tfds:two/a', 'tfds:two/b')):
    sources.build('tfds:two', 'test', **options)


@pytest.mark.parametrize(
  ('name', 'facts'),
  [
    (
      'imagenet2012',
      ('ILSVRC2012_img_train.tar', 'tfds build imagenet2012 --data_dir='),
    ),
    ('cifar10', ('tfds build cifar10',)),
    ('imagenet21k', ('TFDS', 'vit_jax.tools.prepare', 'folder:PATH')),
    ('cifra10', ('vit_jax.tools.prepare', 'cifar10')),
    ('digit', ('digits',)),
  ],
)
def test_tfds_that_is_not_prepared(tmp_path, monkeypatch, name, facts):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  with pytest.raises(UserError, match=naming(f'{tmp_path}/{name}', *facts)):
    sources.build(name, 'train')


def test_tfrecord_offsets_are_kept(prepared, tmp_path, monkeypatch):
  import shutil

  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  home = tmp_path / 'data' / 'tiny' / '1.2.0'
  shutil.copytree(os.path.join(prepared['tfrecord'], 'tiny', '1.2.0'), home)
  options = {'data_dir': str(tmp_path / 'data')}
  for kept in home.glob('*.npz'):
    kept.unlink()
  whole = sources.build('tiny', 'train', **options).read(np.arange(23))
  assert (home / 'train.record_offsets.npz').exists()
  assert not list(home.glob('*.tmp*'))
  # Kept: not scanned again.
  monkeypatch.setattr(record_files, '_scan', lambda path: pytest.fail('scanned again'))
  again = sources.build('tiny', 'train', **options).read(np.arange(23))
  assert [x['image'] for x in again] == [x['image'] for x in whole]
  monkeypatch.undo()
  # A changed file: scanned again, and found wanting.
  file = next(home.glob('tiny-train*'))
  data = file.read_bytes()
  file.write_bytes(data[:-10])
  with pytest.raises(UserError, match=naming(str(file), 'record 22')):
    sources.build('tiny', 'train', **options)
  length = struct.unpack('<Q', data[:8])[0] + 16
  file.write_bytes(data[length:])
  with pytest.raises(UserError, match=naming(str(home), 'train', 22, 23)):
    sources.build('tiny', 'train', **options)
  # A broken record is one broken example.
  broken = bytearray(data)
  broken[12 : length - 4] = bytes(length - 16)
  file.write_bytes(broken)
  examples = sources.build('tiny', 'train', **options).read(np.arange(23))
  assert ['error' in x for x in examples] == [True] + 22 * [False]


def test_tfrecord_offsets_go_to_the_cache_of_a_read_only_data_set(
  prepared, tmp_path, monkeypatch
):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  write = np.savez

  def read_only(path, **arrays):
    if not str(path).startswith(str(tmp_path)):
      raise PermissionError(13, 'Permission denied')
    write(path, **arrays)

  monkeypatch.setattr(np, 'savez', read_only)
  home = os.path.join(prepared['tfrecord'], 'tiny', '1.2.0')
  for name in os.listdir(home):
    if name.endswith('.npz'):
      os.remove(os.path.join(home, name))
  assert len(sources.build(f'tfds:{home}', 'test')) == 7
  assert [p.name.split('-')[1] for p in tmp_path.iterdir()] == [
    'test.record_offsets.npz'
  ]


# --- the table ---------------------------------------------------------------------


@pytest.mark.parametrize(
  ('source', 'options', 'facts'),
  [
    ('/no/such/dir', {}, ("'/no/such/dir'", 'folder:PATH')),
    ('folder:/no/such/dir', {}, ("'/no/such/dir'", 'DIR/train/CLASS/IMAGE')),
    ('./nothing', {}, ("'./nothing'", 'folder:PATH')),
    ('flder:/tmp', {}, ("'flder'", 'folder')),
    ('folder', {}, ("'folder'", 'folder:PATH')),
    ('', {}, ("data.source is ''", 'digits', 'tfds:NAME')),
    ('digits:x', {}, ("'digits'", "'x'")),
    ('digits', {'size': 3}, ('source_options.size',)),
    ('synthetic', {'siez': 3}, ('source_options.siez', 'size')),
    ('synthetic', {'size': 0}, ('size=0',)),
    ('synthetic', {'num_classes': 0}, ('num_classes=0',)),
  ],
)
def test_wrong_sources(source, options, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    sources.build(source, 'train', **options)


def test_fingerprint_separates_its_parts():
  assert base.fingerprint(['ab', 'c']) != base.fingerprint(['a', 'bc'])
  assert len(json.dumps(base.fingerprint(['a']))) == 18


def test_folder_without_validation_says_how_to_split_it(tmp_path):
  for name in ('cat', 'dog'):
    (tmp_path / name).mkdir()
    Image.new('RGB', (8, 8)).save(tmp_path / name / '1.png')
  with pytest.raises(
    UserError, match=naming("'validation'", 'train[:90%]', 'train[90%:]')
  ):
    sources.build(f'folder:{tmp_path}', 'val')
