"""Published formats: each loads by its path alone and computes what its library does."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import vit_jax
from tests.support import GOLDEN
from tests.support.goldens import GOLDENS, arrays_of, check, path_of
from vit_jax import models, trees

# Of a family that others are of, which are cheaper or of the same file format.
SLOW = (
  'vit_bigvision_map',
  'vit_google_prelogits',
  'mixer_timm',
  'fpn_d2',
  'swin_timm',
  'detr_dc5_original',
  'swin_timm_pad',
  'swin_timm_rect',
  'swin_hf_pad',
  'swinv2_timm',
  'swinv2_timm_pre',
  'swinv2_hf',
  'mvit_timm_cls',
  'mvit_timm_mlp_expand',
)
# The reference code's own, and those whose layouts no cheaper test reads.
QUICK = ('vit_google_token', 'vit_bigvision_scan_tok', 'resnet_gn_timm')


def golden(name):
  slow, thorough = name in SLOW, name not in QUICK
  marks = pytest.mark.slow if slow else pytest.mark.thorough if thorough else ()
  return pytest.param(name, marks=marks)


@pytest.mark.parametrize('name', [golden(name) for name in GOLDENS])
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


@pytest.mark.slow
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
