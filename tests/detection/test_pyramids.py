"""ViTDet and feature pyramids: counts, maps, files; outputs are compared by the goldens."""

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
from vit_jax import models, trees, weights
from vit_jax.detection.models import pyramid
from vit_jax.tools.inspect import flops
from vit_jax.weights import formats

SWIN = models.family('fpn').tiny[0]['backbone']
VITDET = models.family('sfp').tiny[0]['backbone']
FOUR = VITDET | dict(depth=4, global_blocks=(0, 1, 2, 3))

# Parameters, and 1e9 multiply-adds at 1024 px, of ViTDet and with its pyramid.
SIZES = {
  'B': (85_889_024, 91_449_024, 554.49),
  'L': (303_432_704, 311_237_888, 1574.24),
  'H': (631_116_800, 641_756_992, 3078.12),
}


@pytest.mark.parametrize('variant', SIZES)
def test_parameters_and_operations(variant):
  model, shapes = models.build('sfp', variant), {}

  def forward(images):  # traced once, for both
    outputs, variables = model.init_with_output(jax.random.key(0), images)
    shapes.update(variables['params'])
    return outputs

  operations = flops.count(forward, images(1024, 1024)) / 2e9
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  backbone, both, gmacs = SIZES[variant]
  assert (count(shapes['backbone']), count(shapes)) == (backbone, both)
  assert operations == pytest.approx(gmacs, rel=1e-3)


def shapes(model, inputs):
  """Returns ({level: shape}, {parameter: shape}) of a model, and of images or maps."""
  init = jax.eval_shape(model.init_with_output, jax.random.key(0), inputs)
  (levels, _), variables = init
  params = {n: x.shape for n, x in trees.flatten(variables['params']).items()}
  return {name: x.shape for name, x in levels.items()}, params


def images(*size):
  return jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)


# -- maps -------------------------------------------------------------------------------


def test_images_of_another_size(golden):
  expected = golden('vitdet_hf_other_size')
  loaded = vit_jax.load(path_of('vitdet_hf'))
  _, out = jax.jit(loaded.model.apply)(loaded.variables, expected['image'])
  for name in expected.keys() - {'image'}:
    np.testing.assert_allclose(out[name], expected[name], rtol=0, atol=2e-5)
  # Tables that loading resizes give the same.
  loaded = vit_jax.load(path_of('vitdet_hf'), image_size=expected['image'].shape[1:3])
  block = loaded.params['Transformer']['encoderblock_3']['relative_positions']
  assert (len(block['rows']), len(block['columns'])) == (2 * 6 - 1, 2 * 10 - 1)
  assert 'resized from 8 to 6, linear' in loaded.report
  _, out = jax.jit(loaded.model.apply)(loaded.variables, expected['image'])
  np.testing.assert_allclose(out['stage2'], expected['block03'], rtol=0, atol=2e-5)


def test_stages_end_where_a_block_sees_the_whole_map():
  model = models.build('vitdet', **models.family('vitdet').tiny[0] | {'depth': 5})
  init = jax.eval_shape(model.init_with_output, jax.random.key(0), images(32, 32))
  out = init[0][1]
  assert [n for n in out if n.startswith('stage')] == ['stage1', 'stage2', 'stage3']


