"""Layers against closed forms, and against what JAX derives of the plain formula."""

import functools

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from tests.support import naming
from tests.support.derivatives import assert_same_derivatives, normal
from tests.support.scanned import stacked
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.kernels.layer_norm import normalise
from vit_jax.nn import mlp, transformer
from vit_jax.nn.dense import Dense
from vit_jax.nn.layer_norm import LayerNorm
from vit_jax.nn.stack import StochasticDepth


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


@pytest.mark.slow
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
  first = models.shapes_of(model, (32, 32, 3))
  assert first['params']['head']['kernel'].shape == (32, 3)
  del first['params']['head']
  again = models.shapes_of(model, (32, 32, 3))['params']
  assert again['head']['bias'].shape == (3,)
  longer = models.shapes_of(model, (64, 32, 3))['params']['Transformer']
  assert longer['posembed_input']['pos_embedding'].shape == (1, 9, 32)


def test_gelus():
  x = np.linspace(-5, 5, 101).astype(np.float32)
  exact = x * 0.5 * (1 + erf(x.astype(np.float64) / np.sqrt(2)))
  np.testing.assert_allclose(mlp.ACTIVATIONS['gelu_erf'](x), exact, atol=1e-6)
  tanh = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
  np.testing.assert_allclose(mlp.ACTIVATIONS['gelu_tanh'](x), tanh, atol=1e-6)
  with pytest.raises(UserError, match=naming('gelu_tan', 'gelu_tanh')):
    mlp.MlpBlock(4, act='gelu_tan').init(jax.random.key(0), normal(1, 2))


class Tokens(nn.Module):
  """An encoder of 3 blocks for a grid of 2 x 2 tokens."""

  scan: bool = False

  @nn.compact
  def __call__(self, x):
    config = transformer.EncoderConfig(3, num_heads=2, mlp_dim=16, scan=self.scan)
    return transformer.Encoder(config, name='encoder')(x, (2, 2))


@pytest.mark.slow
def test_tokens_change_between_blocks():
  x, prompts = normal(2, 4, 8), jnp.asarray(normal(3, 2, 8))

  def run(between, scan=False, how=jax.jit):
    def intercept(call, args, kwargs, context):
      if isinstance(context.module, transformer.Encoder):
        kwargs = {**kwargs, 'between': between}
      return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
      return how(Tokens(scan).apply)(
        {'params': stacked(params, 3) if scan else params}, x
      )

  params = jax.jit(Tokens().init)(jax.random.key(0), x)['params']
  add = lambda i, x: x.at[:, :2].add(prompts[i])
  expected, _ = run(add)
  assert np.abs(expected - run(None)[0]).max() > 0.1
  np.testing.assert_allclose(run(add, scan=True)[0], expected, atol=1e-6)  # float32

  def insert(i, x):  # new prompts in place of those that went through the block before
    prompt = jnp.broadcast_to(prompts[i], (2, 2, 8))
    return jnp.concatenate([prompt, x[:, -4:]], axis=1)

  shapes = lambda apply: functools.partial(jax.eval_shape, apply)
  assert run(insert, how=shapes)[1]['block02'].shape == (2, 6, 8)
  with pytest.raises(UserError, match=naming('(2, 4, 8)', '(2, 6, 8)', 'scan')):
    run(insert, scan=True, how=shapes)


def test_stochastic_depth_keeps_the_expectation():
  x = np.ones((20_000, 2), np.float32)
  module, key = StochasticDepth(), {'dropout': jax.random.key(0)}
  y = np.asarray(module.apply({}, x, 0.25, train=True, rngs=key))
  assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
  assert (y[:, 0] == y[:, 1]).all()  # a whole example is dropped
  # Five deviations: sqrt(0.25 / 0.75 / 20000) = 0.004.
  assert abs(y.mean() - 1) < 0.02
  np.testing.assert_array_equal(module.apply({}, x, 0.25), x)
