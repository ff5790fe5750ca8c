"""DETR, ViTDet and pyramids: counts, maps, masks; the goldens compare outputs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming, tiny_models
from vit_jax import models, trees
from vit_jax.detection.models import pyramid
from vit_jax.train import flops

DETR = models.family('detr').tiny[0]
SWIN = models.family('fpn').tiny[0]['backbone']
VITDET = models.family('sfp').tiny[0]['backbone']
FOUR = VITDET | dict(depth=4, global_blocks=(0, 1, 2, 3))

# Parameters and 1e9 multiply-adds at 1024 pixels of ViTDet with its pyramid, parameters of
# ViTDet alone. Of DETR: parameters, 1e9 multiply-adds at 800 x 1066, parameters that the
# recipe trains, frozen statistics: of transformers and of the authors' code.
SIZES = {
  'sfp:B': (91_449_024, 554.49, 85_889_024),
  'sfp:L': (311_237_888, 1574.24, 303_432_704),
  'sfp:H': (641_756_992, 3078.12, 631_116_800),
  'detr:R50-DC5': (41_524_768, 106.02 + 67.15, 41_302_368, 106_240),
  'detr:R101': (60_464_672, 133.43 + 11.19, 60_242_272, 210_688),
}
FROZEN = r'backbone/(stem|stage1_.*)/.*'


@pytest.mark.parametrize('name', SIZES)
def test_parameters_and_operations(name):
  model, variables = models.build(name), {}

  def forward(images):  # traced once, for both
    outputs, tree = model.init_with_output(jax.random.key(0), images)
    variables.update(tree)
    return outputs

  size = (800, 1066) if name.startswith('detr') else (1024, 1024)
  operations = flops.count(forward, images(*size)) / 2e9
  number, gmacs, *others = SIZES[name]
  assert operations == pytest.approx(gmacs, rel=5e-3 if 'detr' in name else 1e-3)
  params = trees.flatten(variables['params'])
  count = lambda regex: sum(x.size for n, x in params.items() if re.match(regex, n))
  assert count('') == number
  if name.startswith('sfp'):
    assert [count('backbone/')] == others
  else:
    statistics = sum(x.size for x in jax.tree.leaves(variables['batch_stats']))
    assert [number - count(FROZEN), statistics] == others


def shapes(model, inputs):
  """Returns ({level: shape}, {parameter: shape}) of a model, and of images or maps."""
  init = jax.eval_shape(model.init_with_output, jax.random.key(0), inputs)
  (levels, _), variables = init
  params = {n: x.shape for n, x in trees.flatten(variables['params']).items()}
  return {name: x.shape for name, x in levels.items()}, params


def images(*size):
  return jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)


# -- DETR ---------------------------------------------------------------------------------


def test_a_mask_without_padding_changes_nothing():
  model, images = tiny_models.build('detr 0'), tiny_models.images()
  variables = tiny_models.random(model)

  @jax.jit  # one program: both have one backbone
  def run(variables, images, mask):
    call = functools.partial(model.apply, variables, images, features=False)
    return call()[0], call(mask)[0]

  expected, masked = run(variables, images, np.ones(images.shape[:3]))
  for key, x in expected.items():
    np.testing.assert_allclose(masked[key], x, rtol=0, atol=1e-5)


def test_detr_on_another_backbone():
  model = models.build('detr', **DETR | {'backbone': VITDET})
  init = functools.partial(model.init_with_output, jax.random.key(0))
  _, out = jax.eval_shape(init, images(32, 32))[0]
  assert out['projected'].shape == (1, 8, 8, 16)
  with pytest.raises(ValueError, match=naming('RUN', 'boxes', 'classes')):
    model.check_outputs('classes', 'RUN')


# -- ViTDet and pyramids ------------------------------------------------------------------


def test_stages_end_where_a_block_sees_the_whole_map():
  model = models.build('vitdet', **models.family('vitdet').tiny[0] | {'depth': 5})
  init = jax.eval_shape(model.init_with_output, jax.random.key(0), images(32, 32))
  out = init[0][1]
  assert [n for n in out if n.startswith('stage')] == ['stage1', 'stage2', 'stage3']


@pytest.mark.parametrize('kind', ['simple', 'fpn_last', 'fpn_stages', 'none'])
def test_the_four_pyramids_on_a_plain_backbone(kind):
  # Patches of 4 px: the last map has a stride of 4, which is level 2.
  model = models.build('sfp', backbone=FOUR, pyramid=kind, channels=8)
  maps, params = shapes(model, images(32, 48))
  levels = [2] if kind == 'none' else range(5)
  assert maps == {f'p{i}': (1, -(-32 // 2**i), -(-48 // 2**i), 8) for i in levels}
  laterals = sum(n.endswith('_lateral/conv/kernel') for n in params)
  assert laterals == (1 if kind == 'none' else 4)


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
    draws = np.random.default_rng(1)
    variables = jax.tree.map(
      lambda x, draws=draws: draws.normal(size=x.shape).astype(np.float32),
      jax.eval_shape(model.init, jax.random.key(0), maps),
    )

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
  assert other.change(dtype=jnp.bfloat16).backbone.dtype == jnp.bfloat16
  fields = model.fields()
  assert fields['backbone']['name'] == 'swin'
  assert models.build('fpn', **fields) == model


DILATED = {'name': 'resnet', 'depths': (1, 1), 'widths': (16, 32), 'output_stride': 4}
SFP = models.family('semantic_fpn').tiny[0]['backbone']


@pytest.mark.parametrize(
  ('name', 'fields', 'facts'),
  [
    ('detr', {'variant': 'R5'}, ("'R5'", 'R50', 'R101-DC5')),
    ('detr', {}, ('backbone', 'detr:R50')),
    ('detr', {'variant': 'R50', 'width': 42}, ('42', '4')),
    ('fpn', {'backbone': VITDET | {'name': 'mixer'}}, ('width', 'mixer')),
    ('fpn', {'backbone': {'name': 'vit:Ti/16'}}, ('ViT', 'stages', 'sfp')),
    ('fpn', {'backbone': DILATED}, ('stage1', '(8, 8)', 'stage2')),
    ('sfp', {'backbone': SWIN}, ('(8, 8)', '(4, 4)', 'fpn')),
    ('sfp', {'backbone': VITDET, 'pyramid': 'fpn_stages'}, (4, "'stage1'")),
    ('sfp', {'pyramid': 'both'}, ("'both'", 'simple', 'fpn_last')),
    ('vitdet', {'variant': 'X'}, ("'X'", 'B', 'L', 'H')),
    ('vitdet', {'variant': 'B', 'global_blocks': (5, 2)}, ('(5, 2)', 'ascending')),
    ('vitdet', {'variant': 'B', 'global_blocks': (2, 12)}, ('(2, 12)', 0, 11)),
    ('semantic_fpn', {'backbone': None}, ('semantic_fpn', 'backbone', 'sfp')),
    ('semantic_fpn', {'backbone': VITDET}, ('ViTDet', 'sfp')),
    ('semantic_fpn', {'backbone': SFP, 'levels': ('p9',)}, ("'p9'", 'p1')),
    ('semantic_fpn', {'backbone': SFP, 'channels': 24}, (24, 32)),
  ],
)
def test_fields_that_do_not_fit(name, fields, facts):
  init = lambda key, images: models.build(name, **fields).init(key, images)
  with pytest.raises(ValueError, match=naming(*facts)):
    jax.eval_shape(init, jax.random.key(0), images(32, 32))
