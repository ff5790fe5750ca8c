"""Data sets in a bucket: read by ranges; an outage does not count as broken images."""

import itertools
import os

import numpy as np
import pytest

from tests.data.test_tfds import make_tfds
from tests.support import emulator, example_records, naming
from vit_jax import buckets, errors
from vit_jax.data import sources

pytestmark = pytest.mark.usefixtures('gcs_proxy')


def copy(folder, url):
  """Copies a folder to the bucket, all but its indices."""
  for path in sorted(p for p in folder.rglob('*') if p.is_file()):
    if path.suffix != '.npz':
      buckets.upload(path, f'{url}/{path.relative_to(folder)}')
  return str(url)


@pytest.fixture(scope='module')
def records(gcs, tmp_path_factory):
  folders = example_records.write_all(tmp_path_factory)
  return {
    name: (str(folders[name]), copy(folders[name], f'gs://tests/records/{name}'))
    for name in ('tfrecord', 'array_record')
  }


def same(source, local):
  """Compares two sources, read in a random order."""
  assert len(source) == len(local)
  assert source.fingerprint == local.fingerprint
  order = np.random.default_rng(0).permutation(len(local))
  for found, expected in zip(source.read(order), local.read(order), strict=True):
    assert found == expected
    assert 'error' not in found


@pytest.mark.slow
@pytest.mark.parametrize('name', ['tfrecord', 'array_record'])
def test_records_in_a_bucket_are_read_by_ranges(records, gcs_proxy, name):
  folder, url = records[name]
  for split in ('train', 'val', 'train[3:12]+val'):
    same(
      sources.build(f'records:{url}', split), sources.build(f'records:{folder}', split)
    )
  assert any(path.name.endswith('.npz') for path in buckets.path(url).iterdir())
  source = sources.build(
    f'records:{url}', 'train'
  )  # with its index: nothing is scanned
  source.read(np.array([6]))  # opens the ArrayRecord file
  del gcs_proxy.seen[:]
  (found,) = source.read(np.array([7]))
  ranged = [request for request in gcs_proxy.seen if request.range]
  assert len(ranged) == len(gcs_proxy.seen) == 1
  if name == 'tfrecord':
    first, last = map(int, ranged[0].range.removeprefix('bytes=').split('-'))
    assert last + 1 - first < len(found['image']) + 200


def test_a_pattern_and_what_is_missing(records):
  _, url = records['tfrecord']
  assert len(sources.build(f'records:{url}/val-00001*', 'val')) == 3
  with pytest.raises(errors.UserError, match=naming('gs://tests/nothing')):
    sources.build('records:gs://tests/nothing', 'train')
  with pytest.raises(errors.UserError, match=naming('folder:gs://tests/x', 'records')):
    sources.build('folder:gs://tests/x', 'train')


def test_the_offsets_are_found_once_and_kept_in_the_bucket(
  records, tmp_path, monkeypatch
):
  from vit_jax.data.sources import record_files

  folder, url = records['tfrecord']
  scan = record_files._scan_bucket
  sources.build(f'records:{url}', 'val')
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))  # as on another host
  monkeypatch.setattr(record_files, '_scan_bucket', lambda path: pytest.fail('scanned'))
  same(
    sources.build(f'records:{url}', 'val'), sources.build(f'records:{folder}', 'val')
  )
  assert list(tmp_path.iterdir())
  # Where no index can be kept on this host, the files are scanned.
  (tmp_path / 'file').touch()
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'file'))
  monkeypatch.setattr(record_files, '_scan_bucket', scan)
  same(
    sources.build(f'records:{url}', 'val'), sources.build(f'records:{folder}', 'val')
  )


@pytest.mark.parametrize('block', [16, 4 << 20])
def test_offsets_do_not_depend_on_the_block(records, monkeypatch, block):
  from vit_jax.data.sources import record_files

  folder, url = records['tfrecord']
  monkeypatch.setattr(record_files, '_BLOCK', block)
  for path in sorted(os.listdir(folder)):
    if path.endswith('.tfrecord'):
      local = record_files._scan(os.path.join(folder, path))
      assert np.array_equal(record_files._scan_bucket(f'{url}/{path}'), local)


def test_faults_are_no_broken_images(records, gcs_proxy, monkeypatch):
  folder, url = records['tfrecord']
  source = sources.build(f'records:{url}', 'train')
  numbers = itertools.count()
  faults = ('503', None, 'reset', '429', None, 'lost', None)
  gcs_proxy.fault = lambda *_: faults[next(numbers) % len(faults)]
  same(source, sources.build(f'records:{folder}', 'train'))
  gcs_proxy.fault = lambda *_: '503'
  with pytest.raises(errors.Unreachable, match=naming('gs://tests')) as caught:
    source.read(np.array([2]))
  assert caught.value.exit_code == 75
  assert '\n' not in str(caught.value)
  gcs_proxy.fault = lambda *_: '403'
  with pytest.raises(errors.NotAllowed, match=naming('gs://tests')):
    source.read(np.array([2]))


@pytest.mark.parametrize('file_format', ['array_record', 'tfrecord'])
def test_tfds_in_a_bucket(gcs_proxy, tmp_path, file_format, monkeypatch):
  import warnings

  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # TFDS's and Apache Beam's own, while writing
    make_tfds(tmp_path, file_format, 'tiny', multi_label=False)
  url = copy(tmp_path, f'gs://tests/tfds_{file_format}')
  emulator.refuse_tensorflow(monkeypatch)
  for split in ('train[3:9]+test', 'train'):
    source = sources.build('tfds:tiny', split, data_dir=url)
    same(source, sources.build('tfds:tiny', split, data_dir=str(tmp_path)))
  assert source.class_names == ['a', 'b', 'c']
  whole = sources.build(f'tfds:{url}/tiny/1.2.0', 'train')
  whole.read(np.array([5]))
  del gcs_proxy.seen[:]
  whole.read(np.array([4]))
  assert [bool(request.range) for request in gcs_proxy.seen] == [True]
  with pytest.raises(errors.UserError, match=naming('tiny', url)):
    sources.build('tfds:tiny:9.9.9', 'train', data_dir=url)
