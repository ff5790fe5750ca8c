"""Published formats: each loads by its path alone and computes what its library does."""

import functools
import json
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import GOLDEN, naming
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax import models, pretrained, trees
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import UserError
from vit_jax.tools import convert
from vit_jax.weights import zoo

# golden -> (dialect, family, tolerance): rounding in float32; a hybrid's convolutions
# sum over thousands of terms, after a division by a standard deviation, which timm guards
# within the root (of resnet_gn: that is 3e-5 of its logits); timm's own float32 ConvNeXt
# is 7e-6 off its float64.
GOLDENS = {
  'vit_google_token': ('google', 'vit', 5e-6),
  'vit_google_prelogits': ('google', 'vit', 5e-6),
  'hybrid_google': ('google', 'vit', 1e-4),
  'mixer_google': ('google', 'mixer', 5e-6),
  'vit_bigvision_map': ('big_vision', 'vit', 5e-6),
  'vit_bigvision_scan_tok': ('big_vision', 'vit', 5e-6),
  'vit_timm': ('timm', 'vit', 5e-6),
  'mixer_timm': ('timm', 'mixer', 5e-6),
  'vit_hf': ('hf', 'vit', 5e-6),
  'resnet_gn_timm': ('big_vision', 'resnet_gn', 1e-4),
  'bit_timm': ('bit', 'bit', 5e-6),
  'convnext_timm': ('timm', 'convnext', 1e-5),
}


def path_of(name):
  folder = GOLDEN / name
  return folder if folder.is_dir() else GOLDEN / f'{name}.npz'


def arrays_of(name):
  folder = GOLDEN / name
  if folder.is_dir():
    return load_file(folder / 'model.safetensors')
  with np.load(GOLDEN / f'{name}.npz') as file:
    return dict(file)


def check(source, name, **options):
  """Loads `source` and compares with the reference outputs of a golden."""
  expected = dict(np.load(GOLDEN / f'{name}.expected.npz'))
  model, params = vit_jax.load(source, **options)
  apply = jax.jit(functools.partial(model.apply, mutable=['intermediates']))
  (logits, out), state = apply({'params': params}, expected.pop('image'))
  found = {**out, 'logits': logits}
  if 'attentions' in expected:
    weights = trees.flatten(state['intermediates'])
    assert all(key.endswith('attention_weights/0') for key in weights)
    shape = expected['attentions'].shape
    found['attentions'] = np.stack(list(weights.values())).reshape(shape)
  assert 'logits' in expected
  for key in expected:
    # Maps of ResNets have values up to 30.
    atol = GOLDENS[name][2] * max(1, np.abs(expected[key]).max())
    np.testing.assert_allclose(
      found[key], expected[key], rtol=0, atol=atol, err_msg=key
    )


@pytest.mark.parametrize('name', GOLDENS)
def test_golden_loads_by_its_path_and_agrees(name):
  check(path_of(name), name)
  loaded = pretrained.load(path_of(name))
  assert loaded.format == GOLDENS[name][0]
  size = np.load(GOLDEN / f'{name}.expected.npz')['image'].shape[1:3]
  # Of a model for any size only a config beside the arrays tells it.
  any_size = models.family(GOLDENS[name][1]).any_size(vars(loaded.model))
  told = path_of(name).is_dir() or not any_size
  assert loaded.image_size == (size if told else (224, 224))


@pytest.mark.parametrize('name', ['vit_google_token', 'mixer_google', 'vit_hf'])
def test_scanned_model_takes_the_same_file(name):
  check(path_of(name), name, scan=True)


# -- the same weights in other spellings ----------------------------------------------


def linen(name):
  for old, new in (
    ('MultiHeadDotProductAttention_1', 'MultiHeadDotProductAttention_0'),
    ('LayerNorm_2', 'LayerNorm_1'),
    ('MlpBlock_3', 'MlpBlock_0'),
  ):
    name = name.replace(old, new)
  return name


def with_optimizer(arrays):
  moments = {f'opt/state/param_states/{n}/grad_ema': x for n, x in arrays.items()}
  return {f'opt/target/{n}': x for n, x in arrays.items()} | moments


def void_bfloat16(arrays):
  return {n: x.astype(ml_dtypes.bfloat16) for n, x in arrays.items()}


def inlined(arrays):
  return {n.replace('params/MAPHead_0/', 'params/'): x for n, x in arrays.items()}


