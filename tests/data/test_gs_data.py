"""Data sets in a bucket: read by ranges; an outage does not count as broken images."""

import numpy as np
import pytest

from tests.support import emulator, example_records, naming
from tests.support.vtab_fakes import write_one
from vit_jax import errors, files
from vit_jax.data import sources

pytestmark = pytest.mark.usefixtures('gcs_proxy')


def copy(folder, url):
  """Copies a folder to the bucket."""
  for path in sorted(p for p in folder.rglob('*') if p.is_file()):
    files.replace(f'{url}/{path.relative_to(folder)}', path.read_bytes())
  return str(url)


@pytest.fixture(scope='module')
def records(gcs, tmp_path_factory):
  folder = example_records.write_all(tmp_path_factory)['array_record']
  return str(folder), copy(folder, 'gs://tests/records')


def same(source, local):
  """Compares two sources, read in a random order."""
  assert len(source) == len(local)
  assert source.fingerprint == local.fingerprint
  order = np.random.default_rng(0).permutation(len(local))
  for example, expected in zip(source.read(order), local.read(order), strict=True):
    assert example == expected
    assert 'error' not in example


def test_records_in_a_bucket_are_read_by_ranges(records, gcs_proxy):
  folder, url = records
  for split in ('train', 'val', 'train[3:12]+val'):
    same(
      sources.build(f'records:{url}', split), sources.build(f'records:{folder}', split)
    )
  source = sources.build(f'records:{url}', 'train')
  source.read(np.array([6]))  # opens the file
  gcs_proxy.requests.clear()
  source.read(np.array([7]))
  assert [bool(part) for part, _ in gcs_proxy.requests] == [True]


def test_a_pattern_and_what_is_missing(records):
  _, url = records
  assert len(sources.build(f'records:{url}/val-00001*', 'val')) == 3
  with pytest.raises(errors.UserError, match=naming('gs://tests/nothing')):
    sources.build('records:gs://tests/nothing', 'train')
  with pytest.raises(errors.UserError, match=naming('folder:gs://tests/x', 'records')):
    sources.build('folder:gs://tests/x', 'train')


def test_faults_are_no_broken_images(records, gcs_proxy):
  folder, url = records
  source = sources.build(f'records:{url}', 'train')
  # ArrayRecord's client waits a second and more before it asks again.
  faults = iter(['503', None, 'reset'])
  gcs_proxy.fault = lambda *_: next(faults, None)
  same(source, sources.build(f'records:{folder}', 'train'))
  source = sources.build(f'records:{url}', 'train')
  gcs_proxy.fault = lambda *_: '403'
  with pytest.raises(errors.NotAllowed, match=naming('gs://tests')):
    source.read(np.array([2]))
  gcs_proxy.fault = lambda *_: '503'
  with pytest.raises(errors.Unreachable, match=naming('gs://tests')) as caught:
    sources.build(f'records:{url}', 'train')
  assert caught.value.exit_code == 75
  assert '\n' not in str(caught.value)


def test_tfds_in_a_bucket(gcs_proxy, tmp_path, monkeypatch):
  write_one('cifar10', tmp_path, {'train': 23, 'test': 7})
  url = copy(tmp_path, 'gs://tests/tfds')
  emulator.refuse_tensorflow(monkeypatch)
  for split in ('train[3:9]+test', 'train'):
    source = sources.build('tfds:cifar10', split, data_dir=url)
    same(source, sources.build('tfds:cifar10', split, data_dir=str(tmp_path)))
  whole = sources.build(f'tfds:{url}/cifar10/3.0.2', 'train')
  whole.read(np.array([5]))
  gcs_proxy.requests.clear()
  whole.read(np.array([4]))
  assert [bool(part) for part, _ in gcs_proxy.requests] == [True]
