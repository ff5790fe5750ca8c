"""The data sets of fine-grained classification: published splits, or what TFDS has."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.support import naming, vtab_fakes
from vit_jax.data import pipeline, sources
from vit_jax.errors import DataError, UserError
from vit_jax.lab.data.fgvc import SETS


def write(folder, name, ids=None, images=None):
  """Writes 3, 1 and 2 images a class, and the three files that tell of them."""
  ids = ids or list(range(1, SETS[name].classes + 1))
  home = folder / (SETS[name].images if images is None else images)
  home.mkdir(parents=True)
  Image.fromarray(np.full((4, 6, 3), 7, np.uint8)).save(home / 'one.png')
  tables, n = {'train': {}, 'val': {}, 'test': {}}, 0
  for i, value in enumerate(ids):
    (home / f'{i}').mkdir()
    for part in ('train', 'train', 'train', 'val', 'test', 'test'):
      path, n = f'{i}/{n}.png', n + 1
      (home / path).hardlink_to(home / 'one.png')
      tables[part][path] = value
  for part, table in tables.items():
    (folder / f'{part}.json').write_text(json.dumps(table))
  return tables


@pytest.fixture(scope='module')
def published(tmp_path_factory):
  directory = tmp_path_factory.mktemp('fgvc')
  return directory, {name: write(directory / name, name) for name in ('dogs', 'cars')}


@pytest.mark.parametrize('name', ['dogs', 'cars'])
def test_published_splits(published, name):
  directory, tables = published
  build = lambda split: sources.build(f'fgvc:{name}', split, data_dir=str(directory))
  root = str(directory / name / SETS[name].images)
  of = {}
  for part, table in tables[name].items():
    source = build(part)
    assert len(source) == len(table)
    assert source.num_classes == len(source.class_names) == SETS[name].classes
    assert source.class_names[:2] == ['1', '2']
    names = [source.name_of(i) for i in range(len(source))]
    of[part] = names
    paths = [path.removeprefix(root).lstrip('/') for path in names]
    assert sorted(paths) == sorted(table)
    assert source.labels.tolist() == [table[path] - 1 for path in paths]
    labels = [example['label'] for example in source.read(np.arange(5))]
    assert labels == source.labels[:5].tolist()
  both = build('trainval')
  names = [both.name_of(i) for i in range(len(both))]
  assert names == of['train'] + of['val']
  # In no order of classes, so that a part is like the whole.
  assert len(set(build('test[:60]').labels)) > 35
  assert build('train').fingerprint != build('val').fingerprint
  assert build('train').fingerprint == build('train').fingerprint


def test_images_and_labels_come_through_the_pipeline(published):
  options = {'data_dir': str(published[0] / 'dogs')}  # the folder itself
  args = ('fgvc:dogs', 'val[:4]', 'decode|resize(4)|value_range(-1, 1)', 4)
  (batch,) = pipeline.evaluate(*args, source_options=options).iterate()
  assert (np.asarray(batch['image']) == 7).all()
  source = sources.build('fgvc:dogs', 'val[:4]', **options)
  assert batch['label'].tolist() == source.labels.tolist()


def test_classes_that_are_texts_or_few(tmp_path):
  names = [f'{i:03}.warbler' for i in range(200)]
  write(tmp_path / 'cub', 'cub', ids=names[::-1])
  source = sources.build('fgvc:cub', 'train', data_dir=str(tmp_path))
  assert source.class_names == names
  path = tmp_path / 'cub' / 'val.json'
  table = json.loads(path.read_text())
  path.write_text(json.dumps({image: 'crow' for image in table}))
  with pytest.raises(UserError, match=naming('fgvc:cub', 201, 200, 'CUB-200-2011')):
    sources.build('fgvc:cub', 'train', data_dir=str(tmp_path))


@pytest.mark.parametrize(
  ('part', 'text', 'facts'),
  [
    ('test', '{', ('test.json', 'cannot be read')),
    ('test', '{"a.png": 1.5}', ('test.json', 'numbers')),
    ('val', '{"0/4.png": 1}', ("'0/4.png'", 'val.json', 'test.json')),
    ('val', None, ('val.json', 'cornell.box.com')),
    ('images', None, ('/Images/', 'ImageNetDogs')),
  ],
)
def test_broken_splits(tmp_path, part, text, facts):
  folder = tmp_path / 'dogs'
  write(folder, 'dogs')
  if text is not None:
    (folder / f'{part}.json').write_text(text)
  elif part == 'images':
    (folder / 'Images').rename(folder / 'elsewhere')
  else:
    (folder / f'{part}.json').unlink()
  with pytest.raises(UserError, match=naming('fgvc:dogs', *facts)):
    sources.build('fgvc:dogs', 'test', data_dir=str(tmp_path))


def test_a_missing_image_is_one_broken_example(tmp_path):
  write(tmp_path, 'dogs')
  source = sources.build('fgvc:dogs', 'test', data_dir=str(tmp_path))
  (tmp_path / 'Images' / '5').rename(tmp_path / 'gone')
  errors = ['error' in example for example in source.read(np.arange(240))]
  assert errors == (source.labels == 5).tolist()


def test_what_is_missing_says_how_to_get_it(tmp_path):
  options = {'data_dir': str(tmp_path)}
  facts = (f'{tmp_path}/nabirds/train.json', 'allaboutbirds.org', 'cornell.box.com')
  with pytest.raises(DataError, match=naming('fgvc:nabirds', *facts)) as error:
    sources.build('fgvc:nabirds', 'train', **options)
  assert 'tfds build' not in str(error.value)
  facts = (f'{tmp_path}/cars/train.json', 'jkrause/cars', 'tfds build cars196')
  with pytest.raises(DataError, match=naming('fgvc:cars', *facts)):
    sources.build('fgvc:cars', 'train', **options)
  with pytest.raises(UserError, match=naming("'aircraft'", 'nabirds')):
    sources.build('fgvc:aircraft', 'train', **options)


@pytest.mark.parametrize(
  ('name', 'sizes', 'parts'),
  [
    ('cub', {'train': 205, 'test': 9}, (184, 21, 9)),
    ('dogs', {'train': 30, 'test': 9}, (27, 3, 9)),
    ('cars', {'train': 30, 'test': 9}, (27, 3, 9)),
    ('flowers', {'train': 12, 'validation': 11, 'test': 9}, (12, 11, 9)),
  ],
)
def test_what_tfds_has_stands_in(tmp_path, caplog, name, sizes, parts):
  vtab_fakes.write_one(SETS[name].tfds, tmp_path, sizes)
  build = lambda split: sources.build(f'fgvc:{name}', split, data_dir=str(tmp_path))
  numbers = {}
  for part, size in zip(('train', 'val', 'test'), parts, strict=True):
    source = build(part)
    examples = source.read(np.arange(len(source)))
    found = [vtab_fakes.number_of(example['image']) for example in examples]
    assert len(set(found)) == len(source) == size
    assert [e['label'] for e in examples] == [i % SETS[name].classes for i in found]
    assert source.num_classes == SETS[name].classes
    numbers[part] = found
  both = build('trainval')
  found = [vtab_fakes.number_of(e['image']) for e in both.read(np.arange(len(both)))]
  assert found == numbers['train'] + numbers['val']
  assert ('not the published' in caplog.text) == (name != 'flowers')
  if name != 'flowers':
    assert sorted(found) == list(range(sizes['train']))
  if name == 'cub':  # the same today as at any time
    val = '0 4 11 26 39 58 65 69 73 75 80 86 87 139 145 150 157 169 178 193 197'
    assert numbers['val'] == [int(n) for n in val.split()]


def test_what_tfds_has_is_not_all(tmp_path):
  vtab_fakes.write_one(SETS['cars'].tfds, tmp_path, {'train': 3})
  with pytest.raises(UserError, match=naming('fgvc:cars', 'cars196', "'test'")):
    sources.build('fgvc:cars', 'train', data_dir=str(tmp_path))
