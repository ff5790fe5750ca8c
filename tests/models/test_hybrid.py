"""BiT, ResNets and hybrids (ViTs on a ResNet): variants, stems and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.support import naming
from vit_jax import trees
from vit_jax.errors import UserError
from vit_jax.nn.resnet import StdConv, standardise


def test_what_pads_the_pool_matters_at_the_border_only(golden):
  rename = lambda name: (
    name.removeprefix('resnet/').replace('/gamma', '/scale').replace('/beta', '/bias')
  )
  params = trees.unflatten({rename(k): v for k, v in golden('bit_timm').items()})
  variables = {'params': params}
  fields = dict(blocks=(2, 1), width=32, num_classes=10)
  image = golden('bit_timm.expected')['image'][:, :, :32]
  zeros, nothing = (
    np.asarray(jax.jit(lambda p, m=model: m.apply(p, image)[1]['stem'])(variables))
    for model in (
      vit_jax.create_model('bit', **fields),
      vit_jax.create_model('bit', zero_pad_pool=False, **fields),
    )
  )
  border = np.zeros_like(nothing)
  border[:, 1:, 1:] = -np.inf  # even sizes: the windows reach over two sides
  np.testing.assert_array_equal(zeros, np.maximum(nothing, border))
  assert (zeros != nothing).any()


def test_features_of_the_stem():
  size = dict(patch_size=(1, 1), width=32, depth=2, num_heads=4, mlp_dim=96)
  model = vit_jax.create_model('vit', num_classes=10, stem_blocks=[1], **size)
  images = jnp.zeros((2, 32, 32, 3))
  init = lambda key: model.init_with_output(key, images)[0][1]
  out = jax.eval_shape(init, jax.random.key(0))
  assert out['root'].shape == (2, 8, 8, 64)
  assert out['stage1'].shape == (2, 8, 8, 256)
  assert out['stem'].shape == (2, 8, 8, 32)


@pytest.mark.parametrize(
  ('variant', 'blocks', 'patch'),
  [
    ('R50+B/32', (3, 4, 6, 3), 1),
    ('R50+L/16', (3, 4, 9), 1),
    ('R101+B/16', (3, 4, 26), 1),
    ('R26+Ti/16', (2, 2, 4), 1),
    ('R+S/16', (), 8),
    ('B/16', None, 16),
  ],
)
def test_stages_follow_from_depth_and_stride(variant, blocks, patch):
  model = vit_jax.create_model('vit', variant)
  assert model.stem_blocks == blocks
  assert model.patch_size == (patch, patch)


@pytest.mark.parametrize(
  ('variant', 'suggested'),
  [
    ('R51+B/16', 'R50+B/16'),
    ('R50+B/14', 'R50+B/16'),
    ('R+B/32', 'R+B/16'),
    ('R50+X/16', 'So400m'),
    ('R50+B/32x16', 'R50+B/32'),
    ('R50/16', 'R50+B/16'),
  ],
)
def test_unknown_hybrids_are_refused(variant, suggested):
  with pytest.raises(UserError, match=naming(f"'{variant}'", suggested)):
    vit_jax.create_model('vit', variant)


def test_sizes_that_do_not_fit_are_refused():
  images = jnp.zeros((1, 100, 96, 3))
  model = vit_jax.create_model('vit', 'R+mu/16', num_classes=2)
  with pytest.raises(UserError, match=naming('100x96', '32x32', '128x96')):
    jax.eval_shape(model.init, jax.random.key(0), images)
  with pytest.raises(UserError, match=naming(48, 32, 'stem_width')):
    jax.eval_shape(model.clone(stem_width=48).init, jax.random.key(0), images)
  with pytest.raises(UserError, match=naming('stem_blocks[1]=0')):
    vit_jax.create_model('vit', stem_blocks=[3, 0])


def test_residual_branches_start_at_zero():
  small = dict(stem_blocks=(1,), stem_width=32, depth=1)
  model = vit_jax.create_model('vit', 'R50+mu/16', num_classes=2, **small)
  images = jnp.zeros((1, 32, 32, 3))
  start = lambda key: model.init(key, images)['params']['block1']['unit1']
  unit = jax.jit(lambda key: {n: start(key)[n] for n in ('gn2', 'gn3', 'gn_proj')})(
    jax.random.key(0)
  )
  np.testing.assert_array_equal(unit['gn3']['scale'], 0)
  np.testing.assert_array_equal(unit['gn2']['scale'], 1)
  np.testing.assert_array_equal(unit['gn_proj']['scale'], 1)


def test_standardised_kernels_in_float64():
  rng = np.random.default_rng(0)
  # Deviations about 1e-5, where the two ways of guarding the division part.
  kernel = (1e-5 * rng.normal(size=(3, 3, 8, 4)) + 0.01).astype(np.float32)
  wide = kernel.astype(np.float64)
  centred, variance = wide - wide.mean((0, 1, 2)), wide.var((0, 1, 2))
  tolerance = dict(rtol=0, atol=2e-3)  # 0.01 in float32 has steps of 1e-9
  np.testing.assert_allclose(
    standardise(kernel), centred / (np.sqrt(variance) + 1e-5), **tolerance
  )
  np.testing.assert_allclose(
    standardise(kernel, eps_in_root=True),
    centred / np.sqrt(variance + 1e-10),
    **tolerance,
  )


@pytest.mark.parametrize('eps_in_root', [False, True])
def test_a_constant_kernel_has_a_finite_gradient(eps_in_root):
  conv = StdConv(4, 3, eps_in_root=eps_in_root)
  loss = lambda kernel: conv.apply(
    {'params': {'kernel': kernel}}, jnp.ones((1, 8, 8, 2))
  ).sum()
  value, grad = jax.jit(jax.value_and_grad(loss))(jnp.zeros((3, 3, 2, 4)))
  assert value == 0
  assert np.isfinite(grad).all()


def test_unknown_resnets_are_refused():
  with pytest.raises(UserError, match=naming('R51', 'R50')):
    vit_jax.create_model('resnet_gn', 'R51')
  for name in ('50', 'R50x0', 'R50x', 'R50/16'):
    with pytest.raises(UserError, match=naming(f"'{name}'", 'R26', 'R50x3')):
      vit_jax.create_model('bit', name)
  with pytest.raises(UserError, match=naming('blocks[1]=0')):
    vit_jax.create_model('resnet_gn', blocks=[3, 0])