SPELLINGS = {
  'Linen names': (
    'vit_google_token',
    lambda arrays: {linen(n): x for n, x in arrays.items()},
  ),
  'params/ prefix': (
    'vit_google_token',
    lambda arrays: {f'params/{n}': x for n, x in arrays.items()},
  ),
  'opt/target/ prefix': ('vit_google_token', with_optimizer),
  'no prefix': (
    'vit_bigvision_map',
    lambda arrays: {n.removeprefix('params/'): x for n, x in arrays.items()},
  ),
  'inlined MAP head': ('vit_bigvision_map', inlined),
}


def assert_loads_alike(source, name):
  """Asserts that `source` holds the model and the parameters of a golden."""
  found, expected = vit_jax.load(source), vit_jax.load(path_of(name))
  assert found.model == expected.model
  jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize('spelling', SPELLINGS)
def test_spellings_of_npz_files(tmp_path, spelling):
  name, respell = SPELLINGS[spelling]
  np.savez(tmp_path / 'a.npz', **respell(arrays_of(name)))
  assert_loads_alike(tmp_path / 'a.npz', name)


def test_bfloat16_stored_as_void(tmp_path):
  arrays = void_bfloat16(arrays_of('vit_google_token'))
  np.savez(tmp_path / 'a.npz', **arrays)
  with np.load(tmp_path / 'a.npz') as file:
    assert file['cls'].dtype.kind == 'V', 'numpy names the type now: test the new way'
  _, params = vit_jax.load(tmp_path / 'a.npz')
  np.testing.assert_array_equal(params['cls'], arrays['cls'].astype(np.float32))
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))


def older_hub_name(name):
  for new, old in (
    ('vit.layers.', 'vit.encoder.layer.'),
    ('attention.q_proj', 'attention.attention.query'),
    ('attention.k_proj', 'attention.attention.key'),
    ('attention.v_proj', 'attention.attention.value'),
    ('attention.o_proj', 'attention.output.dense'),
    ('mlp.fc1', 'intermediate.dense'),
    ('mlp.fc2', 'output.dense'),
  ):
    name = name.replace(new, old)
  return name


def test_older_names_of_transformers(tmp_path):
  arrays = {older_hub_name(n): x for n, x in arrays_of('vit_hf').items()}
  save_file(arrays, tmp_path / 'model.safetensors')
  shutil.copy(GOLDEN / 'vit_hf' / 'config.json', tmp_path)
  assert_loads_alike(tmp_path, 'vit_hf')


def test_parts_with_an_index(tmp_path):
  arrays = arrays_of('vit_timm')
  names = sorted(arrays)
  parts = {'a.safetensors': names[:20], 'b.safetensors': names[20:]}
  for part, members in parts.items():
    save_file({n: arrays[n] for n in members}, tmp_path / part)
  index = {'weight_map': {n: part for part, ns in parts.items() for n in ns}}
  (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(index))
  shutil.copy(GOLDEN / 'vit_timm' / 'config.json', tmp_path)
  assert_loads_alike(tmp_path, 'vit_timm')


def test_bit_of_tensorflow(tmp_path):
  model = models.build('bit', blocks=(1, 1), width=32, num_classes=5)
  x = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
  params = jax.jit(model.init)(jax.random.key(0), x)['params']
  file = {}
  for name, leaf in trees.flatten(params).items():
    if 'group_norm' in name:
      name = name.replace('scale', 'gamma').replace('bias', 'beta')
      leaf = leaf.reshape(1, 1, 1, -1)
    if 'unit01/b/' in name:  # TensorFlow numbers some
      name = name.replace('standardized_conv2d', 'standardized_conv2d_1')
    file[f'resnet/{name}'] = np.asarray(leaf)
  np.savez(tmp_path / 'bit.npz', **file)
  loaded, again = vit_jax.load(tmp_path / 'bit.npz')
  assert loaded == model
  jax.tree.map(np.testing.assert_array_equal, again, dict(params))


# -- what the file does not tell --------------------------------------------------------


def test_heads_come_from_the_name_or_the_variant(tmp_path):
  model = models.build('vit', 'Ti/16', depth=1, num_classes=4)
  x = np.zeros((1, 32, 32, 3), np.float32)
  params = jax.jit(model.init)(jax.random.key(0), x)['params']
  np.savez(tmp_path / 'a.npz', **trees.flatten(params))
  origin = pretrained.read_source(tmp_path / 'a.npz')
  convert.export(origin, tmp_path / 'timm', 'timm')
  file = tmp_path / 'timm' / 'model.safetensors'

  bare = tmp_path / 'weights.safetensors'
  save_file(load_file(file), bare)  # neither config.json nor metadata
  (tmp_path / 'timm' / 'config.json').unlink()
  with pytest.raises(UserError, match=naming(str(bare), "variant='B/16'", 'num_heads')):
    vit_jax.load(bare)
  named = bare.rename(tmp_path / 'vit_tiny_patch16_224.some_tag.safetensors')
  assert vit_jax.load(named).model.num_heads == 3
  assert vit_jax.load(named, num_heads=6).model.num_heads == 6
  with pytest.raises(UserError, match=naming('depth 1', "'Ti/16'", 12)):
    vit_jax.load(named, variant='Ti/16')


