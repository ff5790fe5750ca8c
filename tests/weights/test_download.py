"""Downloads: what a server sends is believed only once its length and content are right."""

import gc
import shutil
import sys
import urllib.parse
import urllib.request
import warnings

import pytest

from tests.support import GOLDEN, bad_server, naming
from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.weights import download


@pytest.fixture
def cache(tmp_path, monkeypatch):
  # As if gcsfs were not installed: gs:// of public buckets is then read over HTTPS.
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  return tmp_path / 'cache'


@pytest.fixture
def server(cache, monkeypatch):
  """Puts the bad server in place of every host; returns the list of its requests."""
  real, asked = urllib.request.urlopen, []
  with bad_server.serving() as address:

    def local(url, timeout):
      parts = urllib.parse.urlsplit(url)
      asked.append(url)
      path = urllib.parse.quote(urllib.parse.unquote(parts.path.rpartition('/')[2]))
      query = f'?{parts.query}' if parts.query else ''
      return real(f'{address}/{path}{query}', timeout=timeout)

    monkeypatch.setattr(urllib.request, 'urlopen', local)
    monkeypatch.setattr(download, '_TIMEOUT', bad_server.STALL)
    yield asked


def files(folder):
  return sorted(p.name for p in folder.rglob('*') if p.is_file())


@pytest.mark.parametrize('name', bad_server.GOOD)
def test_good_answers_are_kept(server, cache, name):
  path = download.locate(f'gs://b/{name}.npz')
  assert path.read_bytes() == bad_server.WHOLE
  assert files(cache) == [f'{name}.npz']
  assert download.locate(f'gs://b/{name}.npz') == path
  assert len(server) == 1


@pytest.mark.parametrize('name', bad_server.ANSWERS)
def test_bad_answers_are_one_line_and_leave_nothing(server, cache, name, faults_table):
  source = f'gs://b/{name}.npz'
  with pytest.raises(UserError) as caught:
    download.locate(source)
  assert '\n' not in str(caught.value)
  if name == 'to nonsense':  # there urllib itself leaves its connection open
    caught.value.__context__ = None
    with warnings.catch_warnings(action='ignore'):
      gc.collect()
  assert source in str(caught.value)
  assert str(cache) in str(caught.value)  # where to put it by hand
  assert files(cache) == []
  faults_table('bad servers', name, 'refused', str(caught.value))


@pytest.mark.parametrize(
  ('name', 'facts'),
  [
    ('html', ('.npz', 'safetensors')),
    ('not found', ('Not Found',)),
    ('cut, with a length', (9000, len(bad_server.WHOLE))),
    ('cut by one byte', ('whole',)),
    ('stall in the body', ('timed out',)),
  ],
)
def test_bad_answers_say_what_was_wrong(server, name, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    download.locate(f'gs://b/{name}.npz')


def test_the_query_is_part_of_the_name(server, cache):
  one = download.locate('https://host/whole.npz?version=1')
  two = download.locate('https://host/whole.npz?version=2')
  plain = download.locate('https://host/whole.npz')
  assert len({one, two, plain}) == 3
  assert {path.suffix for path in (one, two, plain)} == {'.npz'}
  assert server == [
    f'https://host/whole.npz{q}' for q in ('?version=1', '?version=2', '')
  ]
  assert download.locate('https://host/whole.npz?version=1') == one
  assert len(server) == 3


@pytest.mark.parametrize(
  'url',
  [
    *(
      'https://',
      'https:///a.npz',
      'https://host',
      'https://host/',
      'gs://',
      'gs://b/',
    ),
    *('https://[::1/a.npz', 'https://host:port/a.npz', 'https://host:99999999/a.npz'),
    *(
      'https://host/../../a.npz',
      'https://host/a/%2e%2e/%2e%2e/a.npz',
      'gs://../a.npz',
    ),
    *(f'https://host/{"a" * 300}.npz', f'https://{"a" * 300}.org/a.npz'),
    *('https://host/a\0b.npz', 'https://host/a\nb.npz', 'https://ho st/a.npz'),
    *('ftp://host/a.npz', 'file:///etc/passwd', 'http://host/a.npz', 's3://b/a.npz'),
    *('hf:', 'hf:name', 'hf:../..', 'hf:a/b@\n', 'hf:a/b/c', 'hf:owner/name@'),
    *(
      'https://\u2603.\u2603\u2024/a.npz',
      'https://host/\ud800.npz',
      '~nobody-here/a.npz',
    ),
  ],
)
def test_odd_urls_are_one_line(cache, monkeypatch, url):
  def refuse(url, timeout):
    raise urllib.error.URLError('no network here')

  monkeypatch.setattr(urllib.request, 'urlopen', refuse)
  with pytest.raises(UserError) as caught:
    weights.read(url)
  assert '\n' not in str(caught.value)
  assert files(cache) == [] if cache.exists() else True
  outside = {p.name for p in cache.parent.iterdir()}
  assert outside <= {'cache'}


def test_a_damaged_file_in_the_cache_can_be_removed(server, cache):
  path = download.locate('gs://b/whole.npz')
  path.write_bytes(bad_server.WHOLE[:9000])
  with pytest.raises(UserError, match=naming('truncated', f'Remove {path}')):
    weights.read('gs://b/whole.npz')
  shutil.copy(GOLDEN / 'vit_google_token.npz', path)
  weights.read('gs://b/whole.npz')
