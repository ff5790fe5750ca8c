"""Folders of images: classes, splits and order."""

import hashlib
import os

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from vit_jax.data import sources
from vit_jax.data.sources import folder
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


def test_the_order_is_that_of_a_hash_of_the_paths(tmp_path):
  write_folder(tmp_path, {f'{c}/{i}.png': 0 for c in 'abcd' for i in range(50)})
  write_folder(tmp_path, {'c/deep/3.png': 3})
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
  write_folder(tmp_path, {'b/new.png': 0})
  after = names_of(build())
  assert [name for name in after if not name.endswith('new.png')] == before
  (tmp_path / 'b/new.png').unlink()
  (tmp_path / 'c/deep/3.png').rename(tmp_path / 'c/deep/4.png')
  assert build().fingerprint != fingerprint


CUT = ("'validation'", 'train[:90%]', 'train[90%:]')
# Files of a folder, a split, and the words of the error.
REFUSED = [
  (['train/a/1.png', 'train/b/1.txt'], 'train', ('{}/train/b', '.png')),
  (['train/a/1.png', 'val/c/1.png'], 'val', ('{}/val', "'c'")),
  (['train/a/1.png', 'val/a/1.png'], 'test', ("'test'", "'train'", "'validation'")),
  (['train/1.png'], 'train', ('{}/train', 'class')),
  (['1.png'], 'train', ('{}', 'class')),
  (['val/a/1.png', 'valid/a/1.png'], 'val', ("'val'", "'valid'", "'validation'")),
  (['train/a/1.png'], 'trian', ("'trian'", "['train']")),
  (['cat/1.png', 'dog/1.png'], 'val', CUT),
]


@pytest.mark.parametrize(('files', 'split', 'words'), REFUSED)
@pytest.mark.parametrize('prefix', ['folder:', ''])
def test_wrong_folders(tmp_path, prefix, files, split, words):
  write_folder(tmp_path, dict.fromkeys(files, 0))
  words = [word.replace('{}', str(tmp_path)) for word in words]
  with pytest.raises(UserError, match=naming(*words)) as error:
    sources.build(f'{prefix}{tmp_path}', split)
  assert 'There is no folder' not in str(error.value)


@pytest.mark.parametrize('heif', [False, True])
def test_a_line_describes_each_source(tmp_path, monkeypatch, heif):
  endings = folder.EXTENSIONS + folder.HEIF * heif
  monkeypatch.setattr(folder, 'extensions', lambda: endings)
  layout = {f'train/cat/{i}.png': 0 for i in range(7)}
  layout |= {f'train/dog/deep/{i}.jpg': 0 for i in range(3)}
  layout |= {'train/cat/a.HEIC': 0, 'train/dog/c.svg': 0, 'train/dog/README': 0}
  write_folder(tmp_path, layout | {'train/x.jpg': 0, 'train/dog/.hidden.png': 0})
  line = sources.build(f'folder:{tmp_path}', 'train').describe('train')
  read, heic = '10 images, 2 classes of 3 to 7', '1 .heic, '
  hint = " (HEIC needs pillow-heif: pip install 'vit_jax[heif]')"
  if heif:
    read, heic, hint = '11 images, 2 classes of 3 to 8', '', ''
  assert line == (
    f'folder:{tmp_path}, train: {read}; left out: {heic}1 .svg, 1 without extension{hint}; '
    'in no class: 1 .jpg'
  )
