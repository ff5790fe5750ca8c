"""Data sets that TFDS prepared, read as TFDS reads them, and missing ones."""

import io
import os
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from tests.support.hostile_images import encode, picture
from tests.support.vtab_fakes import write_examples, write_one
from vit_jax.data import sources
from vit_jax.errors import UserError

SIZES = {'train': 23, 'test': 7}
HOME = 'cifar10/3.0.2'


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """{file format: data_dir} of CIFAR-10 in miniature, the same examples."""
  out = {x: tmp_path_factory.mktemp(x) for x in ('array_record', 'tfrecord')}
  for form, directory in out.items():
    write_one('cifar10', directory, SIZES, file_format=form, full_size=True)
  return out


@pytest.mark.parametrize('file_format', ['array_record', 'tfrecord'])
@pytest.mark.parametrize('split', ['test[:50%]', 'train[3:9]+test', 'train[-5:]'])
def test_tfds_agrees_with_tfds(prepared, file_format, split):
  import tensorflow_datasets as tfds

  source = sources.build('tfds:cifar10', split, data_dir=str(prepared[file_format]))
  # TFDS reads only TFRecord this way; both formats hold the same order.
  builder = tfds.builder_from_directory(prepared['tfrecord'] / HOME)
  assert source.class_names == builder.info.features['label'].names
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


def test_tfds_with_several_labels(tmp_path):
  import tensorflow_datasets as tfds

  labels = [[], [3], [1, 19]]
  image = lambda: io.BytesIO(encode(picture(), 'PNG'))
  rest = {'image/filename': 'x', 'objects': [], 'labels_no_difficult': [7]}
  rows = [{'image': image(), 'labels': x, **rest} for x in labels]
  builder = tfds.builder('voc/2007', data_dir=tmp_path, file_format='array_record')
  write_examples(builder, {'test': rows})
  options = {'data_dir': str(tmp_path)}
  source = sources.build('tfds:voc', 'test', **options)
  assert source.features['label'].several
  assert source.num_classes == 20
  assert [list(x['label']) for x in source.read(np.arange(3))] == labels
  other = sources.build('tfds:voc', 'test', label_key='labels_no_difficult', **options)
  others = other.read(np.arange(3))
  assert [list(x['label']) for x in others] == [[7]] * 3


def test_tfds_is_read_and_mistakes_are_reported_without_tensorflow(prepared):
  code = (
    'import sys, numpy as np\n'
    'from vit_jax.data import pipeline, sources\n'
    's = sources.build("tfds:cifar10", "train")\n'
    'assert len(s.read(np.arange(len(s)))) == 23\n'
    'try: pipeline.TrainBatches("digits", "train", "reszie(8)", 8)\n'
    'except ValueError as error: assert "Did you mean" in str(error)\n'
    'else: raise AssertionError("a misspelt op is not refused")\n'
    'pipeline.TrainBatches("digits", "train", "value_range(-1,1)", 8)\n'
    'assert "tensorflow" not in sys.modules\n'
  )
  env = os.environ | {'TFDS_DATA_DIR': str(prepared['tfrecord'])}
  subprocess.run([sys.executable, '-c', code], check=True, timeout=60, env=env)


