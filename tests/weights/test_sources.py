"""Where weights come from: the zoo, downloads, buckets, the hub.

What a server sends is believed only once its length and content are right.
"""

import shutil
import socket
import sys
import urllib.parse
import urllib.request

import huggingface_hub
import pytest

import vit_jax
from tests.support import GOLDEN, bad_server, emulator, naming
from vit_jax import files, models, weights
from vit_jax.errors import Unreachable, UserError
from vit_jax.weights import download, zoo


def files_in(folder):
  return sorted(p.name for p in folder.rglob('*') if p.is_file())


# -- names ----------------------------------------------------------------------------


def test_every_name_of_the_zoo_is_a_model_that_builds():
  assert len(zoo.ENTRIES) > 60
  for entry in zoo.ENTRIES.values():
    models.build(entry.model, num_classes=entry.classes)
    assert entry.url.startswith(('gs://', 'https://'))
    assert entry.url.endswith(('.npz', '.pkl', '.pth'))
    assert entry.format != 'google' or entry.url.endswith('.npz')
  assert len({entry.url for entry in zoo.ENTRIES.values()}) == len(zoo.ENTRIES)


@pytest.mark.parametrize('wrong', [{'model': 'vit:Z/9'}, {'head_bias': 'no'}], ids=str)
def test_a_wrong_model_is_an_error_before_arrays_are_read(monkeypatch, wrong):
  path = GOLDEN / 'vit_google_token.npz'
  header = weights.read_header(path)
  monkeypatch.setattr(type(header), 'read', lambda self: pytest.fail('reads arrays'))
  with pytest.raises(UserError):
    vit_jax.load(path, **wrong)


def test_a_name_of_the_zoo_is_in_the_cache(tmp_path, monkeypatch):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  place = tmp_path / 'storage.googleapis.com/vit_models/imagenet21k/ViT-B_16.npz'
  place.parent.mkdir(parents=True)
  shutil.copy(GOLDEN / 'vit_google_token.npz', place)
  assert weights.read('b16-i21k').flat['cls'].shape == (1, 1, 48)


@pytest.mark.parametrize(
  ('name', 'facts'),
  [
    (
      'vit_base_patch16_224',
      ('vit:B/16', 'b16-augreg-i21k', 'hf:timm/vit_base_patch16_224.mae'),
    ),
    ('vit_base_patch16_224.mae', ('vit:B/16', 'hf:timm/vit_base_patch16_224.mae')),
    ('mvitv2_tiny.fb_in1k', ('mvit:T', 'hf:timm/mvitv2_tiny.fb_in1k')),
    ('ViT-S_16', ('vit:S/16', 's16-augreg-i1k-384')),
    ('dinov2_vits14', ('vit:S/14', 'a file of its weights')),
    ('mask_rcnn_vitdet_b_100ep', ('(rcnn)', "['mask_rcnn_vitdet_b']")),
    ('dinov2_vits14.pth', ('--zoo',)),
    ('no/such/file.npz', ('--zoo',)),
    ('b16-i12k', ('b16-i21k',)),
    ('tests/goldn', ('Did you mean "golden"',)),
    ('ftp://a/b.npz', ('hf:OWNER/NAME',)),
    ('hf:only-a-name', ('hf:OWNER/NAME',)),
  ],
)
def test_a_name_that_is_not_of_weights(name, facts):
  with pytest.raises(UserError, match=naming(repr(name).strip("'"), *facts)):
    vit_jax.load(name)


def test_hub_names_go_through_the_hub_library(monkeypatch):
  call = {}

  def snapshot(name, revision, allow_patterns):
    call.update(name=name, revision=revision)
    return str(GOLDEN / 'vit_hf')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot)
  for source in ('hf:owner/name@main', 'owner/name@main'):
    call.clear()
    assert weights.read(source).format == 'hf'
    assert call == {'name': 'owner/name', 'revision': 'main'}


def test_a_hub_folder_of_pytorch_alone(monkeypatch, tmp_path):
  requests = []

  def snapshot(name, revision, allow_patterns):
    requests.append(allow_patterns)
    return str(tmp_path)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot)
  assert download.locate('hf:owner/name') == tmp_path
  assert [('name.pt' in patterns) for patterns in requests] == [False, True]
  (tmp_path / 'model.safetensors').touch()
  download.locate('hf:owner/name')
  assert 'name.pt' not in requests[-1]  # gigabytes twice


# -- downloads ------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
  # As if gcsfs were not installed: gs:// of public buckets is then read over HTTPS.
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  return tmp_path / 'cache'


@pytest.fixture
def server(cache, monkeypatch):
  """Puts the bad server in place of every host; returns the list of its requests."""
  real, requests = download.open_url, []
  with bad_server.serving() as address:

    def local(url, timeout):
      parts = urllib.parse.urlsplit(url)
      requests.append(url)
      path = urllib.parse.quote(urllib.parse.unquote(parts.path.rpartition('/')[2]))
      query = f'?{parts.query}' if parts.query else ''
      return real(f'{address}/{path}{query}', timeout=timeout)

    monkeypatch.setattr(download, 'open_url', local)
    monkeypatch.setattr(download, 'TIMEOUT', bad_server.STALL)
    yield requests


@pytest.mark.parametrize('name', bad_server.GOOD)
def test_good_answers_stay_in_the_cache(server, cache, name):
  path = download.locate(f'gs://b/{name}.npz')
  assert path.read_bytes() == bad_server.WHOLE
  assert files_in(cache) == [f'{name}.npz']
  assert download.locate(f'gs://b/{name}.npz') == path
  assert len(server) == 1


