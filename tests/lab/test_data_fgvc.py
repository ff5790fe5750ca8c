"""The data sets of fine-grained classification and their published splits."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from vit_jax.data import sources
from vit_jax.errors import DataError, UserError
from vit_jax.lab.data.fgvc import SETS


def write(folder, name, ids=None, images=None):
  """Writes 3, 1 and 2 images a class, and the three files of paths and classes."""
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
  names = {}
  for part, table in tables[name].items():
    source = build(part)
    assert source.num_classes == len(source.class_names) == SETS[name].classes
    names[part] = [source.name_of(i) for i in range(len(source))]
    paths = [path.removeprefix(root).lstrip('/') for path in names[part]]
    assert sorted(paths) == sorted(table)
    assert source.labels.tolist() == [table[path] - 1 for path in paths]
    examples = source.read(np.arange(5))
    assert [example['label'] for example in examples] == source.labels[:5].tolist()
    assert Image.open(io.BytesIO(examples[0]['image'])).size == (6, 4)
  both = build('trainval')
  assert [both.name_of(i) for i in range(len(both))] == names['train'] + names['val']
  # In no order of classes, so that a part is like the whole.
  assert len(set(build('test[:60]').labels)) > 35
  assert build('train').fingerprint != build('val').fingerprint


def test_classes_that_are_texts_or_few(tmp_path):
  names = [f'{i:03}.warbler' for i in range(200)]
  write(tmp_path / 'cub', 'cub', ids=names[::-1])
  source = sources.build('fgvc:cub', 'train', data_dir=str(tmp_path))
  assert source.class_names == names


def test_a_missing_image_is_one_broken_example(tmp_path):
  write(tmp_path / 'dogs', 'dogs')
  source = sources.build('fgvc:dogs', 'test', data_dir=str(tmp_path))
  (tmp_path / 'dogs' / 'Images' / '5').rename(tmp_path / 'gone')
  errors = ['error' in example for example in source.read(np.arange(240))]
  assert errors == (source.labels == 5).tolist()


MIXED = json.dumps({'a': 1, 'b': '2'})
NESTED = json.dumps({'a': ['1']})
CROWS = json.dumps(dict.fromkeys('abc', 'crow'))
# A set, its file and other contents of it, and the words of the error.
REFUSED = [
  ('dogs', 'test.json', '{', ('fgvc:dogs', 'test.json', 'cannot be read')),
  ('dogs', 'Images', None, ('fgvc:dogs', '/Images/', 'ImageNetDogs')),
  ('cub', 'val.json', CROWS, ('fgvc:cub', 201, 200)),
  ('cub', 'val.json', MIXED, ('fgvc:cub', 'int', 'str')),
  ('cub', 'val.json', NESTED, ('fgvc:cub', 'list', 'str')),
]


@pytest.mark.parametrize(('name', 'file', 'contents', 'words'), REFUSED)
def test_broken_files(tmp_path, name, file, contents, words):
  write(tmp_path / name, name, ids=[f'{i:03}' for i in range(SETS[name].classes)])
  if contents is None:
    (tmp_path / name / file).rename(tmp_path / 'elsewhere')
  else:
    (tmp_path / name / file).write_text(contents)
  split = 'test' if file == 'test.json' else 'train'
  with pytest.raises(UserError, match=naming(*words)):
    sources.build(f'fgvc:{name}', split, data_dir=str(tmp_path))


def test_missing_data_says_how_to_get_it(tmp_path):
  words = (f'{tmp_path}/nabirds/train.json', 'allaboutbirds.org', 'cornell.box.com')
  with pytest.raises(DataError, match=naming('fgvc:nabirds', *words)):
    sources.build('fgvc:nabirds', 'train', data_dir=str(tmp_path))
