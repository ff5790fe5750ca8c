"""Weights of a backbone, or of a ViT, as the start of what is built on them."""

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import naming
from tests.support.goldens import path_of
from vit_jax import models, optim, trees
from vit_jax.errors import UserError
from vit_jax.optim import multipliers

VITS = ('vit_google_token', 'vit_bigvision_map', 'vit_timm', 'vit_hf')


def vitdet_like(name, **fields):
  """Returns the section of a ViTDet of the sizes of a golden ViT."""
  vit = vit_jax.load(path_of(name))
  m = vit.model
  return vit, dict(
    name='vitdet',
    patch_size=m.patch_size,
    width=m.width,
    depth=m.depth,
    mlp_dim=m.mlp_dim,
    num_heads=m.num_heads,
    global_blocks=tuple(range(m.depth)),
    pretrained_size=vit.image_size,
    act=m.act,
    norm_eps=m.norm_eps,
    **fields,
  )


# A file of JAX and one of PyTorch.
QUICK = ('vit_bigvision_map', 'vit_hf')


@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in VITS]
)
def test_a_vit_of_any_source_starts_a_vitdet(name):
  vit, section = vitdet_like(name)
  loaded = vit_jax.load(path_of(name), model=section)
  assert (
    'initialised afresh: Transformer/encoderblock_0/relative_positions' in loaded.report
  )
  # All of its blocks attend to all, and relative positions start at zero: a ViT without
  # a class token, whose tokens are the same where none of them saw it.
  params = trees.flatten(loaded.params)
  theirs = trees.flatten(vit.params)
  for n, x in params.items():
    if 'relative_positions' in n:
      assert not x.any()
    elif 'posembed' not in n:
      np.testing.assert_array_equal(x, theirs[n])
  assert {'Transformer/encoder_norm/scale'} <= set(theirs) - set(params)


@pytest.mark.slow
def test_it_computes_what_a_vit_without_a_class_token_does():
  vit, section = vitdet_like('vit_bigvision_map')
  assert vit.model.classifier == 'map'
  loaded = vit_jax.load(path_of('vit_bigvision_map'), model=section)
  images = np.random.default_rng(0).uniform(-1, 1, (1, *vit.image_size, 3))
  images = images.astype(np.float32)
  _, expected = jax.jit(vit.model.apply)(vit.variables, images)
  _, out = jax.jit(loaded.model.apply)(loaded.variables, images)
  last = f'block{vit.model.depth - 1:02d}'
  found = out[last].reshape(expected[last].shape)
  np.testing.assert_allclose(found, expected[last], rtol=0, atol=5e-6)


@pytest.mark.slow
def test_positions_of_another_grid_and_a_class_row():
  vit, section = vitdet_like('vit_timm')
  side = 2 * vit.image_size[0]
  section['pretrained_size'] = (side, side)
  loaded = vit_jax.load(path_of('vit_timm'), model=section, resize='bicubic')
  name = 'Transformer/posembed_input/pos_embedding'
  table, theirs = (trees.flatten(x.params)[name] for x in (loaded, vit))
  assert table.shape[1] - 1 == 4 * (theirs.shape[1] - 1)
  np.testing.assert_array_equal(table[:, 0], theirs[:, 0])
  assert 'bicubic' in loaded.report
  without = vit_jax.load(path_of('vit_timm'), model=section | {'class_row': False})
  assert trees.flatten(without.params)[name].shape[1] == table.shape[1] - 1


def test_what_is_set_otherwise_than_the_weights_is_said():
  _, section = vitdet_like('vit_google_token')
  loaded = vit_jax.load(
    path_of('vit_google_token'), model=section | {'act': 'gelu_erf'}
  )
  assert "act='gelu_tanh'" in loaded.report


@pytest.mark.slow
def test_a_vit_starts_a_pyramid_and_a_backbone_what_is_built_on_it():
  _, section = vitdet_like('vit_timm')
  loaded = vit_jax.load(path_of('vit_timm'), model=dict(name='sfp', backbone=section))
  alone = vit_jax.load(path_of('vit_timm'), model=section)
  for n, x in trees.flatten(alone.params).items():
    np.testing.assert_array_equal(trees.flatten(loaded.params)[f'backbone/{n}'], x)
  swin = vit_jax.load(path_of('swin_hf'))
  fields = {'name': 'swin', **models.fields_of(swin.model), 'num_classes': None}
  fpn = vit_jax.load(path_of('swin_hf'), model=dict(name='fpn', backbone=fields))
  for n, x in trees.flatten(fpn.params['backbone']).items():
    np.testing.assert_array_equal(x, trees.flatten(swin.params)[n])
  assert 'unused: head/' in fpn.report


@pytest.mark.parametrize(
  ('source', 'model', 'facts'),
  [
    ('hybrid_google', 'vitdet:B', ('stem_blocks', 'vitdet')),
    ('mixer_google', 'vitdet:B', ('MixerBlock_0/LayerNorm_0/bias',)),
    ('vit_timm', 'vitdet:B', (48, 768)),
  ],
)
def test_what_no_vitdet_starts_from_is_refused(source, model, facts):
  with pytest.raises(UserError, match=naming(path_of(source), *facts)):
    vit_jax.load(path_of(source), model=model)


def test_rates_decay_by_the_blocks_of_the_backbone():
  # detectron2: 0 for patches and positions, 1 to L for the blocks, L + 1 for the rest.
  model = models.build('sfp', **models.family('sfp').tiny[0])
  params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 32, 32, 3)))
  factors = multipliers.layer_factors(models.family_of(model), params['params'], 0.7)
  L = model.backbone.depth
  at = lambda start: {float(f) for n, f in factors.items() if n.startswith(start)}
  assert at('backbone/embedding') == {0.7 ** (L + 1)}
  assert at('backbone/Transformer/posembed_input') == {0.7 ** (L + 1)}
  for i in range(L):
    assert at(f'backbone/Transformer/encoderblock_{i}/') == {0.7 ** (L - i)}
  assert at('p') == {1.0}
  optim.build('adamw', 1e-4, 10, layer_decay=0.7, family=models.family_of(model))