FACTS = {
  'not found': ('Not Found',),
  'cut, with a length': (9000, len(bad_server.WHOLE)),
  'cut by one byte': ('whole',),
  'stall in the body': ('timed out',),
  'to ftp': ('leaves https',),
}


@pytest.mark.parametrize('name', bad_server.ANSWERS)
def test_bad_answers_are_one_line_and_leave_nothing(server, cache, name, faults_table):
  source = f'gs://b/{name}.npz'
  # The message says where to put the file by hand.
  facts = (source, str(cache), *FACTS.get(name, ()))
  with pytest.raises(UserError, match=naming(*facts)) as caught:
    download.locate(source)
  assert '\n' not in str(caught.value)
  assert files_in(cache) == []
  faults_table('bad servers', name, 'refused', str(caught.value))


def test_the_query_is_part_of_the_name(server):
  urls = [f'https://host/whole.npz{q}' for q in ('?version=1', '?version=2', '')]
  paths = [download.locate(url) for url in urls]
  assert len({*paths}) == 3
  assert {path.suffix for path in paths} == {'.npz'}
  assert server == urls
  assert download.locate(urls[0]) == paths[0]
  assert len(server) == 3


def test_a_download_without_a_length_has_a_bound(server, cache, monkeypatch):
  monkeypatch.setattr(download, 'MOST', 5000)
  assert download.locate('gs://b/whole.npz')
  with pytest.raises(UserError, match=naming('more than 5,000 bytes')):
    download.locate('gs://b/without a length.npz')
  assert files_in(cache) == ['whole.npz']


def test_https_does_not_fall_back_to_http():
  request = urllib.request.Request('https://host/a.npz')
  with pytest.raises(urllib.error.HTTPError, match='leaves https'):
    download._Redirects().redirect_request(request, None, 302, '', {}, 'http://host/b')


@pytest.mark.parametrize('url', ['https://me:secret@host/a.npz', 'ftp://me:secret@h/a'])
def test_no_password_is_printed(url):
  with pytest.raises(UserError) as caught:
    vit_jax.load(url)
  assert 'secret' not in str(caught.value)


ODD = [f'https://{x}' for x in ('', '/a.npz', 'host', 'host/', '[::1/a.npz')]
ODD += [f'https://host{x}.npz' for x in (':port/a', '/../../a', '/a/%2e%2e/%2e%2e/a')]
ODD += [f'https://host/{x}.npz' for x in ('a' * 300, 'a\0b', 'a\nb', '\ud800')]
ODD += ['https://ho st/a.npz', 'gs://', 'gs://b/', 'gs://../a.npz', 's3://b/a.npz']
ODD += ['http://host/a.npz', 'file:///etc/passwd', '~nobody-here/a.npz']
ODD += [f'hf:{x}' for x in ('', 'name', '../..', 'a/b@\n', 'a/b/c')]


@pytest.mark.parametrize('url', ODD)
def test_odd_urls_are_one_line(cache, monkeypatch, url):
  def refuse(url, timeout):
    raise urllib.error.URLError('no network here')

  monkeypatch.setattr(download, 'open_url', refuse)
  with pytest.raises(UserError) as caught:
    weights.read(url)
  assert '\n' not in str(caught.value)
  assert files_in(cache.parent) == []


def test_a_damaged_file_in_the_cache_can_be_removed(server, cache):
  path = download.locate('gs://b/whole.npz')
  path.write_bytes(bad_server.WHOLE[:9000])
  with pytest.raises(UserError, match=naming('truncated', f'Remove {path}')):
    weights.read('gs://b/whole.npz')
  shutil.copy(GOLDEN / 'vit_google_token.npz', path)
  weights.read('gs://b/whole.npz')


# -- buckets --------------------------------------------------------------------------


@pytest.mark.usefixtures('gcs_without_tensorflow')
def test_a_file_and_a_folder_come_from_a_bucket(
  gcs_proxy, gcs_folder, tmp_path, monkeypatch
):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  source = f'{gcs_folder}/vit.npz'
  with pytest.raises(UserError, match=naming(source)):
    vit_jax.load(source)
  upload = lambda path, url: files.replace(url, path.read_bytes())
  upload(GOLDEN / 'vit_google_token.npz', source)
  for path in (GOLDEN / 'vit_timm').iterdir():
    upload(path, f'{gcs_folder}/timm/{path.name}')
  emulator.fails(gcs_proxy, 2)
  assert vit_jax.load(source).params['cls'].shape == (1, 1, 48)
  folder = weights.read(f'{gcs_folder}/timm')
  assert folder.fields == weights.read(GOLDEN / 'vit_timm').fields
  with pytest.raises(UserError, match=naming(gcs_folder / 'none')):
    vit_jax.load(f'{gcs_folder}/none')
  assert not [p for p in tmp_path.rglob('*') if p.name.startswith('tmp')]
  gcs_proxy.fault = lambda *_: '403'  # for any further request
  vit_jax.load(source)


def test_without_a_network_a_bucket_is_one_line_at_once(monkeypatch):
  monkeypatch.setattr(files, 'FIRST_ANSWER', 0.2)
  with socket.create_server(('127.0.0.1', 0)) as silent:
    port = silent.getsockname()[1]
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'http://127.0.0.1:{port}')
    with pytest.raises(Unreachable, match=naming(port, 'does not answer')):
      files.filesystem.__wrapped__()
  with pytest.raises(Unreachable, match=naming(port, 'refused')):
    files.filesystem.__wrapped__()
