"""Feature pyramids: variants, maps by themselves, files; outputs are in test_goldens.py."""

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
from vit_jax.errors import UserError

SWIN = models.family('fpn').tiny[0]['backbone']
VITDET = models.family('sfp').tiny[0]['backbone']
FOUR = VITDET | dict(depth=4, global_blocks=(0, 1, 2, 3))


def shapes(model, inputs):
  """Returns ({level: shape}, {parameter: shape}) of a model, and of images or maps."""
  init = jax.eval_shape(model.init_with_output, jax.random.key(0), inputs)
  (levels, _), variables = init
  params = {n: x.shape for n, x in trees.flatten(variables['params']).items()}
  return {name: x.shape for name, x in levels.items()}, params


def images(*size):
  return jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)


# -- what they give ---------------------------------------------------------------------


@pytest.mark.slow
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
  found, params = shapes(model, images(32, 48))
  assert found == {f'p{i}': (1, -(-32 // 2**i), -(-48 // 2**i), 8) for i in levels}
  assert sum(n.endswith('_lateral/conv/kernel') for n in params) == laterals


def values(kind, **fields):
  """Returns the levels of a pyramid of random parameters, on four random maps."""
  model = models.build(
    'sfp', pyramid=kind, channels=8, in_channels=(16,) * 4, norm='none', **fields
  )
  rng = np.random.default_rng(0)
  maps = {f'stage{i}': rng.normal(size=(1, 8, 8, 16)) for i in range(1, 5)}
  variables = model.init(jax.random.key(0), maps)
  return model, variables, {n: x.astype(np.float32) for n, x in maps.items()}


@pytest.mark.slow
def test_which_maps_a_pyramid_reads():
  for kind, read in (('fpn_last', {4}), ('fpn_stages', {1, 2, 3, 4}), ('simple', {4})):
    model, variables, maps = values(kind)
    p2 = jax.jit(lambda maps, m=model, v=variables: m.apply(v, maps)[0]['p2'].sum())
    gradients = jax.grad(p2)(maps)
    found = {i for i in range(1, 5) if np.abs(gradients[f'stage{i}']).max() > 0}
    # The finest level sees coarser ones by the top-down path alone.
    assert found == read, kind


@pytest.mark.slow
def test_the_top_down_path_is_what_simple_lacks():
  # Of equal parameters: p5, the coarsest, has nothing above it; the others do.
  (model, variables, maps), (simple, *_) = values('fpn_last'), values('simple')
  found, _ = jax.jit(model.apply)(variables, maps)
  without, _ = jax.jit(simple.apply)(variables, maps)
  np.testing.assert_array_equal(found['p5'], without['p5'])
  for level in ('p2', 'p3', 'p4'):
    assert np.abs(found[level] - without[level]).max() > 0.1


@pytest.mark.slow
def test_stages_that_are_no_halves_are_joined_by_nearest_neighbours():
  x = np.arange(6, dtype=np.float32).reshape(1, 2, 3, 1)
  found = pyramid.nearest(x, (4, 5))[0, :, :, 0]
  np.testing.assert_array_equal(found[:, 0], [0, 0, 3, 3])
  np.testing.assert_array_equal(found[0], [0, 0, 1, 1, 2])


@pytest.mark.slow
def test_a_pyramid_on_stages_of_a_backbone_and_on_images_of_odd_sizes():
  model = models.build('fpn', backbone=SWIN, channels=8)
  found, params = shapes(model, images(36, 52))
  # Maps of 9x13, and padded to 5x7 by the merging.
  assert found == {'p2': (1, 9, 13, 8), 'p3': (1, 5, 7, 8), 'p4': (1, 3, 4, 8)}
  assert any(name.startswith('backbone/stage1_block_0/') for name in params)
  assert not any('head' in name for name in params)


def test_a_backbone_takes_the_dtype_of_what_is_built_on_it():
  model = models.build('fpn', 'swin:T', dtype='bfloat16')
  assert model.backbone.dtype == jnp.bfloat16
  assert model.backbone.num_classes is None
  other = models.build('fpn', backbone={'name': 'swin:T', 'dtype': 'float32'})
  assert models.changed(other, dtype=jnp.bfloat16).backbone.dtype == jnp.bfloat16
  fields = models.fields_of(model)
  assert fields['backbone']['name'] == 'swin'
  assert models.build('fpn', **fields) == model


# -- what is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'fields', 'inputs', 'facts'),
  [
    ('fpn', {'backbone': VITDET | {'name': 'mixer'}}, None, ('width', 'mixer')),
    ('fpn', {'backbone': {'name': 'vit:Ti/16'}}, (32, 32), ('ViT', 'stages', 'sfp')),
    (
      'fpn',
      {'backbone': SWIN, 'stages': ('stage7',)},
      (32, 32),
      ("'stage7'", 'stage1'),
    ),
    (
      'fpn',
      {
        'backbone': {'name': 'resnet', 'depths': (1, 1), 'widths': (16, 32)}
        | {'output_stride': 4}
      },
      (32, 32),
      ('stage1', '(8, 8)', 'stage2'),
    ),
    ('fpn', {}, (32, 32), ('backbone', "{'res2'")),
    ('sfp', {'backbone': SWIN}, (32, 32), ('(8, 8)', '(4, 4)', 'fpn')),
    ('sfp', {'backbone': VITDET, 'pyramid': 'fpn_stages'}, (32, 32), (4, "'stage1'")),
    ('sfp', {'pyramid': 'both'}, None, ("'both'", 'simple', 'fpn_last')),
    ('sfp', {'norm': 'batch'}, None, ("'batch'", 'layer')),
    ('fpn', {'backbone': SWIN}, {'res2': (8, 8, 4)}, ("'res2'", 'backbone')),
    ('fpn', {'in_channels': (3,)}, {'res2': (8, 8, 4)}, ('in_channels', '[4]', '[3]')),
  ],
)
def test_what_no_pyramid_can_be_built_on_is_refused(name, fields, inputs, facts):
  if isinstance(inputs, tuple):
    inputs = images(*inputs)
  elif inputs:
    inputs = {n: jnp.zeros((1, *shape)) for n, shape in inputs.items()}
  with pytest.raises(UserError, match=naming(*facts)):
    shapes(models.build(name, **fields), inputs)


# -- files ------------------------------------------------------------------------------

PYRAMIDS = ('sfp_d2', 'fpn_d2', 'fpn_ln_d2')


@pytest.mark.parametrize('name', PYRAMIDS)
def test_files_come_back_bit_for_bit(tmp_path, name):
  source = weights.read(path_of(name))
  weights.write(source, tmp_path / 'out', 'detectron2')
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  expected = arrays_of(name)
  assert arrays.keys() == expected.keys()
  for key, x in expected.items():
    np.testing.assert_array_equal(arrays[key], x, err_msg=key)
  again = weights.read(tmp_path / 'out')
  assert again.fields == source.fields
  theirs, ours = (
    json.loads((folder / 'config.json').read_text())['model_args']
    for folder in (path_of(name), tmp_path / 'out')
  )
  assert {k: ours[k] for k in theirs} == theirs


def test_a_pyramid_without_its_config(tmp_path):
  shutil.copy(path_of('sfp_d2') / 'model.safetensors', tmp_path)
  found, expected = vit_jax.load(tmp_path), vit_jax.load(path_of('sfp_d2'))
  # The extra level has no parameters that would tell of it.
  assert found.model.clone(extra_level=True) == expected.model
  assert found.image_size == expected.image_size == (128, 128)


@pytest.mark.parametrize(
  ('name', 'change', 'facts'),
  [
    ('sfp_d2', {'scale_factors': [2.0, 1.0]}, ('scale_factors', '[2.0, 1.0]')),
    ('sfp_d2', {'top_block': 'LastLevelP6P7'}, ('top_block', 'LastLevelP6P7')),
    ('fpn_d2', {'fuse_type': 'avg'}, ('fuse_type', 'avg', 'sum')),
  ],
)
def test_what_is_not_read_is_refused(tmp_path, name, change, facts):
  folder = tmp_path / 'a'
  shutil.copytree(path_of(name), folder)
  config = json.loads((folder / 'config.json').read_text())
  config['model_args'] |= change
  (folder / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match=naming(folder, *facts)):
    vit_jax.load(folder)


def test_what_detectron2_cannot_express_is_refused(tmp_path):
  source = weights.read(path_of('sfp_d2'), pyramid='fpn_last')
  with pytest.raises(UserError, match=naming("pyramid='fpn_last'", 'simple')):
    weights.write(source, tmp_path / 'out', 'detectron2')
