"""Data sets that TFDS prepared, read as TFDS reads them, and missing ones."""

import io
import os
import shutil
import struct
import subprocess
import sys
import warnings

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from vit_jax.data import sources
from vit_jax.errors import UserError


def make_tfds(directory, file_format, name='tiny', multi_label=False):
  """Prepares a real TFDS data set of 23 + 7 images with a builder of our own."""
  import tensorflow_datasets as tfds

  label = tfds.features.ClassLabel(names=['a', 'b', 'c'])
  image, label_key = 'image', 'label'
  if multi_label:
    image, label_key, label = 'picture', 'labels', tfds.features.Sequence(label)
  features = tfds.features.FeaturesDict(
    {image: tfds.features.Image(), label_key: label}
  )

  def examples(count):
    for i in range(count):
      classes = [k for k in range(3) if i >> k & 1] if multi_label else i % 3
      yield i, {image: np.full((4 + i, 5, 3), i, np.uint8), label_key: classes}

  methods = {
    'VERSION': tfds.core.Version('1.2.0'),
    '__module__': __name__,
    '_info': lambda self: tfds.core.DatasetInfo(builder=self, features=features),
    '_split_generators': lambda self, _: {'train': examples(23), 'test': examples(7)},
    '_generate_examples': lambda self: None,
  }
  with tfds.core.registered.skip_registration():
    builder = type(name.title(), (tfds.core.GeneratorBasedBuilder,), methods)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # TFDS's and Apache Beam's own, while writing
    builder(data_dir=str(directory), file_format=file_format).download_and_prepare()


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """{file format: data_dir} of a data set that holds the same examples."""
  out = {x: tmp_path_factory.mktemp(x) for x in ('array_record', 'tfrecord')}
  for file_format, directory in out.items():
    make_tfds(directory, file_format)
  make_tfds(out['array_record'], 'array_record', 'several', multi_label=True)
  return out


@pytest.mark.parametrize('file_format', ['array_record', 'tfrecord'])
@pytest.mark.parametrize('split', ['test[:50%]', 'train[3:9]+test', 'train[-5:]'])
def test_tfds_agrees_with_tfds(prepared, file_format, split):
  import tensorflow_datasets as tfds

  source = sources.build('tfds:tiny', split, data_dir=str(prepared[file_format]))
  assert source.class_names == ['a', 'b', 'c']
  # TFDS reads only TFRecord this way; both formats hold the same order.
  directory = os.path.join(prepared['tfrecord'], 'tiny', '1.2.0')
  builder = tfds.builder_from_directory(directory)
  config = tfds.ReadConfig(interleave_cycle_length=1)
  expected = list(
    builder.as_dataset(split=split, read_config=config).as_numpy_iterator()
  )
  assert len(source) == len(expected)
  order = np.random.default_rng(0).permutation(len(source))
  for i, example in zip(order, source.read(order), strict=True):
    assert example['label'] == expected[i]['label']
    image = Image.open(io.BytesIO(example['image']))
    np.testing.assert_array_equal(image, expected[i]['image'])


def test_tfds_with_several_labels(prepared):
  options = {'data_dir': str(prepared['array_record']), 'image_key': 'picture'}
  source = sources.build('tfds:several', 'test', **options)
  assert source.features['label'].several
  assert source.num_classes == 3
  labels = {tuple(x['label']) for x in source.read(np.arange(7))}
  assert labels == {(), (0,), (1,), (0, 1), (2,), (0, 2), (1, 2)}


def test_tfds_is_read_without_tensorflow(prepared):
  code = (
    'import sys, numpy as np\n'
    'from vit_jax.data import sources\n'
    's = sources.build("tfds:tiny", "train")\n'
    'assert len(s.read(np.arange(len(s)))) == 23\n'
    'assert "tensorflow" not in sys.modules\n'
  )
  env = os.environ | {'TFDS_DATA_DIR': str(prepared['tfrecord'])}
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
    ('imagenet2012', ('tfds build imagenet2012 --data_dir=',)),
    ('tfds:imagenet21k', ('TFDS', 'vit_jax prepare', 'folder:PATH')),
    ('tfds:cifra10', ('vit_jax prepare', 'cifar10')),
  ],
)
def test_tfds_that_is_not_prepared(tmp_path, monkeypatch, name, facts):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  where = f'{tmp_path}/{name.removeprefix("tfds:")}'
  with pytest.raises(UserError, match=naming(where, *facts)):
    sources.build(name, 'train')


@pytest.mark.parametrize(('name', 'near'), [('potos', 'fotos'), ('digit', 'digits')])
def test_a_name_that_is_nothing_here_is_first_of_all_no_folder(
  tmp_path, monkeypatch, name, near
):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'prepared'))
  monkeypatch.chdir(tmp_path)
  if near == 'fotos':
    (tmp_path / 'fotos').mkdir()
  facts = (
    f"There is no folder '{name}' in {tmp_path}.",
    f'"{near}"',
    f'{tmp_path}/prepared',
  )
  with pytest.raises(UserError, match=naming(*facts)):
    sources.build(name, 'train')


def test_damaged_tfrecord_files(prepared, tmp_path):
  home = tmp_path / 'tiny' / '1.2.0'
  shutil.copytree(os.path.join(prepared['tfrecord'], 'tiny', '1.2.0'), home)
  train, test = next(home.glob('tiny-train*')), next(home.glob('tiny-test*'))
  data = train.read_bytes()
  # A broken record is one broken example.
  broken, length = bytearray(data), struct.unpack('<Q', data[:8])[0]
  broken[12 : 12 + length] = bytes(length)
  train.write_bytes(broken)
  source = sources.build('tiny', 'train', data_dir=str(tmp_path))
  assert ['error' in x for x in source.read(np.arange(23))] == [True] + 22 * [False]
  test.write_bytes(test.read_bytes()[:-10])
  with pytest.raises(UserError, match=naming(str(test))):
    sources.build('tiny', 'test', data_dir=str(tmp_path))
