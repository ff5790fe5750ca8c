"""Folders of images: classes, splits and order."""

import hashlib
import importlib.util
import os

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from vit_jax.data import pipeline, sources
from vit_jax.data.sources import listing
from vit_jax.errors import UserError


def write_folder(root, layout):
  """Writes {path: grey level} as images, text for other extensions."""
  for path, level in layout.items():
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix.lower() in ('.txt', '.db', '.svg', '.heic', ''):
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


def test_the_order_is_that_of_a_hash_of_the_paths(tmp_path):
  write_folder(tmp_path, {f'{c}/{i}.png': i for c in 'abc' for i in range(3)})
  write_folder(tmp_path, {'c/deep/3.png': 3})
  source = sources.build(f'folder:{tmp_path}', 'train')
  names = [os.path.relpath(source.name_of(i), tmp_path) for i in range(len(source))]
  assert names == sorted(names, key=lambda x: hashlib.sha256(x.encode()).digest())
  assert source.labels.tolist() == ['abc'.index(name[0]) for name in names]
  again = lambda: sources.build(f'folder:{tmp_path}', 'train').fingerprint
  assert again() == source.fingerprint
  (tmp_path / 'c/deep/3.png').rename(tmp_path / 'c/deep/4.png')
  assert again() != source.fingerprint


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


def test_folder_without_validation_says_how_to_split_it(tmp_path):
  for name in ('cat', 'dog'):
    (tmp_path / name).mkdir()
    Image.new('RGB', (8, 8)).save(tmp_path / name / '1.png')
  for source in (f'folder:{tmp_path}', str(tmp_path)):
    with pytest.raises(
      UserError, match=naming("'validation'", 'train[:90%]', 'train[90%:]')
    ) as error:
      sources.build(source, 'val')
    assert 'There is no folder' not in str(error.value)


@pytest.mark.parametrize('heif', [False, True])
def test_a_line_describes_each_source(tmp_path, monkeypatch, heif):
  find = importlib.util.find_spec
  fake = lambda name: heif if name == 'pillow_heif' else find(name)
  monkeypatch.setattr(listing.importlib.util, 'find_spec', fake)
  listing.extensions.cache_clear()
  layout = {f'train/cat/{i}.png': 0 for i in range(7)}
  layout |= {f'train/dog/deep/{i}.jpg': 0 for i in range(3)}
  layout |= {'train/cat/a.HEIC': 0, 'train/dog/c.svg': 0, 'train/dog/README': 0}
  write_folder(tmp_path, layout | {'train/x.jpg': 0, 'train/dog/.hidden.png': 0})
  line = sources.build(f'folder:{tmp_path}', 'train').describe('train')
  listing.extensions.cache_clear()
  read, heic = '10 images, 2 classes of 3 to 7', '1 .heic, '
  hint = " (HEIC needs pillow-heif: pip install 'vit_jax[heif]')"
  if heif:
    read, heic, hint = '11 images, 2 classes of 3 to 8', '', ''
  assert line == (
    f'folder:{tmp_path}, train: {read}; left out: {heic}1 .svg, 1 without extension{hint}; '
    'in no class: 1 .jpg'
  )
  parts = [{'source': 'digits', 'split': f'train[{x}]'} for x in (':9', '9:')]
  data = pipeline.train(parts, '', 'value_range(-1, 1)', 8)
  _, second = data.describe()
  assert second.startswith('digits: 1,428 images, 10 classes of ')