@pytest.fixture
def home(prepared, tmp_path, monkeypatch):
  """A folder with prepared sets of two versions and of two configs, and with images."""
  data_dir, directory = tmp_path / 'prepared', prepared['array_record'] / HOME
  monkeypatch.setenv('TFDS_DATA_DIR', str(data_dir))
  monkeypatch.chdir(tmp_path)
  for name in ('tiny/1.9.0', 'tiny/1.10.0', 'two/a/1.0.0', 'two/b/1.0.0'):
    (data_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (data_dir / name).symlink_to(directory)
  (tmp_path / 'fotos').mkdir()
  return tmp_path


@pytest.mark.parametrize(
  'name', ['tiny:1.9.0', 'tiny', 'tfds:two/b', 'tfds:{directory}']
)
def test_tfds_by_directory_and_version(prepared, home, name):
  name = name.format(directory=prepared['array_record'] / HOME)
  assert len(sources.build(name, 'test')) == 7


# A source, its options, and the words of the error.
REFUSED = [
  ('tiny:2.0.0', {}, ('tiny/2.0.0', "'1.10.0'", "'1.9.0'")),
  ('tiny', {'image_key': 'imag'}, ("'imag'", "['image']")),
  ('tfds:two', {}, ('tfds:two/a', 'tfds:two/b')),
  (
    'imagenet2012',
    {},
    ('{}/prepared/imagenet2012', 'tfds build imagenet2012 --data_dir='),
  ),
  (
    'tfds:imagenet21k',
    {},
    ('{}/prepared/imagenet21k', 'TFDS', 'vit_jax prepare', 'folder:PATH'),
  ),
  ('tfds:cifra10', {}, ('{}/prepared/cifra10', 'vit_jax prepare', 'cifar10')),
  ('potos', {}, ("There is no folder 'potos' in {}.", '"fotos"')),
  ('digit', {}, ("There is no folder 'digit' in {}.", '"digits"')),
]


@pytest.mark.parametrize(('name', 'options', 'words'), REFUSED)
def test_a_set_that_is_not_there(home, name, options, words):
  words = [word.replace('{}', str(home)) for word in words]
  with pytest.raises(UserError, match=naming(*words)) as error:
    sources.build(name, 'train', **options)
  # Nothing more is said where one name is likely.
  assert 'no folder' not in words[0] or 'TFDS' not in str(error.value)


def test_a_broken_record_is_one_broken_example(prepared, tmp_path):
  shutil.copytree(prepared['tfrecord'] / HOME, tmp_path / HOME)
  (train,) = (tmp_path / HOME).glob('cifar10-train*')
  broken = bytearray(train.read_bytes())
  (length,) = struct.unpack('<Q', broken[:8])
  broken[12 : 12 + length] = bytes(length)
  train.write_bytes(broken)
  source = sources.build('cifar10', 'train', data_dir=str(tmp_path))
  assert ['error' in x for x in source.read(np.arange(23))] == [True] + 22 * [False]


DAMAGE = {
  'empty': lambda data: b'',
  'half': lambda data: data[: len(data) // 2],
  'zeros': lambda data: bytes(len(data)),
  'not UTF-8': lambda data: b'\xff\xfe' + data,
  'a list': lambda data: b'[1]',
  'another type': lambda data: data.replace(b'"cifar10"', b'3').replace(b'"32"', b'{}'),
}


def counting(number):
  return lambda data: data.replace(b'"23"', b'"%d"' % number)


# A format, its file, the damage, and the words of the error.
DAMAGED = [
  ('tfrecord', 'cifar10-test*', lambda data: data[:-10], ('{path}',)),
  ('array_record', 'cifar10-train*', lambda data: data[: 1 << 16], ('{path}',)),
  *(
    (
      form,
      'dataset_info.json',
      counting(number),
      ('cifar10-train', '23 records', words, 'dataset_info.json'),
    )
    for form in ('array_record', 'tfrecord')
    for number, words in ((4, '4'), (80, '80'), (10**15, '1,000,000,000,000,000'))
  ),
  *(
    ('array_record', name, damage, ('{folder}', name))
    for name in ('dataset_info.json', 'features.json')
    for damage in DAMAGE.values()
  ),
]


@pytest.mark.parametrize(('form', 'file', 'damage', 'words'), DAMAGED)
def test_damaged_files(prepared, tmp_path, form, file, damage, words):
  folder = shutil.copytree(prepared[form] / HOME, tmp_path / HOME)
  (path,) = folder.glob(file)
  path.write_bytes(damage(path.read_bytes()))
  words = [word.format(path=path, folder=folder) for word in words]
  split = 'test' if 'test' in file else 'train'
  with pytest.raises(UserError, match=naming(*words)):
    sources.build('cifar10', split, data_dir=str(tmp_path))


@pytest.mark.parametrize('names', [b'', b'a\nb\n', b'\0\0\n', b'\xff\n', b'x\n' * 11])
def test_damaged_names_of_classes(prepared, tmp_path, names):
  shutil.copytree(prepared['array_record'] / HOME, tmp_path / HOME)
  (tmp_path / HOME / 'label.labels.txt').write_bytes(names)
  with pytest.raises(UserError, match=naming('cifar10', 'names')):
    sources.build('cifar10', 'train', data_dir=str(tmp_path))