def test_class_names_and_pipeline_come_from_the_config(tmp_path):
  shutil.copytree(GOLDEN / 'vit_hf', tmp_path / 'hf')
  config = json.loads((tmp_path / 'hf' / 'config.json').read_text())
  config['id2label'] = {str(i): f'animal {i}' for i in range(10)}
  (tmp_path / 'hf' / 'config.json').write_text(json.dumps(config))
  loaded = pretrained.load(tmp_path / 'hf')
  assert loaded.class_names == [f'animal {i}' for i in range(10)]
  assert loaded.pp == "decode|resize(32, rounding='none')|value_range(-1, 1)"
  pp = pretrained.load(path_of('vit_timm')).pp
  assert pp == (
    "decode|resize_small(35, method='bicubic', rounding='nearest')|central_crop(32)"
    '|value_range(-1, 1)'
  )


def test_preprocessing_of_transformers(tmp_path):
  shutil.copytree(GOLDEN / 'vit_hf', tmp_path / 'hf')
  path = tmp_path / 'hf' / 'preprocessor_config.json'
  plain = {'size': {'height': 32, 'width': 32}, 'resample': 2, 'do_normalize': True}
  path.write_text(json.dumps(plain))
  assert pretrained.load(tmp_path / 'hf').pp == (
    "decode|resize((32, 32), method='bilinear', antialias=True, rounding='nearest')"
    '|value_range(-1, 1)'
  )
  crop = {'size': {'shortest_edge': 36}, 'resample': 3, 'do_center_crop': True}
  crop |= {
    'crop_size': 32,
    'image_mean': [0.4, 0.5, 0.6],
    'image_std': [0.2, 0.25, 0.5],
  }
  path.write_text(json.dumps(crop))
  pp = pretrained.load(tmp_path / 'hf').pp
  assert pp == (
    "decode|resize_small(36, method='bicubic', antialias=True, rounding='nearest')"
    '|central_crop((32, 32))|value_range((-2.0, -2.0, -1.2), (3.0, 2.0, 0.8))'
  )
  x = np.full((36, 40, 3), 102, np.uint8)  # 0.4
  np.testing.assert_allclose(SingleImage(pp)(x)[0, 0], [0, -0.4, -0.4], atol=1e-6)
  path.write_text(json.dumps(plain | {'resample': 5}))
  with pytest.raises(
    UserError, match=naming('preprocessor_config.json', 'resample=5', 'bicubic')
  ):
    vit_jax.load(tmp_path / 'hf')


def test_an_architecture_that_is_not_plain_is_refused(tmp_path):
  shutil.copytree(GOLDEN / 'vit_timm', tmp_path / 'a')
  config = json.loads((tmp_path / 'a' / 'config.json').read_text())
  config['architecture'] = 'vit_base_patch16_clip_quickgelu_224.openai'
  (tmp_path / 'a' / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match=naming(config['architecture'], "act='gelu_erf'")):
    vit_jax.load(tmp_path / 'a')
  vit_jax.load(tmp_path / 'a', act='gelu_erf')  # said by the user


# -- fitting ----------------------------------------------------------------------------


def test_another_number_of_classes_gets_a_new_head():
  loaded = pretrained.load(path_of('vit_google_token'), num_classes=3)
  assert loaded.params['head']['kernel'].shape == (48, 3)
  assert not loaded.params['head']['kernel'].any()
  assert re.search(naming('head/bias', 'head/kernel'), loaded.report)


