"""Dense layers and patches against closed forms, and what platforms make of them."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.test_tpu_attention import KINDS, tpu
from tests.support.derivatives import assert_same_derivatives, normal
from vit_jax.kernels import dense as kernels_dense
from vit_jax.kernels import patches
from vit_jax.kernels.dense import dense
from vit_jax.nn.dense import Dense

DENSE = ((2, 5, 6), (6, 7), (7,))  # x, kernel, bias


def plain_dense(x, kernel, bias):
  return x @ kernel + bias


def test_derivatives_of_dense_layers():
  assert_same_derivatives(dense, plain_dense, *(normal(*shape) for shape in DENSE))


def test_gradients_of_dense_layers_are_chosen_when_lowered():
  def text(layer, platform, dtype):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in DENSE]
    loss = lambda *args: jnp.sin(layer(*args)).sum()
    step = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*args)
    return step.lower(lowering_platforms=(platform,)).as_text()

  products = lambda text: re.findall(r'dot_general .*(contracting.*)', text)
  plain = products(text(plain_dense, 'tpu', 'float32'))
  assert len(plain) == 3
  assert products(text(dense, 'tpu', 'float32')) == plain
  assert products(text(dense, 'cuda', 'bfloat16')) == products(
    text(plain_dense, 'cuda', 'bfloat16')
  )
  assert len(products(text(dense, 'tpu', 'bfloat16'))) == 4  # the bias's, with ones
  on_cpu = text(dense, 'cpu', 'bfloat16')
  assert 'contracting_dims = [0] x [0]' in on_cpu
  assert 'contracting_dims = [0, 1] x [0, 1]' not in on_cpu


def test_a_product_with_ones_adds_the_bias():
  x, kernel, bias = (normal(*shape) for shape in DENSE)
  by_ones = lambda *params: kernels_dense._by_ones(x, *params)
  y, pullback = jax.vjp(by_ones, kernel, bias)
  np.testing.assert_allclose(y, plain_dense(x, kernel, bias), atol=1e-5)
  np.testing.assert_allclose(pullback(y)[1], y.sum((0, 1)), atol=1e-5)
  without = kernels_dense._by_ones(x, kernel, None)
  np.testing.assert_allclose(without, plain_dense(x, kernel, 0), atol=1e-5)


def test_a_dense_layer_keeps_its_arguments_alone():
  _, pullback = jax.vjp(dense, *(normal(*shape) for shape in DENSE))
  kept = [leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.ndim]
  assert sorted(kept) == sorted(DENSE[:2])


@pytest.mark.slow
def test_a_dense_layer_of_heads_is_flax_s():
  x, key = normal(2, 5, 6), jax.random.key(0)
  theirs = nn.DenseGeneral((3, 2), bias_init=nn.initializers.normal())
  ours = Dense(6, outputs=(3, 2), bias_init=nn.initializers.normal())
  params = theirs.init(key, x)
  jax.tree.map(np.testing.assert_array_equal, ours.init(key, x), params)
  y = theirs.apply(params, x)
  np.testing.assert_allclose(ours.apply(params, x), y.reshape(2, 5, 6), atol=1e-6)
  theirs, ours = nn.DenseGeneral(7, axis=(-2, -1)), Dense(7, inputs=(3, 2))
  params = theirs.init(key, y)
  jax.tree.map(np.testing.assert_array_equal, ours.init(key, x), params)
  expected = theirs.apply(params, x.reshape(2, 5, 3, 2))
  np.testing.assert_allclose(ours.apply(params, x), expected, atol=1e-6)


def test_a_kernel_of_heads_is_converted_after_its_reshape_on_tpus():
  def text(platform):
    loss = lambda p, x: jnp.sin(layer.apply(p, x)).astype(jnp.float32).sum()
    step = jax.jit(jax.grad(loss)).trace(*abstract)
    return step.lower(lowering_platforms=(platform,)).as_text()

  for heads in ({'outputs': (3, 2)}, {'inputs': (3, 2)}):
    layer = Dense(6, dtype=jnp.bfloat16, **heads)
    x = jax.ShapeDtypeStruct((2, 5, 6), jnp.bfloat16)
    abstract = jax.eval_shape(layer.init, jax.random.key(0), x), x
    # Forward alone, and on TPUs alone.
    assert text('tpu').count('optimization_barrier') == 1
    assert 'optimization_barrier' not in text('cpu') + text('cuda')


# [B, H, W, C], [ph, pw, C, D], [D] of patches.
PATCHES = (2, 6, 8, 3), (3, 2, 3, 5), (5,)


@pytest.mark.parametrize('embed', [patches.embed, patches._rows_convolved])
def test_derivatives_of_patches(embed):
  assert_same_derivatives(
    embed, patches._convolved, *(normal(*shape) for shape in PATCHES)
  )


@pytest.mark.thorough
def test_patches_are_a_convolution_on_tpus():
  def text(platform, batch=2):
    loss = lambda *args: jnp.sin(patches.embed(*args)).sum()
    (_, *image), *others = PATCHES
    shapes = (batch, *image), *others
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    step = jax.jit(jax.grad(loss, (1, 2))).trace(*args)
    return step.lower(lowering_platforms=(platform,)).as_text()

  # The image, twice, is read as it lies in memory.
  assert text('tpu').count('stablehlo.convolution') == 2
  assert 'stablehlo.transpose' not in text('tpu')
  # Of a few images that of 2 x 2 rows of patches, of many that of the images.
  assert 'tensor<4x3x8x3xf32>' in text('tpu')
  assert 'tensor<128x3x8x3xf32>' not in text('tpu', 64)
  with tpu(KINDS['v5e'], 2, 1, 1):  # 32 a device
    assert 'tensor<128x3x8x3xf32>' in text('tpu', 64)
  any_number, *_ = jax.export.symbolic_shape('b')
  assert 'stablehlo.convolution' in text('tpu', any_number)
  for platform in ('cpu', 'cuda'):
    assert 'stablehlo.convolution' not in text(platform)
