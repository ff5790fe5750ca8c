"""ViTDet: counts, maps of any size, files; what it gives is compared in test_goldens.py."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import vit_jax
from tests.support import naming
from tests.support.goldens import arrays_of, path_of
from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.tools.inspect import flops
from vit_jax.weights import formats

# Parameters, and 1e9 multiply-adds at 1024 px, of the backbone and with its pyramid.
SIZES = {
  'B': (85_889_024, 482.82, 91_449_024, 554.49),
  'L': (303_432_704, 1489.35, 311_237_888, 1574.24),
  'H': (631_116_800, 2976.78, 641_756_992, 3078.12),
}


@pytest.mark.parametrize(
  'variant',
  [pytest.param(v, marks=[] if v == 'B' else pytest.mark.slow) for v in SIZES],
)
def test_parameters_and_operations(variant):
  model, shapes = models.build('sfp', variant), {}

  def forward(images):  # traced once, for both
    outputs, variables = model.init_with_output(jax.random.key(0), images)
    shapes.update(variables['params'])
    return outputs

  images = jax.ShapeDtypeStruct((1, 1024, 1024, 3), jnp.float32)
  found = flops.count(forward, images) / 2e9
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  backbone, _, both, gmacs = SIZES[variant]
  assert (count(shapes['backbone']), count(shapes)) == (backbone, both)
  assert found == pytest.approx(gmacs, rel=1e-3)


@pytest.mark.slow
def test_images_of_another_size(golden):
  expected = golden('vitdet_hf_other_size')
  loaded = vit_jax.load(path_of('vitdet_hf'))
  _, out = jax.jit(loaded.model.apply)(loaded.variables, expected.pop('image'))
  for name, x in expected.items():
    np.testing.assert_allclose(out[name], x, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_tables_resized_by_loading_give_the_same(golden):
  expected = golden('vitdet_hf_other_size')
  H, W = expected['image'].shape[1:3]
  loaded = vit_jax.load(path_of('vitdet_hf'), image_size=(H, W))
  block = loaded.params['Transformer']['encoderblock_3']['relative_positions']
  assert (len(block['rows']), len(block['columns'])) == (2 * 6 - 1, 2 * 10 - 1)
  assert 'resized from 8 to 6, linear' in loaded.report
  _, out = jax.jit(loaded.model.apply)(loaded.variables, expected['image'])
  np.testing.assert_allclose(out['stage2'], expected['block03'], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_stages_end_where_a_block_sees_the_whole_map():
  model = models.build('vitdet', **models.family('vitdet').tiny[0] | {'depth': 5})
  images = jnp.zeros((1, 32, 32, 3))
  out = jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0][1]
  assert [n for n in out if n.startswith('stage')] == ['stage1', 'stage2', 'stage3']


@pytest.mark.parametrize(
  ('fields', 'facts'),
  [
    (dict(variant='X'), ("'X'", 'B', 'L', 'H')),
    (dict(variant='B:16'), ("'B:16'", 'B', 'L', 'H')),
    (dict(variant='B', global_blocks=(2, 12)), ('global_blocks=(2, 12)', 0, 11)),
    (dict(variant='B', global_blocks=(5, 2)), ('global_blocks=(5, 2)', 'ascending')),
    (dict(variant='B', window=0), ('window=0',)),
    (dict(variant='B', scan=True), ('vitdet.scan',)),
  ],
)
def test_fields_that_do_not_fit_are_refused(fields, facts):
  image = jnp.zeros((1, 32, 32, 3))
  init = lambda key: models.build('vitdet', **fields).init(key, image)
  with pytest.raises(UserError, match=naming(*facts)):
    jax.eval_shape(init, jax.random.key(0))


# -- files --------------------------------------------------------------------------------


def test_files_come_back_bit_for_bit(tmp_path):
  source = weights.read(path_of('vitdet_hf'))
  weights.write(source, tmp_path / 'out', 'hf')
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  expected = arrays_of('vitdet_hf')
  assert arrays.keys() == expected.keys()
  for key, x in expected.items():
    np.testing.assert_array_equal(arrays[key], x, err_msg=key)
  assert weights.read(tmp_path / 'out').fields == source.fields
  theirs, ours = (
    json.loads((folder / 'config.json').read_text())
    for folder in (path_of('vitdet_hf'), tmp_path / 'out')
  )
  assert {k: ours[k] for k in theirs} == theirs


def test_windows_are_told_by_the_tables_alone(tmp_path):
  shutil.copy(path_of('vitdet_hf') / 'model.safetensors', tmp_path)
  found = vit_jax.load(tmp_path, num_heads=2)
  expected = vit_jax.load(path_of('vitdet_hf'))
  assert found.model == expected.model
  assert found.image_size == expected.image_size


@pytest.mark.parametrize(
  ('change', 'facts'),
  [
    ({'residual_block_indices': [1]}, ('residual_block_indices', '[1]')),
    ({'window_block_indices': [0, -1]}, ('window_block_indices', '-1')),
    ({'hidden_act': 'relu'}, ("'relu'", 'gelu')),
    ({'model_type': 'vit'}, ("'vit'", "'vitdet'")),
  ],
)
def test_what_is_not_read_is_refused(tmp_path, change, facts):
  folder = tmp_path / 'a'
  shutil.copytree(path_of('vitdet_hf'), folder)
  config = json.loads((folder / 'config.json').read_text()) | change
  (folder / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match=naming(folder, *facts)):
    vit_jax.load(folder)


@pytest.mark.parametrize(
  ('fields', 'facts'),
  [
    ({'num_classes': 3}, ('num_classes=3', 'classifier')),
    ({'pretrained_size': (64, 32), 'absolute': False}, ('square', '(64, 32)')),
    ({'mlp_dim': 100}, ('mlp_dim=100', 24, 'multiples')),
  ],
)
def test_what_transformers_cannot_express_is_refused(tmp_path, fields, facts):
  source = weights.read(path_of('vitdet_hf'))
  model = models.build('vitdet', **source.fields | fields)
  with pytest.raises(ValueError, match=naming(*facts)):
    formats.writer('vitdet', 'hf').config(models.fields_of(model), (128, 128), None)
