"""Published formats: each loads by its path alone and computes what its library does."""

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import GOLDEN, naming
from goldens import GOLDENS, arrays_of, check, path_of
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax import models, pretrained, trees
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import UserError
from vit_jax.tools import convert

# One of each family and file format, and those that cost least.
QUICK = (
  'vit_google_token',
  'vit_google_prelogits',
  'hybrid_google',
  'mixer_google',
  'vit_bigvision_scan_tok',
  'vit_timm',
  'mixer_timm',
  'vit_hf',
  'resnet_gn_timm',
  'bit_timm',
  'convnext_timm',
  'swin_timm',
  'swin_hf',
  'vitdet_hf',
  'sfp_d2',
  'fpn_d2',
  'fpn_ln_d2',
  'resnet_timm',
  'mvit_timm',
  'detr_hf',
  'detr_dc5_original',
)


@pytest.mark.parametrize(
  'name',
  [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in GOLDENS],
)
def test_golden_loads_by_its_path_and_agrees(name):
  loaded = check(path_of(name), name)
  assert loaded.format == GOLDENS[name][0]
  expected = np.load(GOLDEN / f'{name}.expected.npz')
  # Of a model for any size only a config beside the arrays tells it.
  any_size = models.family_of(loaded.model).any_size(models.fields_of(loaded.model))
  told = 'image' in expected and (path_of(name).is_dir() or not any_size)
  usual = {'detr': (1333, 1333)}.get(GOLDENS[name][1])
  told_size = expected['image'].shape[1:3] if told else (224, 224)
  size = usual or told_size
  assert loaded.image_size == size


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


@pytest.mark.slow
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


def timm_folder(path, architecture, drop=(), **config):
  """The golden of timm under the name of another architecture."""
  shutil.copytree(GOLDEN / 'vit_timm', path)
  told = json.loads((path / 'config.json').read_text())
  told |= {'architecture': architecture, **config}
  for key in drop:
    del told['model_args'][key]
  (path / 'config.json').write_text(json.dumps(told))
  return path


def test_an_architecture_that_is_not_known_is_refused(tmp_path):
  folder = timm_folder(tmp_path / 'a', 'vit_base_patch16_odd_224.mine')
  with pytest.raises(
    UserError, match=naming('vit_base_patch16_odd_224.mine', "act='gelu_erf'")
  ):
    vit_jax.load(folder)
  vit_jax.load(folder, act='gelu_erf')  # said by the user


@pytest.mark.parametrize(
  ('architecture', 'facts'),
  [
    ('swinv2_cr_tiny_ns_224.sw_in1k', ('Swin V2 (CR)', 'windows')),
    ('vit_base_patch16_clip_quickgelu_224.openai', ('CLIP', 'QuickGELU')),
    ('deit3_base_patch16_224', ('DeiT III', 'LayerScale')),
    ('eva02_tiny_patch14_224', ('EVA-02', 'rotary')),
  ],
)
def test_other_families_are_refused_by_their_name(tmp_path, architecture, facts):
  folder = timm_folder(tmp_path / 'a', architecture)
  with pytest.raises(UserError, match=naming(folder, architecture, *facts)):
    vit_jax.load(folder, act='gelu_erf')


def test_other_models_of_transformers_are_refused_by_their_name(tmp_path):
  shutil.copytree(GOLDEN / 'vit_hf', tmp_path / 'a')
  config = tmp_path / 'a' / 'config.json'
  config.write_text(json.dumps({'model_type': 'dinov2'}))
  with pytest.raises(UserError, match=naming('dinov2', 'DINOv2', 'LayerScale')):
    vit_jax.load(tmp_path / 'a')


@pytest.mark.parametrize('name', ['deit_tiny_patch16_224', 'flexivit_small'])
def test_heads_come_from_the_architecture_in_the_config(tmp_path, name):
  # Published folders name the architecture and no number of heads.
  folder = timm_folder(tmp_path / 'a', name, drop=['num_heads'])
  heads = {'deit_tiny_patch16_224': 3, 'flexivit_small': 6}[name]
  model = vit_jax.load(folder).model
  assert (model.num_heads, model.act) == (heads, 'gelu_erf')


@pytest.mark.parametrize(
  ('name', 'act'),
  [
    # timm 1.0.31: the act_layer of these architectures.
    ('vit_base_patch16_siglip_224', 'gelu_erf'),
    ('vit_base_patch32_siglip_256', 'gelu_tanh'),
    ('vit_large_patch16_siglip_384', 'gelu_erf'),
    ('vit_large_patch16_siglip_512', 'gelu_tanh'),
    ('vit_so400m_patch14_siglip_384', 'gelu_erf'),
    ('vit_so400m_patch16_siglip_384', 'gelu_tanh'),
    ('vit_giantopt_patch16_siglip_256', 'gelu_tanh'),
  ],
)
@pytest.mark.parametrize('pool', ['map', 'avg'])
def test_siglip_of_timm(tmp_path, name, act, pool):
  if pool == 'avg':
    name = name.replace('siglip', 'siglip_gap')
  origin = dataclasses.replace(
    pretrained.read_source(path_of('vit_bigvision_map')), class_names=None
  )
  convert.export(origin, tmp_path / 'a', 'timm')
  path = tmp_path / 'a' / 'config.json'
  config = {'architecture': name, 'model_args': {'num_heads': 4}}
  path.write_text(json.dumps(config | {'global_pool': pool}))
  if pool == 'avg':
    file = tmp_path / 'a' / 'model.safetensors'
    arrays = load_file(file)
    save_file({n: x for n, x in arrays.items() if 'attn_pool' not in n}, file)
  model = vit_jax.load(tmp_path / 'a').model
  assert (model.act, model.classifier) == (act, {'avg': 'gap'}.get(pool, pool))
