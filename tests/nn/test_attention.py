"""Attention against closed forms, and what platforms make of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.derivatives import RNG, assert_same_derivatives, normal
from vit_jax.kernels import attention
from vit_jax.kernels.attention import attend, softmax, weighted_average


@pytest.mark.parametrize('how', ['plain', 'weights', 'bias', 'mask'])
def test_attention_in_float64(how):
  q, k, v = normal(2, 3, 4, 8), normal(2, 5, 4, 8), normal(2, 5, 4, 8)
  calls, options = [], {}
  scores = np.einsum('bnmd,bsmd->bmns', *(x.astype(np.float64) for x in (q, k)))
  scores /= np.sqrt(8)
  if how == 'weights':
    options['on_weights'] = calls.append
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
  for result in calls:
    np.testing.assert_allclose(result, weights, atol=1e-6)
  assert len(calls) == (how == 'weights')


def test_derivatives_of_softmax():
  ours = lambda x: softmax(x, jnp.float32)
  assert_same_derivatives(ours, jax.nn.softmax, normal(3, 4, 5))
  _, pullback = jax.vjp(lambda x: softmax(x, jnp.bfloat16), normal(3, 5))
  assert [x.dtype for x in jax.tree.leaves(pullback) if x.ndim] == [jnp.bfloat16]


def test_cpus_divide_last_where_no_derivative_is_taken():
  plain = lambda scores, value: jax.nn.softmax(scores) @ value
  scores, value = normal(2, 3, 4, 5), normal(2, 3, 5, 8)
  assert_same_derivatives(weighted_average, plain, scores, value)
  for x in (scores, 1e4 * scores):  # e to the last is infinite
    result = weighted_average(x, value)
    np.testing.assert_allclose(result, plain(x, value), atol=1e-6)  # float32

  def divided(fn, platform):
    lowered = jax.jit(fn).trace(scores, value).lower(lowering_platforms=(platform,))
    (line,) = (x for x in lowered.as_text().splitlines() if 'stablehlo.divide' in x)
    return line.rpartition('tensor<')[2]

  assert divided(weighted_average, 'cpu') == '2x3x4x8xf32>'
  assert divided(weighted_average, 'tpu') == '2x3x4x5xf32>'
  forward = lambda *args: jax.vjp(weighted_average, *args)[0]
  assert divided(forward, 'cpu') == '2x3x4x5xf32>'


def test_attention_of_a_platform_is_chosen_when_lowered(monkeypatch):
  monkeypatch.setattr(attention, 'cudnn', lambda q, k, v: jnp.cbrt(v))
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
  theirs, calls = jax.nn.dot_product_attention, []

  def xla(query, key, *args, implementation, **kwargs):
    assert implementation == 'cudnn'
    calls.append((query.shape[1], key.shape[1]))
    return theirs(query, key, *args, implementation='xla', **kwargs)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', xla)
  N, S = lengths
  arrays = normal(2, N, 3, 8), normal(2, S, 3, 8), normal(2, S, 3, 8)
  results = []
  for function in (attention.cudnn, attention._plain):

    def derived(*arrays, function=function):
      y, pullback = jax.vjp(function, *arrays)
      return y, *pullback(jnp.cos(y))

    results.append(jax.jit(derived)(*arrays))
  for result, expected in zip(*results, strict=True):
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, atol=1e-5)  # float32
  assert calls == [(N + N % 2, S + S % 2)]
  calls.clear()  # Without a derivative it takes any length.
  result = jax.jit(attention.cudnn)(*arrays)
  np.testing.assert_allclose(result, attention._plain(*arrays), atol=1e-5)
  assert calls == [lengths]


def test_attention_is_jax_s_own_in_bfloat16():
  q, k, v = (jnp.asarray(normal(2, 6, 4, 16), jnp.bfloat16) for _ in range(3))
  result = attend(q, k, v)
  expected = jax.nn.dot_product_attention(q, k, v, implementation='xla')
  assert result.dtype == jnp.bfloat16
  # One bfloat16 step of numbers near 1 is 0.8 %.
  np.testing.assert_allclose(
    result.astype(np.float32), expected.astype(np.float32), atol=0.016
  )
