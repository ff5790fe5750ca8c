"""Layers against closed forms, and against what JAX derives of the plain formula."""

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from tests.support import naming, tuning
from tests.support.derivatives import assert_same_derivatives, normal
from tests.support.scanned import stacked
from vit_jax import models, trees
from vit_jax.errors import UserError
from vit_jax.kernels.layers import normalise
from vit_jax.models import vit
from vit_jax.nn import layers
from vit_jax.nn.layers import Dense, LayerNorm
from vit_jax.nn.stack import StochasticDepth, depth_rates


def test_layer_norm_in_float64():
  # A mean far from 0 is where a one-pass variance loses its digits.
  x = normal(5, 7, 16) * 3 + 50
  wide = x.astype(np.float64)
  centred = wide - wide.mean(-1, keepdims=True)
  expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
  # float32 of numbers near 50: 4e-6 each, over a deviation of 3.
  np.testing.assert_allclose(normalise(x, 1e-6), expected, atol=2e-5)


def test_derivatives_of_layer_norm():
  def plain(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)

  assert_same_derivatives(lambda x: normalise(x, 1e-6), plain, normal(3, 4, 16))


def test_layer_norm_of_bfloat16_has_float32_statistics():
  x = jnp.asarray(normal(4, 256) + 3, jnp.bfloat16)
  y, grad = jax.value_and_grad(lambda x: normalise(x, 1e-6).sum())(x)
  assert y.dtype == jnp.float32
  np.testing.assert_allclose(normalise(x, 1e-6).mean(-1), 0, atol=1e-5)
  assert grad.dtype == jnp.bfloat16


@pytest.mark.parametrize('layer', [Dense(6), LayerNorm()])
def test_a_parameter_of_another_shape_is_refused(layer):
  variables = layer.init(jax.random.key(0), normal(2, 4))
  with pytest.raises(flax.errors.ScopeParamShapeError, match=r'in "/".*5.*4'):
    layer.apply(variables, normal(2, 5))
  del variables['params']['bias']
  with pytest.raises(flax.errors.ScopeParamNotFoundError, match='bias'):
    layer.apply(variables, normal(2, 4))


def test_shapes_of_a_model_belong_to_the_caller():
  model = models.build('vit:mu/16', num_classes=3)
  first = model.shapes((32, 32, 3))
  assert first['params']['head']['kernel'].shape == (32, 3)
  del first['params']['head']
  again = model.shapes((32, 32, 3))['params']
  assert again['head']['bias'].shape == (3,)
  longer = model.shapes((64, 32, 3))['params']['Transformer']
  assert longer['posembed_input']['pos_embedding'].shape == (1, 9, 32)


def test_gelus():
  x = np.linspace(-5, 5, 101).astype(np.float32)
  exact = x * 0.5 * (1 + erf(x.astype(np.float64) / np.sqrt(2)))
  np.testing.assert_allclose(layers.ACTIVATIONS['gelu_erf'](x), exact, atol=1e-6)
  tanh = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
  np.testing.assert_allclose(layers.ACTIVATIONS['gelu_tanh'](x), tanh, atol=1e-6)
  with pytest.raises(UserError, match=naming('gelu_tan', 'gelu_tanh')):
    layers.MlpBlock(4, act='gelu_tan').init(jax.random.key(0), normal(1, 2))


def test_positions_are_added_before_every_block_but_the_first():
  images, table = normal(2, 16, 16, 3), jnp.asarray(normal(1, 4, 8))

  def tokens(**more):
    fields = dict(width=8, depth=3, num_heads=2, mlp_dim=16, classifier='gap')
    return models.build('vit', patch_size=(8, 8), num_classes=None, **fields, **more)

  def run(model, params):
    _, out = jax.jit(model.apply)({'params': params}, images)
    return out['encoded']

  def intercept(call, args, kwargs, context):
    if isinstance(context.module, vit.EncoderBlock) and context.module.name[-1] != '0':
      args = (args[0] + table, *args[1:])
    return call(*args, **kwargs)

  params = trees.unflatten(tuning.random(tokens().shapes((16, 16, 3))['params']))
  params['Transformer']['posembed_input']['pos_embedding'] = table
  with nn.intercept_methods(intercept):
    expected = run(tokens(), params)
  assert np.abs(expected - run(tokens(), params)).max() > 0.1
  shared = run(tokens(posemb_where='shared'), params)
  scanned = run(tokens(posemb_where='shared', scan=True), stacked(params, 3))
  # Layer norms in float32, of three programs.
  np.testing.assert_allclose(shared, expected, atol=1e-6)
  np.testing.assert_allclose(scanned, expected, atol=1e-6)


def test_rates_of_stochastic_depth_grow_linearly_in_every_block(monkeypatch):
  assert depth_rates(0.3, 4) == pytest.approx([0.0, 0.1, 0.2, 0.3])
  rates = []

  def record(self, x, rate, *, train):
    rates.append(rate if train else None)
    return x

  monkeypatch.setattr(StochasticDepth, '__call__', record)
  model = models.build('vit:mu/8', depth=3, stochastic_depth=0.4)
  rngs = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
  images = jnp.zeros((1, 16, 16, 3))
  jax.eval_shape(lambda: model.init(rngs, images, train=True))
  # Attention and MLP of block i have the share i / (L - 1) of the rate.
  assert rates == [0.0, 0.0, 0.2, 0.2, 0.4, 0.4]


def test_stochastic_depth_keeps_the_expectation():
  x = np.ones((20_000, 2), np.float32)
  module, key = StochasticDepth(), {'dropout': jax.random.key(0)}
  y = np.asarray(module.apply({}, x, 0.25, train=True, rngs=key))
  assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
  assert (y[:, 0] == y[:, 1]).all()  # a whole example is dropped
  # Five deviations: sqrt(0.25 / 0.75 / 20000) = 0.004.
  assert abs(y.mean() - 1) < 0.02
  np.testing.assert_array_equal(module.apply({}, x, 0.25), x)
