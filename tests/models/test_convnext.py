"""ConvNeXt: its start and files of transformers; logits are in test_goldens.py."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import vit_jax
from tests.support import naming
from tests.support.goldens import path_of
from vit_jax import models, weights
from vit_jax.errors import UserError


def test_layer_scale_starts_as_published_and_every_stage_is_a_feature():
  model = models.build('convnext', depths=(1, 1), widths=(8, 16), num_classes=3)
  images = jnp.zeros((1, 32, 48, 3))
  start = lambda key: model.init(key, images)['params']['stage2_block_0']['gamma']
  np.testing.assert_array_equal(jax.jit(start)(jax.random.key(0)), np.float32(1e-6))
  init = model.init_with_output
  (_, out), _ = jax.eval_shape(init, jax.random.key(0), images)
  assert out['stage1'].shape == (1, 8, 12, 8)
  assert out['stage2'].shape == (1, 4, 6, 16)


# -- files ------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
  """Returns the golden, and the folder to which it was written for transformers."""
  source = weights.read(path_of('convnext_timm'))
  weights.write(source, tmp_path / 'hf', 'hf')
  return source, tmp_path / 'hf'


def test_files_for_transformers_hold_the_same_model(written, golden):
  source, folder = written
  found = weights.read(folder)
  assert found.format == 'hf'
  assert found.fields == source.fields | {'norm_eps': 1e-6}
  for key, x in source.flat.items():
    np.testing.assert_array_equal(found.flat[key], x, err_msg=key)
  # Names and shapes as of ConvNextForImageClassification of transformers 5.23.
  arrays = load_file(folder / 'model.safetensors')
  layer = 'convnext.encoder.stages.2.layers.1'
  assert arrays['convnext.embeddings.patch_embeddings.weight'].shape == (12, 3, 4, 4)
  assert arrays[f'{layer}.dwconv.weight'].shape == (48, 1, 7, 7)
  assert arrays[f'{layer}.pwconv1.weight'].shape == (192, 48)
  assert arrays[f'{layer}.layer_scale_parameter'].shape == (48,)
  assert 'convnext.encoder.stages.1.downsampling_layer.0.weight' in arrays
  expected = golden('convnext_timm.expected')
  loaded = vit_jax.load(folder)
  logits, _ = jax.jit(loaded.model.apply)(loaded.variables, expected['image'])
  np.testing.assert_allclose(logits, expected['logits'], rtol=0, atol=1e-5)


def test_transformers_own_eps_of_the_final_norm_is_read(written):
  _, folder = written
  config = json.loads((folder / 'config.json').read_text())
  del config['layer_norm_eps']  # its default
  (folder / 'config.json').write_text(json.dumps(config))
  found = weights.read(folder)
  assert found.fields['norm_eps'] == 1e-12
  with pytest.raises(UserError, match=naming('timm', 'norm_eps=1e-12', "'hf'")):
    weights.write(found, folder.parent / 'timm', 'timm')
