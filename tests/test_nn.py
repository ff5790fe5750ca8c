"""Layers against closed forms, and against what JAX derives of the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import naming
from scipy.special import erf

from vit_jax import sharding
from vit_jax.errors import UserError
from vit_jax.nn import mlp
from vit_jax.nn.attention import attend
from vit_jax.nn.layer_norm import normalise
from vit_jax.nn.stochastic_depth import StochasticDepth

RNG = np.random.default_rng(0)


def normal(*shape):
  return RNG.normal(size=shape).astype(np.float32)


def test_layer_norm_in_float64():
  # A mean far from 0 is where a one-pass variance loses its digits.
  x, scale, bias = normal(5, 7, 16) * 3 + 50, normal(16), normal(16)
  wide = x.astype(np.float64)
  centred = wide - wide.mean(-1, keepdims=True)
  expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
  # float32 of numbers near 50: 4e-6 each, over a deviation of 3.
  np.testing.assert_allclose(
    normalise(x, scale, bias, 1e-6), expected * scale + bias, atol=2e-5
  )


def test_layer_norm_gradient_is_that_of_the_formula():
  def plain(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-6) * scale + bias

  args, weight = (normal(3, 4, 16), normal(16), normal(16)), normal(3, 4, 16)
  grad = lambda fn: jax.grad(lambda *a: (fn(*a) * weight).sum(), argnums=(0, 1, 2))
  ours = lambda *a: normalise(*a, 1e-6)
  for a, b in zip(grad(ours)(*args), grad(plain)(*args), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)  # float32, sums of 16


def test_layer_norm_of_bfloat16_has_float32_statistics():
  x = jnp.asarray(normal(4, 256) + 3, jnp.bfloat16)
  y = normalise(x, jnp.ones(256), jnp.zeros(256), 1e-6)
  assert y.dtype == jnp.float32
  np.testing.assert_allclose(y.mean(-1), 0, atol=1e-5)
  grad = jax.grad(lambda x: normalise(x, jnp.ones(256), jnp.zeros(256), 1e-6).sum())(x)
  assert grad.dtype == jnp.bfloat16


def test_gelus():
  x = np.linspace(-5, 5, 101).astype(np.float32)
  exact = x * 0.5 * (1 + erf(x.astype(np.float64) / np.sqrt(2)))
  np.testing.assert_allclose(mlp.activation('gelu_erf')(x), exact, atol=1e-6)
  tanh = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
  np.testing.assert_allclose(mlp.activation('gelu_tanh')(x), tanh, atol=1e-6)
  with pytest.raises(UserError, match=naming('gelu_tan', 'gelu_tanh')):
    mlp.activation('gelu_tan')


@pytest.mark.parametrize('asked', [False, True])
def test_attention_in_float64(asked):
  q, k, v = normal(2, 3, 4, 8), normal(2, 5, 4, 8), normal(2, 5, 4, 8)
  seen = []
  y = attend(q, k, v, see_weights=seen.append if asked else None)
  scores = np.einsum('bnmd,bsmd->bmns', *(x.astype(np.float64) for x in (q, k)))
  weights = np.exp(scores / np.sqrt(8))
  weights /= weights.sum(-1, keepdims=True)
  expected = np.einsum('bmns,bsmd->bnmd', weights, v)
  np.testing.assert_allclose(y, expected, atol=1e-6)  # float32
  for found in seen:
    np.testing.assert_allclose(found, weights, atol=1e-6)
  assert len(seen) == asked


def test_attention_is_jax_s_own_in_bfloat16():
  q, k, v = (jnp.asarray(normal(2, 6, 4, 16), jnp.bfloat16) for _ in range(3))
  found = attend(q, k, v)
  expected = jax.nn.dot_product_attention(q, k, v, implementation='xla')
  assert found.dtype == jnp.bfloat16
  # One bfloat16 step of numbers near 1 is 0.8 %.
  np.testing.assert_allclose(
    found.astype(np.float32), expected.astype(np.float32), atol=0.016
  )


def test_stochastic_depth_keeps_the_expectation():
  x = np.ones((20_000, 2), np.float32)
  module, key = StochasticDepth(), {'dropout': jax.random.key(0)}
  y = np.asarray(module.apply({}, x, 0.25, train=True, rngs=key))
  assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
  assert (y[:, 0] == y[:, 1]).all()  # a whole example is dropped
  # Five deviations: sqrt(0.25 / 0.75 / 20000) = 0.004.
  assert abs(y.mean() - 1) < 0.02
  np.testing.assert_array_equal(module.apply({}, x, 0.25), x)


def test_mlp_in_pieces_is_the_mlp():
  block = mlp.MlpBlock(hidden=2 * mlp._COLUMNS + 64)  # the last piece is smaller
  x, out = normal(2, 3, 8), normal(2, 3, 8)
  params = block.init(jax.random.key(0), x)['params']

  def loss(params, x):
    return (block.apply({'params': params}, x) * out).sum()

  def value():  # the mesh decides while it is traced
    return jax.jit(jax.value_and_grad(lambda *args: loss(*args), (0, 1)))

  whole = value()
  with jax.set_mesh(sharding.make_mesh(1, devices=jax.devices()[:1])):
    pieces = value()
    assert pieces.lower(params, x).as_text().count('dot_general') == 3 * 6
    actual = pieces(params, x)
  assert whole.lower(params, x).as_text().count('dot_general') == 6
  # Sums of 8 or 1600 products of about 1 in another order.
  for a, b in zip(*map(jax.tree.leaves, (actual, whole(params, x))), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
