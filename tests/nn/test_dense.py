"""Dense layers and patches against closed forms, and their programs by platform."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.derivatives import assert_same_derivatives, normal
from vit_jax.kernels import depthwise, layers
from vit_jax.kernels.attention import softmax
from vit_jax.kernels.layers import dense
from vit_jax.nn.layers import Dense

DENSE = ((2, 5, 6), (6, 7), (7,))  # x, kernel, bias


def plain_dense(x, kernel, bias):
  return x @ kernel + bias


def test_derivatives_of_dense_layers():
  assert_same_derivatives(dense, plain_dense, *(normal(*shape) for shape in DENSE))


def test_gradients_of_dense_layers_are_chosen_when_lowered():
  def products(layer, platform):
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in DENSE]
    loss = lambda *args: jnp.sin(layer(*args)).sum()
    step = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*args)
    text = step.lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r'dot_general .*(contracting_dims = .*?\]) *[,:]', text)

  for platform in ('tpu', 'cuda'):
    plain = products(plain_dense, platform)
    assert len(plain) == 3
    assert products(dense, platform) == plain
  flat, by_axes = (f'contracting_dims = [{n}] x [{n}]' for n in ('0', '0, 1'))
  assert by_axes in products(dense, 'tpu')
  assert flat in products(dense, 'cpu')
  assert by_axes not in products(dense, 'cpu')


def test_a_dense_layer_keeps_its_arguments_alone():
  _, pullback = jax.vjp(dense, *(normal(*shape) for shape in DENSE))
  residuals = [leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.ndim]
  assert sorted(residuals) == sorted(DENSE[:2])


@pytest.mark.parametrize(
  ('theirs', 'ours', 'split'),
  [
    (nn.DenseGeneral((3, 2)), Dense(6, outputs=(3, 2)), lambda x: x),
    (
      nn.DenseGeneral(7, axis=(-2, -1)),
      Dense(7, inputs=(3, 2)),
      lambda x: x.reshape(2, 5, 3, 2),
    ),
  ],
)
def test_a_dense_layer_of_heads_is_flax_s(theirs, ours, split):
  x, key = normal(2, 5, 6), jax.random.key(0)
  params = theirs.init(key, split(x))
  jax.tree.map(np.testing.assert_array_equal, ours.init(key, x), params)
  expected = theirs.apply(params, split(x)).reshape(2, 5, -1)
  np.testing.assert_allclose(ours.apply(params, x), expected, atol=1e-6)


# [B, H, W, C], [ph, pw, C, D], [D] of patches whose rows have 6 or 32 numbers.
SMALL = (2, 6, 8, 3), (3, 2, 3, 5), (5,)
LARGE = (2, 4, 4, 16), (2, 2, 16, 5), (5,)


def convolve(images, kernel, bias):
  numbers = ('NHWC', 'HWIO', 'NHWC')
  y = jax.lax.conv_general_dilated(
    images, kernel, kernel.shape[:2], 'VALID', dimension_numbers=numbers
  )
  return y + bias


@pytest.mark.parametrize('patches', [SMALL, LARGE])
@pytest.mark.parametrize('embed', [layers.embed, layers._convolve])
def test_derivatives_of_patches(embed, patches):
  assert_same_derivatives(embed, convolve, *(normal(*shape) for shape in patches))


@pytest.mark.parametrize(('patches', 'channels'), [(SMALL, 3), (LARGE, 32)])
def test_programs_of_patches(patches, channels):
  def text(platform):
    loss = lambda *args: jnp.sin(layers.embed(*args)).sum()
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in patches]
    step = jax.jit(jax.grad(loss, (1, 2))).trace(*args)
    return step.lower(lowering_platforms=(platform,)).as_text()

  assert text('tpu').count('stablehlo.convolution') == 2
  assert f'x{channels}xf32>, tensor<' in re.search('convolution.*', text('tpu'))[0]
  assert 'stablehlo.transpose' not in text('tpu')
  for platform in ('cpu', 'cuda'):
    assert 'stablehlo.convolution' not in text(platform)


@pytest.mark.parametrize(
  ('layer', 'x', 'w', 'parts'),
  [
    (lambda x, w: dense(x, w, None), (4, 5, 6), (6, 6), 1),
    (lambda x, w: softmax(x * w, 'float32'), (4, 5, 6), (6,), 1),
    (lambda x, w: layers.normalise(x * w, 1e-6), (4, 5, 6), (6,), 1),
    # By the input and by the kernel.
    (
      lambda x, w: depthwise.depthwise(x, w, 1, ((1, 1), (1, 1))),
      (1, 32, 32, 8),
      (3, 3, 1, 8),
      2,
    ),
  ],
  ids=['dense', 'softmax', 'normalise', 'depthwise'],
)
def test_derivatives_are_traced_once_for_all_layers_of_one_shape(layer, x, w, parts):
  # Otherwise a deep model takes minutes before its compilation starts.
  def loss(x, w):
    for _ in range(3):
      x = jnp.sin(layer(x, w))
    return x.sum()

  traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones(x), jnp.ones(w))
  chosen = [e.params['jaxpr'] for e in traced.eqns if e.primitive.name == 'remat2']
  assert len(chosen) == 3 * parts
  assert len({id(jaxpr) for jaxpr in chosen}) == parts