@pytest.mark.parametrize(
  ('kind', 'levels', 'laterals'),
  [
    ('simple', (0, 1, 2, 3, 4), 4),
    ('fpn_last', (0, 1, 2, 3, 4), 4),
    ('fpn_stages', (0, 1, 2, 3, 4), 4),
    ('none', (2,), 1),
  ],
)
def test_the_four_pyramids_on_a_plain_backbone(kind, levels, laterals):
  # Patches of 4 px: the last map has a stride of 4, which is level 2.
  model = models.build('sfp', backbone=FOUR, pyramid=kind, channels=8)
  maps, params = shapes(model, images(32, 48))
  assert maps == {f'p{i}': (1, -(-32 // 2**i), -(-48 // 2**i), 8) for i in levels}
  assert sum(n.endswith('_lateral/conv/kernel') for n in params) == laterals


def test_the_maps_that_a_pyramid_reads():
  rng = np.random.default_rng(0)
  maps = {
    f'stage{i}': rng.normal(size=(1, 8, 8, 8)).astype(np.float32) for i in range(1, 5)
  }
  levels = {}
  for kind, read in (('fpn_last', {4}), ('fpn_stages', {1, 2, 3, 4}), ('simple', {4})):
    model = models.build(
      'sfp', pyramid=kind, channels=8, in_channels=(8,) * 4, norm='none'
    )
    variables = model.init(jax.random.key(0), maps)

    def p2(maps, model=model, variables=variables):
      out, _ = model.apply(variables, maps)
      return out['p2'].sum(), out

    gradients, levels[kind] = jax.jit(jax.grad(p2, has_aux=True))(maps)
    nonzero = {i for i in range(1, 5) if np.abs(gradients[f'stage{i}']).max() > 0}
    # The finest level sees coarser ones by the top-down path alone.
    assert nonzero == read, kind
  # With equal parameters: p5, the coarsest, has nothing above it; the others do.
  np.testing.assert_array_equal(levels['fpn_last']['p5'], levels['simple']['p5'])
  for level in ('p2', 'p3', 'p4'):
    assert np.abs(levels['fpn_last'][level] - levels['simple'][level]).max() > 0.1


def test_maps_that_are_no_halves_are_joined_by_nearest_neighbours():
  x = np.arange(6, dtype=np.float32).reshape(1, 2, 3, 1)
  resized = pyramid.nearest(x, (4, 5))[0, :, :, 0]
  np.testing.assert_array_equal(resized[:, 0], [0, 0, 3, 3])
  np.testing.assert_array_equal(resized[0], [0, 0, 1, 1, 2])


def test_a_pyramid_on_stages_of_a_backbone_and_on_images_of_odd_sizes():
  model = models.build('fpn', backbone=SWIN, channels=8)
  maps, params = shapes(model, images(36, 52))
  # Maps of 9x13, and padded to 5x7 by the merging.
  assert maps == {'p2': (1, 9, 13, 8), 'p3': (1, 5, 7, 8), 'p4': (1, 3, 4, 8)}
  assert any(name.startswith('backbone/stage1_block_0/') for name in params)
  assert not any('head' in name for name in params)


def test_a_backbone_takes_the_dtype_of_the_model_around_it():
  model = models.build('fpn', 'swin:T', dtype='bfloat16')
  assert model.backbone.dtype == jnp.bfloat16
  assert model.backbone.num_classes is None
  other = models.build('fpn', backbone={'name': 'swin:T', 'dtype': 'float32'})
  assert models.changed(other, dtype=jnp.bfloat16).backbone.dtype == jnp.bfloat16
  fields = models.fields_of(model)
  assert fields['backbone']['name'] == 'swin'
  assert models.build('fpn', **fields) == model


DILATED = {'name': 'resnet', 'depths': (1, 1), 'widths': (16, 32), 'output_stride': 4}


@pytest.mark.parametrize(
  ('name', 'fields', 'facts'),
  [
    ('fpn', {'backbone': VITDET | {'name': 'mixer'}}, ('width', 'mixer')),
    ('fpn', {'backbone': {'name': 'vit:Ti/16'}}, ('ViT', 'stages', 'sfp')),
    ('fpn', {'backbone': SWIN, 'stages': ('stage7',)}, ("'stage7'", 'stage1')),
    ('fpn', {'backbone': DILATED}, ('stage1', '(8, 8)', 'stage2')),
    ('sfp', {'backbone': SWIN}, ('(8, 8)', '(4, 4)', 'fpn')),
    ('sfp', {'backbone': VITDET, 'pyramid': 'fpn_stages'}, (4, "'stage1'")),
    ('sfp', {'pyramid': 'both'}, ("'both'", 'simple', 'fpn_last')),
    ('vitdet', dict(variant='X'), ("'X'", 'B', 'L', 'H')),
    ('vitdet', dict(variant='B', global_blocks=(5, 2)), ('(5, 2)', 'ascending')),
    ('vitdet', dict(variant='B', global_blocks=(2, 12)), ('(2, 12)', 0, 11)),
  ],
)
def test_fields_that_do_not_fit(name, fields, facts):
  init = lambda key, images: models.build(name, **fields).init(key, images)
  with pytest.raises(ValueError, match=naming(*facts)):
    jax.eval_shape(init, jax.random.key(0), images(32, 32))


# -- files ------------------------------------------------------------------------------

FORMATS = {
  'vitdet_hf': 'hf',
  'sfp_d2': 'detectron2',
  'fpn_d2': 'detectron2',
  'fpn_ln_d2': 'detectron2',
}


@pytest.mark.parametrize('name', FORMATS)
def test_files_come_back_bit_for_bit(tmp_path, name):
  source = weights.read(path_of(name))
  weights.write(source, tmp_path / 'out', FORMATS[name])
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  expected = arrays_of(name)
  assert arrays.keys() == expected.keys()
  for key, x in expected.items():
    np.testing.assert_array_equal(arrays[key], x, err_msg=key)
  assert weights.read(tmp_path / 'out').fields == source.fields
  theirs, ours = (
    json.loads((folder / 'config.json').read_text())
    for folder in (path_of(name), tmp_path / 'out')
  )
  theirs, ours = (config.get('model_args', config) for config in (theirs, ours))
  assert {k: ours[k] for k in theirs} == theirs


def test_arrays_without_their_config(tmp_path):
  # The sizes of tables tell the windows.
  shutil.copy(path_of('vitdet_hf') / 'model.safetensors', tmp_path)
  loaded, expected = (
    vit_jax.load(tmp_path, num_heads=2),
    vit_jax.load(path_of('vitdet_hf')),
  )
  assert (loaded.model, loaded.image_size) == (expected.model, expected.image_size)
  shutil.copy(path_of('sfp_d2') / 'model.safetensors', tmp_path)
  loaded, expected = vit_jax.load(tmp_path), vit_jax.load(path_of('sfp_d2'))
  # The extra level has no parameters that would tell of it.
  assert loaded.model.clone(extra_level=True) == expected.model
  assert loaded.image_size == expected.image_size == (128, 128)


@pytest.mark.parametrize(
  ('name', 'change', 'facts'),
  [
    ('sfp_d2', {'scale_factors': [2.0, 1.0]}, ('scale_factors', '[2.0, 1.0]')),
    ('sfp_d2', {'top_block': 'LastLevelP6P7'}, ('top_block', 'LastLevelP6P7')),
    ('vitdet_hf', {'residual_block_indices': [1]}, ('residual_block_indices', '[1]')),
    ('vitdet_hf', {'window_block_indices': [0, -1]}, ('window_block_indices', '-1')),
  ],
)
def test_configs_that_are_not_read(tmp_path, name, change, facts):
  folder = tmp_path / 'a'
  shutil.copytree(path_of(name), folder)
  config = json.loads((folder / 'config.json').read_text())
  config.get('model_args', config).update(change)
  (folder / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match=naming(folder, *facts)):
    vit_jax.load(folder)


@pytest.mark.parametrize(
  ('name', 'fields', 'facts'),
  [
    ('sfp_d2', {'pyramid': 'fpn_last'}, ("pyramid='fpn_last'", 'simple')),
    ('vitdet_hf', {'num_classes': 3}, ('num_classes=3', 'transformers')),
    ('vitdet_hf', {'pretrained_size': (64, 32), 'absolute': False}, ('(64, 32)',)),
    ('vitdet_hf', {'mlp_dim': 100}, ('mlp_dim=100', 24)),
  ],
)
def test_fields_that_a_format_cannot_express(name, fields, facts):
  source = weights.read(path_of(name))
  model = models.build(**{'name': source.family, **source.fields} | fields)
  writer = formats.writer(source.family, FORMATS[name])
  with pytest.raises(ValueError, match=naming(*facts)):
    writer.config(models.fields_of(model), (128, 128), None)
