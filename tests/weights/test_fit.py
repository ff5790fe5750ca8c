"""Weights loaded into a different model: other classes, sizes, patches; what cannot fit."""

import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.goldens import arrays_of, path_of
from vit_jax import weights
from vit_jax.errors import UserError


@pytest.mark.thorough
def test_another_number_of_classes_gets_a_new_head():
  loaded = weights.load(path_of('vit_google_token'), num_classes=3)
  assert loaded.params['head']['kernel'].shape == (48, 3)
  assert not loaded.params['head']['kernel'].any()
  assert re.search(naming('head/bias', 'head/kernel'), loaded.report)


@pytest.mark.thorough
def test_another_size_resizes_the_positions():
  loaded = weights.load(path_of('vit_google_token'), image_size=(48, 64))
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


@pytest.mark.thorough
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


@pytest.mark.slow
def test_a_part_can_be_left_out():
  loaded = weights.load(path_of('vit_google_prelogits'), skip=['pre_logits/.*'])
  old = arrays_of('vit_google_prelogits')['pre_logits/kernel']
  assert not np.array_equal(loaded.params['pre_logits']['kernel'], old)
  with pytest.raises(
    UserError, match=naming('pre_logits/bias', 'pre_logits/kernel', 'skip')
  ):
    weights.load(
      path_of('vit_google_prelogits'), representation_size=None, skip=['head/.*']
    )
  without = weights.load(
    path_of('vit_google_prelogits'),
    representation_size=None,
    skip=['pre_logits/.*', 'head/.*'],
  )
  assert 'pre_logits' not in without.params
  assert re.search(
    naming('head/bias', 'head/kernel', 'pre_logits/bias'), without.report
  )


@pytest.mark.thorough
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
