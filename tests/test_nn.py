"""Layers against closed forms, and against what JAX derives of the plain formula."""

import functools
import re

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import naming
from scanned import stacked
from scipy.special import erf

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.kernels import attention, patches
from vit_jax.kernels import dense as kernels_dense
from vit_jax.kernels.attention import attend, softmax
from vit_jax.kernels.dense import dense
from vit_jax.kernels.layer_norm import normalise
from vit_jax.nn import mlp, transformer
from vit_jax.nn.dense import Dense
from vit_jax.nn.layer_norm import LayerNorm
from vit_jax.nn.stack import StochasticDepth

RNG = np.random.default_rng(0)


def normal(*shape):
  return RNG.normal(size=shape).astype(np.float32)


def test_layer_norm_in_float64():
  # A mean far from 0 is where a one-pass variance loses its digits.
  x = normal(5, 7, 16) * 3 + 50
  wide = x.astype(np.float64)
  centred = wide - wide.mean(-1, keepdims=True)
  expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
  # float32 of numbers near 50: 4e-6 each, over a deviation of 3.
  np.testing.assert_allclose(normalise(x, 1e-6), expected, atol=2e-5)


def assert_same_derivatives(ours, plain, *args):
  """Of `ours` and of what JAX derives of `plain`: forward, reverse, one in the other."""
  weight = normal(*plain(*args).shape)
  tangents = tuple(normal(*x.shape) for x in args)
  every = tuple(range(len(args)))

  def derivatives(fn):
    loss = lambda *args: (jnp.sin(fn(*args)) * weight).sum()
    forward = jax.jvp(fn, args, tangents)
    return forward, jax.jvp(jax.grad(loss, every), args, tangents)

  both = (
    jax.tree.leaves(jax.jit(derivatives, static_argnums=0)(f)) for f in (ours, plain)
  )
  for a, b in zip(*both, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)  # float32, sums of hundreds


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


def test_derivatives_of_patches():
  assert_same_derivatives(
    patches.embed, patches._convolved, *(normal(*shape) for shape in PATCHES)
  )


def test_patches_are_a_convolution_on_tpus():
  def text(platform):
    loss = lambda *args: jnp.sin(patches.embed(*args)).sum()
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in PATCHES]
    step = jax.jit(jax.grad(loss, (1, 2))).trace(*args)
    return step.lower(lowering_platforms=(platform,)).as_text()

  # The image, twice, is read as it lies in memory.
  assert text('tpu').count('stablehlo.convolution') == 2
  assert 'stablehlo.transpose' not in text('tpu')
  for platform in ('cpu', 'cuda'):
    assert 'stablehlo.convolution' not in text(platform)


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


@pytest.mark.parametrize('how', ['plain', 'weights', 'bias', 'mask'])
def test_attention_in_float64(how):
  q, k, v = normal(2, 3, 4, 8), normal(2, 5, 4, 8), normal(2, 5, 4, 8)
  seen, options = [], {}
  scores = np.einsum('bnmd,bsmd->bmns', *(x.astype(np.float64) for x in (q, k)))
  scores /= np.sqrt(8)
  if how == 'weights':
    options['on_weights'] = seen.append
  elif how == 'bias':
    options['bias'] = normal(1, 4, 3, 5)
    scores += options['bias']
  elif how == 'mask':
    options['mask'] = RNG.random((2, 1, 3, 5)) < 0.5
    options['mask'][..., 0] = True
    scores = np.where(options['mask'], scores, -np.inf)
  y = attend(q, k, v, **options)
  weights = np.exp(scores)
  weights /= weights.sum(-1, keepdims=True)
  expected = np.einsum('bmns,bsmd->bnmd', weights, v)
  np.testing.assert_allclose(y, expected, atol=1e-6)  # float32
  for found in seen:
    np.testing.assert_allclose(found, weights, atol=1e-6)
  assert len(seen) == (how == 'weights')


def test_derivatives_of_softmax():
  ours = lambda x: softmax(x, jnp.float32)
  assert_same_derivatives(ours, jax.nn.softmax, normal(3, 4, 5))
  _, pullback = jax.vjp(lambda x: softmax(x, jnp.bfloat16), normal(3, 5))
  assert [x.dtype for x in jax.tree.leaves(pullback) if x.ndim] == [jnp.bfloat16]


def test_attention_of_a_platform_is_chosen_when_lowered(monkeypatch):
  monkeypatch.setattr(attention, '_has_cudnn', lambda: True)
  monkeypatch.setattr(attention, '_cudnn', lambda q, k, v: jnp.cbrt(v))
  x = jax.ShapeDtypeStruct((2, 6, 4, 16), jnp.bfloat16)
  loss = lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum()
  step = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x)
  texts = {
    p: step.lower(lowering_platforms=(p,)).as_text() for p in ('cpu', 'tpu', 'cuda')
  }
  assert 'cbrt' in texts['cuda']
  assert 'dot_general' not in texts['cuda']
  for platform in ('cpu', 'tpu'):
    assert 'cbrt' not in texts[platform]
    assert 'dot_general' in texts[platform]


@pytest.mark.parametrize('lengths', [(5, 5), (4, 7), (5, 6), (4, 6)])
def test_the_kernel_of_gpus_is_given_even_lengths(lengths, monkeypatch):
  theirs, seen = jax.nn.dot_product_attention, []

  def xla(query, key, *args, implementation, **kwargs):
    assert implementation == 'cudnn'
    seen.append((query.shape[1], key.shape[1]))
    return theirs(query, key, *args, implementation='xla', **kwargs)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', xla)
  N, S = lengths
  arrays = normal(2, N, 3, 8), normal(2, S, 3, 8), normal(2, S, 3, 8)
  results = []
  for function in (attention._cudnn, attention._plain):

    def derived(*arrays, function=function):
      y, pullback = jax.vjp(function, *arrays)
      return y, *pullback(jnp.cos(y))

    results.append(jax.jit(derived)(*arrays))
  for found, expected in zip(*results, strict=True):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5)  # float32
  assert seen == [(N + N % 2, S + S % 2)]


@pytest.mark.slow
def test_attention_is_jax_s_own_in_bfloat16():
  q, k, v = (jnp.asarray(normal(2, 6, 4, 16), jnp.bfloat16) for _ in range(3))
  found = attend(q, k, v)
  expected = jax.nn.dot_product_attention(q, k, v, implementation='xla')
  assert found.dtype == jnp.bfloat16
  # One bfloat16 step of numbers near 1 is 0.8 %.
  np.testing.assert_allclose(
    found.astype(np.float32), expected.astype(np.float32), atol=0.016
  )


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
