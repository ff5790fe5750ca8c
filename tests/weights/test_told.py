"""What a file of weights does not tell, by its name, its config or the caller."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.goldens import path_of
from vit_jax import models, trees, weights
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import UserError


def test_heads_come_from_the_name_or_the_variant(tmp_path):
  model = models.build('vit', 'Ti/16', depth=1, num_classes=4)
  x = np.zeros((1, 32, 32, 3), np.float32)
  params = jax.jit(model.init)(jax.random.key(0), x)['params']
  np.savez(tmp_path / 'a.npz', **trees.flatten(params))
  origin = weights.read(tmp_path / 'a.npz')
  weights.write(origin, tmp_path / 'timm', 'timm')
  file = tmp_path / 'timm' / 'model.safetensors'

  bare = tmp_path / 'weights.safetensors'
  save_file(load_file(file), bare)  # neither config.json nor metadata
  (tmp_path / 'timm' / 'config.json').unlink()
  with pytest.raises(UserError, match=naming(str(bare), "variant='B/16'", 'num_heads')):
    vit_jax.load(bare)
  named = bare.rename(tmp_path / 'vit_tiny_patch16_224.some_tag.safetensors')
  assert vit_jax.load(named).model.num_heads == 3
  assert vit_jax.load(named, num_heads=6).model.num_heads == 6
  with pytest.raises(UserError, match=naming('depth is 1', "'Ti/16'", 12)):
    vit_jax.load(named, variant='Ti/16')


def test_class_names_and_pipeline_come_from_the_config(tmp_path):
  shutil.copytree(GOLDEN / 'vit_hf', tmp_path / 'hf')
  config = json.loads((tmp_path / 'hf' / 'config.json').read_text())
  config['id2label'] = {str(i): f'animal {i}' for i in range(10)}
  (tmp_path / 'hf' / 'config.json').write_text(json.dumps(config))
  loaded = weights.load(tmp_path / 'hf')
  assert loaded.class_names == [f'animal {i}' for i in range(10)]
  assert loaded.pp == "decode|resize(32, rounding='none')|value_range(-1, 1)"
  pp = weights.load(path_of('vit_timm')).pp
  assert pp == (
    "decode|resize_small(35, method='bicubic', rounding='nearest')|central_crop(32)"
    '|value_range(-1, 1)'
  )


def test_preprocessing_of_transformers(tmp_path):
  shutil.copytree(GOLDEN / 'vit_hf', tmp_path / 'hf')
  path = tmp_path / 'hf' / 'preprocessor_config.json'
  plain = {'size': {'height': 32, 'width': 32}, 'resample': 2, 'do_normalize': True}
  path.write_text(json.dumps(plain))
  assert weights.load(tmp_path / 'hf').pp == (
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
  pp = weights.load(tmp_path / 'hf').pp
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


def test_other_models_of_transformers_are_refused_by_their_name(tmp_path):
  shutil.copytree(GOLDEN / 'vit_hf', tmp_path / 'a')
  config = tmp_path / 'a' / 'config.json'
  config.write_text(json.dumps({'model_type': 'dinov2'}))
  with pytest.raises(UserError, match=naming("'dinov2'", "'vit'")):
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
    weights.read(path_of('vit_bigvision_map')), class_names=None
  )
  weights.write(origin, tmp_path / 'a', 'timm')
  path = tmp_path / 'a' / 'config.json'
  config = {'architecture': name, 'model_args': {'num_heads': 4}}
  path.write_text(json.dumps(config | {'global_pool': pool}))
  if pool == 'avg':
    file = tmp_path / 'a' / 'model.safetensors'
    arrays = load_file(file)
    save_file({n: x for n, x in arrays.items() if 'attn_pool' not in n}, file)
  model = vit_jax.load(tmp_path / 'a').model
  assert (model.act, model.classifier) == (act, {'avg': 'gap'}.get(pool, pool))
