"""Where weights come from: names of the zoo, downloads, the hub."""

import shutil
import sys

import pytest

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.goldens import check
from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import zoo


def test_every_name_of_the_zoo_is_a_model_that_builds():
  assert len(zoo.ENTRIES) > 60
  for entry in zoo.ENTRIES.values():
    models.build(entry.model, num_classes=entry.classes)
    assert entry.url.startswith('gs://')
    assert entry.url.endswith('.npz')
  assert len({entry.url for entry in zoo.ENTRIES.values()}) == len(zoo.ENTRIES)


def test_a_name_of_the_zoo_is_found_in_the_cache(tmp_path, monkeypatch):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  place = tmp_path / 'storage.googleapis.com/vit_models/imagenet21k/ViT-B_16.npz'
  place.parent.mkdir(parents=True)
  shutil.copy(GOLDEN / 'vit_google_token.npz', place)
  loaded = weights.load('b16-i21k')
  assert loaded.params['cls'].shape == (1, 1, 48)


@pytest.mark.parametrize(
  ('name', 'facts'),
  [
    ('vit_base_patch16_224', ('vit:B/16', 'b16-augreg-i21k', '.TAG')),
    ('vit_base_patch16_224.mae', ('vit:B/16', 'hf:timm/vit_base_patch16_224.mae.')),
    ('swin_tiny_patch4_window7_224.ms_in1k', ('swin:T/7',)),
    ('mvitv2_tiny.fb_in1k', ('mvit:T', 'hf:timm/mvitv2_tiny.fb_in1k')),
    ('ViT-S_16', ('vit:S/16', 's16-augreg-i1k-384')),
    ('flexivit_base', ('vit:B/16', 'hf:timm/flexivit_base.TAG')),
  ],
)
def test_the_name_of_a_model_is_not_of_weights(name, facts):
  with pytest.raises(UserError, match=naming(repr(name), *facts)):
    vit_jax.load(name)


@pytest.mark.parametrize(
  'source', ['gs://vit_models/x.npz', 'https://host.invalid/x.npz']
)
def test_a_download_that_fails_says_what_to_do(source, tmp_path, monkeypatch):
  import urllib.request

  def refuse(*args, **kwargs):
    raise urllib.error.URLError('no route to host')

  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  monkeypatch.setitem(sys.modules, 'gcsfs', None)  # gs:// goes to the public address
  monkeypatch.setattr(urllib.request, 'urlopen', refuse)
  with pytest.raises(UserError, match=naming(source, 'no route to host', tmp_path)):
    vit_jax.load(source)
  assert not [p for p in tmp_path.rglob('*') if p.is_file()]


@pytest.mark.slow
def test_a_download_is_kept_and_a_short_one_is_not(tmp_path, monkeypatch):
  import http.server
  import threading
  import urllib.request

  data = (GOLDEN / 'vit_google_token.npz').read_bytes()

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      self.send_response(200)
      self.send_header('Content-Length', str(len(data)))
      self.end_headers()
      self.wfile.write(data[:1000] if 'short' in self.path else data)

    def log_message(self, *args):
      pass

  server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  real = urllib.request.urlopen

  def local(url, timeout):
    path = url.split('//', 1)[1].split('/', 1)[1]
    return real(f'http://127.0.0.1:{server.server_port}/{path}', timeout=timeout)

  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  monkeypatch.setattr(urllib.request, 'urlopen', local)
  try:
    with pytest.raises(UserError, match=naming('gs://b/short.npz', 1000, len(data))):
      vit_jax.load('gs://b/short.npz')
    assert not [p for p in tmp_path.rglob('*') if p.is_file()]
    check('gs://b/whole.npz', 'vit_google_token')
  finally:
    server.shutdown()
    server.server_close()
  check('gs://b/whole.npz', 'vit_google_token')  # from the cache


@pytest.mark.slow
def test_hub_names_go_through_the_hub_library(monkeypatch):
  huggingface_hub = pytest.importorskip('huggingface_hub')
  asked = {}

  def snapshot(name, revision, allow_patterns):
    asked.update(name=name, revision=revision)
    return str(GOLDEN / 'vit_hf')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot)
  check('hf:owner/name@main', 'vit_hf')
  assert asked == {'name': 'owner/name', 'revision': 'main'}
  with pytest.raises(UserError, match=naming('hf:only-a-name', 'hf:OWNER/NAME')):
    vit_jax.load('hf:only-a-name')


@pytest.mark.parametrize(
  ('source', 'suggested'),
  [
    ('no/such/file.npz', '--zoo'),
    ('b16-i12k', 'b16-i21k'),
    ('ftp://a/b.npz', 'hf:OWNER/NAME'),
  ],
)
def test_a_source_that_is_nowhere(source, suggested):
  with pytest.raises(UserError, match=naming(source, suggested)):
    vit_jax.load(source)
