"""Folders of images: classes, splits and order."""

import hashlib
import os

import numpy as np
import pytest

from tests.support import naming
from tests.support.archives import write_folder
from vit_jax.data import pipeline, sources
from vit_jax.data.sources import folder
from vit_jax.errors import UserError


def write(root, names):
  """Writes files that hold their names: a source does not decode them."""
  write_folder(root, {name: name.encode() for name in names})


def test_folder(tmp_path):
  write(tmp_path, [f'train/dog/{i}.JPG' for i in range(5)])
  write(tmp_path, [f'train/cat/deep/er/{i}.png' for i in range(4)])
  write(tmp_path, ['train/cat/a.jpeg', 'train/cat/notes.txt', 'train/cat/.x.png'])
  write(tmp_path, ['val/dog/0.webp', 'val/cat/1.TIFF', 'val/Thumbs.db'])
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


def test_the_order_is_that_of_a_hash_of_the_paths(tmp_path):
  write(tmp_path, [f'{c}/{i}.png' for c in 'abcd' for i in range(50)])
  write(tmp_path, ['c/deep/3.png'])
  build = lambda split='train': sources.build(str(tmp_path), split)
  names_of = lambda source: [source.name_of(i) for i in range(len(source))]
  whole, first, rest = build(), build('train[:80%]'), build('train[80%:]')
  paths = [os.path.relpath(name, tmp_path) for name in names_of(whole)]
  assert paths == sorted(paths, key=lambda x: hashlib.sha256(x.encode()).digest())
  assert whole.labels.tolist() == ['abcd'.index(path[0]) for path in paths]
  assert names_of(whole) == names_of(first) + names_of(rest)
  # 40 of 201 in four classes: 10 each, deviation 2.4.
  assert np.bincount(rest.labels, minlength=4).min() >= 3
  # A new file moves no other file; a new name changes the fingerprint.
  before, fingerprint = names_of(whole), whole.fingerprint
  assert build().fingerprint == fingerprint
  write(tmp_path, ['b/new.png'])
  after = names_of(build())
  assert [name for name in after if not name.endswith('new.png')] == before
  (tmp_path / 'b/new.png').unlink()
  (tmp_path / 'c/deep/3.png').rename(tmp_path / 'c/deep/4.png')
  assert build().fingerprint != fingerprint


@pytest.mark.parametrize('place', ['', 'train/'])
def test_images_in_no_folder_have_no_labels(tmp_path, place):
  write(tmp_path, [f'{place}{i}.png' for i in range(5)] + [f'{place}notes.txt'])
  source = sources.build(str(tmp_path), 'train')
  assert source.labels is source.class_names is None
  read = [x['image'].decode() for x in source.read(np.arange(5)) if [*x] == ['image']]
  assert sorted(read) == [f'{place}{i}.png' for i in range(5)]
  assert 'train: 5 images; left out: 1 .txt; no labels, which' in source.describe(
    'train'
  )
  batches = pipeline.EvalBatches(str(tmp_path), 'train', 'decode|value_range(-1, 1)', 2)
  with pytest.raises(UserError, match=naming('label', 'CLASS/1.jpg')):
    batches.classes_of('label')


CUT = ("'validation'", 'train[:90%]', 'train[90%:]')
# Files of a folder, a split, and the words of the error.
REFUSED = [
  (['train/a/1.png', 'train/b/1.txt'], 'train', ('{}/train/b', '.png')),
  (['train/a/1.png', 'val/c/1.png'], 'val', ('{}/val', "'c'")),
  (['train/a/1.png', 'val/a/1.png'], 'test', ("'test'", "'train'", "'validation'")),
  (['train/notes.txt'], 'train', ('{}/train', '.txt', '.png')),
  (['train/1.png', 'val/a/1.png'], 'val', ('{}/val', "'a'")),
  (['val/a/1.png', 'valid/a/1.png'], 'val', ("'val'", "'valid'", "'validation'")),
  (['train/a/1.png'], 'trian', ("'trian'", "['train']")),
  (['cat/1.png', 'dog/1.png'], 'val', CUT),
]


@pytest.mark.parametrize(('files', 'split', 'words'), REFUSED)
@pytest.mark.parametrize('prefix', ['folder:', ''])
def test_wrong_folders(tmp_path, prefix, files, split, words):
  write(tmp_path, files)
  words = [word.replace('{}', str(tmp_path)) for word in words]
  with pytest.raises(UserError, match=naming(*words)) as error:
    sources.build(f'{prefix}{tmp_path}', split)
  assert 'There is no folder' not in str(error.value)


@pytest.mark.parametrize('heif', [False, True])
def test_a_line_describes_each_source(tmp_path, monkeypatch, heif):
  endings = folder.EXTENSIONS + folder.HEIF * heif
  monkeypatch.setattr(folder, 'extensions', lambda: endings)
  write(tmp_path, [f'train/cat/{i}.png' for i in range(7)])
  write(tmp_path, [f'train/dog/deep/{i}.jpg' for i in range(3)])
  write(tmp_path, ['train/cat/a.HEIC', 'train/dog/c.svg', 'train/dog/README'])
  write(tmp_path, ['train/x.jpg', 'train/dog/.hidden.png'])
  line = sources.build(f'folder:{tmp_path}', 'train').describe('train')
  read, heic = '10 images, 2 classes of 3 to 7', '1 .heic, '
  hint = " (HEIC needs pillow-heif: pip install 'vit_jax[heif]')"
  if heif:
    read, heic, hint = '11 images, 2 classes of 3 to 8', '', ''
  assert line == (
    f'folder:{tmp_path}, train: {read}; left out: {heic}1 .svg, 1 without extension{hint}; '
    'in no class: 1 .jpg'
  )
