"""Folders of images: classes, splits, order, and the cached listing."""

import concurrent.futures
import hashlib
import os
import shutil
import time

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from vit_jax import paths
from vit_jax.data import sources
from vit_jax.data.sources import base, listing
from vit_jax.errors import UserError


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


@pytest.mark.slow
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
