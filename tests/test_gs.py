"""Runs in a bucket, gs://: on an emulator on the loopback."""

import emulator
import pytest
import runs

from vit_jax import buckets

BUCKET = 'tests'


@pytest.fixture(scope='module', autouse=True)
def server():
  with emulator.serve(BUCKET) as url, emulator.environment(url):
    yield url


@pytest.fixture
def folder(request):
  """Returns a folder in the bucket of the test's own."""
  return buckets.path(f'gs://{BUCKET}/{request.node.name}')


def test_a_run_trains_stops_and_resumes_bitwise(folder, tmp_path, monkeypatch):
  runs.on_one_device(monkeypatch)
  status, rows = runs.run(tmp_path / 'local', 'log.tensorboard=True')
  found, other = runs.run(folder / 'run', 'log.tensorboard=True')
  print(found, other[-1])
  print([str(x) for x in folder.iterdir()], list((folder/'run').iterdir()))
  assert found['fingerprint'] == status['fingerprint']
