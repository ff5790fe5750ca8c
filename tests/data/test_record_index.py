"""The index of record files: cached, memory-mapped, rebuilt; which files are opened."""

import itertools
import os

import numpy as np
import pytest

from tests.support import example_records
from tests.support.example_records import SIZES, example, write
from vit_jax.data import sources
from vit_jax.data.sources import base, record_files


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """As `write_all`, each opened once, so that it has an index."""
  folders = example_records.write_all(tmp_path_factory)
  for folder, split in itertools.product(folders.values(), SIZES):
    sources.build(f'records:{folder}', split)
  return folders


def test_the_index_is_mapped_and_kept(written, monkeypatch):
  monkeypatch.setattr(record_files, '_scan', lambda path: pytest.fail('scanned again'))
  monkeypatch.setattr(
    record_files.ArrayRecords, '_open', lambda *_: pytest.fail('opened')
  )
  folder = written['tfrecord']
  paths = sorted(str(p) for p in folder.glob('train-*'))
  digest = base.fingerprint(os.path.basename(p) for p in paths)[:8]
  (index,) = folder.glob(f'train.{digest}.record_index.npz')
  kept = record_files.Records(paths, index_name=index.name)
  assert kept.counts == list(SIZES['train'])
  for offsets in kept._offsets:
    owner = offsets
    while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
      owner = owner.base
    assert isinstance(owner, np.memmap)
  # 8 bytes a record, and a header.
  assert kept._offsets[2].nbytes == 8 * (9 + 1)
  folder = written['array_record']
  (index,) = folder.glob('val.*.record_index.npz')
  paths = sorted(str(p) for p in folder.glob('val-*'))
  assert record_files.ArrayRecords(paths, index_name=index.name).counts == [4, 3]


@pytest.mark.parametrize('damage', ['compressed', 'cut', 'other'])
def test_an_index_that_cannot_be_mapped_is_made_anew(written, tmp_path, damage):
  import shutil

  shutil.copytree(written['bare'], tmp_path / 'x')
  (index,) = (tmp_path / 'x').glob('val.*.record_index.npz')
  if damage == 'compressed':
    with np.load(index) as file:
      np.savez_compressed(index, **file)
  elif damage == 'cut':
    index.write_bytes(index.read_bytes()[:-200])
  else:
    np.savez(index, sizes=np.zeros(3), offsets=np.zeros(2))
  source = sources.build(f'records:{tmp_path}/x', 'val')
  assert [x['label'] for x in source.read(np.arange(7))] == list(range(20, 27))


def test_array_records_of_the_same_size_are_counted_anew(tmp_path):
  """ArrayRecord files are whole blocks: other records may take as many bytes."""
  path = tmp_path / 'train-00000-of-00001.array_record'
  sizes = []
  for count in (3, 5):
    write(path, [example(i) for i in range(count)])
    os.utime(path, ns=(count, count))
    sizes.append(path.stat().st_size)
    assert len(sources.build(f'records:{tmp_path}', 'train')) == count
  assert sizes[0] == sizes[1]


def test_only_shards_that_are_read_are_opened(written, monkeypatch):
  opened = []
  pread, open_file = os.pread, os.open
  monkeypatch.setattr(
    os, 'open', lambda path, *a: opened.append(str(path)) or open_file(path, *a)
  )
  source = sources.build(f'records:{written["bare"]}', 'train[14:]')
  source.read(np.arange(6))
  assert {os.path.basename(path) for path in opened} == {'train-00003-of-00004'}
  assert os.pread is pread