def test_another_size_resizes_the_positions():
  loaded = pretrained.load(path_of('vit_google_token'), image_size=(48, 64))
  old = arrays_of('vit_google_token')['Transformer/posembed_input/pos_embedding']
  new = loaded.params['Transformer']['posembed_input']['pos_embedding']
  assert new.shape == (1, 1 + 6 * 8, 48)
  np.testing.assert_array_equal(new[:, 0], old[:, 0])  # of the cls token
  corners = new[0, 1:].reshape(6, 8, 48)[[0, 0, -1, -1], [0, -1, 0, -1]]
  expected = old[0, 1:].reshape(4, 4, 48)[[0, 0, -1, -1], [0, -1, 0, -1]]
  np.testing.assert_allclose(corners, expected, rtol=1e-6)
  assert re.search(naming((4, 4), (6, 8), 'bilinear'), loaded.report)
  images = np.zeros((1, 48, 64, 3), np.float32)
  assert jax.jit(loaded.model.apply)(loaded.variables, images)[0].shape == (1, 10)


def test_another_patch_size_keeps_the_grid():
  model, params = vit_jax.load(
    path_of('vit_google_token'), patch_size=(16, 16), image_size=64
  )
  assert params['embedding']['kernel'].shape == (16, 16, 3, 48)
  expected = np.load(GOLDEN / 'vit_google_token.expected.npz')
  # An image enlarged as its patches are (each on its own) has the same embeddings.
  x = expected['image'].reshape(2, 4, 8, 4, 8, 3).swapaxes(2, 3)
  x = jax.image.resize(x, (2, 4, 4, 16, 16, 3), 'linear', antialias=False)
  x = x.swapaxes(2, 3).reshape(2, 64, 64, 3)
  logits, _ = jax.jit(model.apply)({'params': params}, x)
  np.testing.assert_allclose(logits, expected['logits'], rtol=0, atol=2e-5)


def test_a_part_can_be_left_out():
  loaded = pretrained.load(path_of('vit_google_prelogits'), skip=['pre_logits/.*'])
  old = arrays_of('vit_google_prelogits')['pre_logits/kernel']
  assert not np.array_equal(loaded.params['pre_logits']['kernel'], old)
  with pytest.raises(
    UserError, match=naming('pre_logits/bias', 'pre_logits/kernel', 'skip')
  ):
    pretrained.load(
      path_of('vit_google_prelogits'), representation_size=None, skip=['head/.*']
    )
  without = pretrained.load(
    path_of('vit_google_prelogits'),
    representation_size=None,
    skip=['pre_logits/.*', 'head/.*'],
  )
  assert 'pre_logits' not in without.params
  assert re.search(
    naming('head/bias', 'head/kernel', 'pre_logits/bias'), without.report
  )


def test_shapes_that_differ_are_named_with_both():
  with pytest.raises(
    UserError, match=naming('MlpBlock_0/Dense_0/kernel', (48, 96), (48, 64))
  ):
    vit_jax.load(path_of('vit_google_token'), mlp_dim=64)
  with pytest.raises(
    UserError, match=naming('Transformer/encoderblock_3/LayerNorm_0/bias')
  ):
    vit_jax.load(path_of('vit_google_token'), depth=4)
  with pytest.raises(
    UserError, match=naming('token_mixing/Dense_0/kernel', (16, 24), (36, 24))
  ):
    vit_jax.load(path_of('mixer_google'), image_size=48)


def test_weights_of_another_architecture_are_refused(tmp_path):
  arrays = arrays_of('vit_timm') | {'blocks.0.ls1.gamma': np.ones(48, np.float32)}
  save_file(arrays, tmp_path / 'model.safetensors')
  shutil.copy(GOLDEN / 'vit_timm' / 'config.json', tmp_path)
  with pytest.raises(UserError, match=naming(tmp_path, 'timm', "'blocks.0.ls1.gamma'")):
    vit_jax.load(tmp_path)
  save_file({'fc1.weight': np.ones((2, 2), np.float32)}, tmp_path / 'b.safetensors')
  with pytest.raises(
    UserError, match=naming('b.safetensors', "'fc1.weight'", 'timm (vit)')
  ):
    vit_jax.load(tmp_path / 'b.safetensors')


# -- names, downloads -------------------------------------------------------------------


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
  loaded = pretrained.load('b16-i21k')
  assert loaded.params['cls'].shape == (1, 1, 48)


@pytest.mark.parametrize(
  'source', ['gs://vit_models/x.npz', 'https://host.invalid/x.npz']
)
def test_a_download_that_fails_says_what_to_do(source, tmp_path, monkeypatch):
  import urllib.request

  def refuse(*args, **kwargs):
    raise urllib.error.URLError('no route to host')

  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  monkeypatch.setattr(urllib.request, 'urlopen', refuse)
  with pytest.raises(UserError, match=naming(source, 'no route to host', tmp_path)):
    vit_jax.load(source)
  assert not [p for p in tmp_path.rglob('*') if p.is_file()]


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
