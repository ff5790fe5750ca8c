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
  build = lambda **keys: sources.build('voc', 'test', data_dir=str(tmp_path), **keys)
  source = build()
  assert source.features['label'].several
  assert source.num_classes == 20
  assert [list(x['label']) for x in source.read(np.arange(3))] == labels
  others = build(label_key='labels_no_difficult').read(np.arange(3))
  assert [list(x['label']) for x in others] == [[7]] * 3
  with pytest.raises(UserError, match=naming("'imag'", "['image']")):
    build(image_key='imag')


def test_tfds_is_read_without_tensorflow(prepared):
  code = (
    'import sys, numpy as np\n'
    'from vit_jax.data import sources\n'
    's = sources.build("tfds:cifar10", "train")\n'
    'assert len(s.read(np.arange(len(s)))) == 23\n'
    'assert "tensorflow" not in sys.modules\n'
  )
  env = os.environ | {'TFDS_DATA_DIR': str(prepared['tfrecord'])}
  subprocess.run([sys.executable, '-c', code], check=True, timeout=60, env=env)


def test_tfds_by_directory_and_version(prepared, tmp_path):
  directory = prepared['array_record'] / HOME
  build = lambda name: sources.build(name, 'test', data_dir=str(tmp_path))
  assert len(build(f'tfds:{directory}')) == 7
  for version in ('1.9.0', '1.10.0'):
    (tmp_path / 'tiny').mkdir(exist_ok=True)
    (tmp_path / 'tiny' / version).symlink_to(directory)
  assert len(build('tiny:1.9.0')) == len(build('tiny')) == 7
  with pytest.raises(UserError, match=naming('tiny/2.0.0', "'1.10.0'", "'1.9.0'")):
    build('tiny:2.0.0')
  (tmp_path / 'two').mkdir()
  for config in ('a', 'b'):
    (tmp_path / 'two' / config).symlink_to(tmp_path / 'tiny')
  assert len(build('tfds:two/b')) == 7
  with pytest.raises(UserError, match=naming('tfds:two/a', 'tfds:two/b')):
    build('tfds:two')


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
  shutil.copytree(prepared['tfrecord'] / HOME, tmp_path / HOME)
  (train,), (test,) = (
    list((tmp_path / HOME).glob(f'cifar10-{split}*')) for split in SIZES
  )
  build = lambda split: sources.build('cifar10', split, data_dir=str(tmp_path))
  # A broken record is one broken example.
  broken = bytearray(train.read_bytes())
  (length,) = struct.unpack('<Q', broken[:8])
  broken[12 : 12 + length] = bytes(length)
  train.write_bytes(broken)
  examples = build('train').read(np.arange(23))
  assert ['error' in x for x in examples] == [True] + 22 * [False]
  test.write_bytes(test.read_bytes()[:-10])
  with pytest.raises(UserError, match=naming(str(test))):
    build('test')


@pytest.mark.parametrize('form', ['array_record', 'tfrecord'])
@pytest.mark.parametrize('number', [4, 80, 10**15])
def test_files_with_other_numbers_of_records(prepared, tmp_path, form, number):
  shutil.copytree(prepared[form] / HOME, tmp_path / HOME)
  path = tmp_path / HOME / 'dataset_info.json'
  path.write_text(path.read_text().replace('"23"', f'"{number}"'))
  facts = 'cifar10-train', '23 records', f'{number:,}', 'dataset_info.json'
  with pytest.raises(UserError, match=naming(*facts)):
    sources.build('cifar10', 'train', data_dir=str(tmp_path))


def test_an_array_record_file_that_is_cut_off(prepared, tmp_path):
  shutil.copytree(prepared['array_record'] / HOME, tmp_path / HOME)
  (train,) = (tmp_path / HOME).glob('cifar10-train*')
  with train.open('r+b') as file:
    file.truncate(1 << 16)
  with pytest.raises(UserError, match=naming(str(train))):
    sources.build('cifar10', 'train', data_dir=str(tmp_path))


DAMAGE = {
  'empty': lambda data: b'',
  'half': lambda data: data[: len(data) // 2],
  'zeros': lambda data: bytes(len(data)),
  'not UTF-8': lambda data: b'\xff\xfe' + data,
  'a list': lambda data: b'[1]',
  'another type': lambda data: data.replace(b'"cifar10"', b'3').replace(b'"32"', b'{}'),
}


@pytest.mark.parametrize('damage', DAMAGE)
@pytest.mark.parametrize('name', ['dataset_info.json', 'features.json'])
def test_damaged_descriptions(prepared, tmp_path, name, damage):
  shutil.copytree(prepared['array_record'] / HOME, tmp_path / HOME)
  path = tmp_path / HOME / name
  path.write_bytes(DAMAGE[damage](path.read_bytes()))
  with pytest.raises(UserError, match=naming(str(path.parent), name)):
    sources.build('cifar10', 'train', data_dir=str(tmp_path))


@pytest.mark.parametrize('names', [b'', b'a\nb\n', b'\0\0\n', b'\xff\n', b'x\n' * 11])
def test_damaged_names_of_classes(prepared, tmp_path, names):
  shutil.copytree(prepared['array_record'] / HOME, tmp_path / HOME)
  (tmp_path / HOME / 'label.labels.txt').write_bytes(names)
  with pytest.raises(UserError, match=naming('cifar10', 'names')):
    sources.build('cifar10', 'train', data_dir=str(tmp_path))
