"""Batch norms: what they compute, and their statistics in a step of training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming, tuning
from vit_jax import models, optim, sharding, trees, tune
from vit_jax.errors import UserError
from vit_jax.nn.batch_norm import BatchNorm


def draw(*shape):
  return np.random.default_rng(0).normal(3, 2, shape).astype(np.float32)


def variables():
  rng = np.random.default_rng(1)
  values = {k: rng.uniform(0.5, 1.5, 4) for k in ('scale', 'bias', 'mean', 'var')}
  values = {k: x.astype(np.float32) for k, x in values.items()}
  parts = (('params', ('scale', 'bias')), ('batch_stats', ('mean', 'var')))
  return {key: {k: values[k] for k in keys} for key, keys in parts}


def expected(x, mean, var, eps=1e-5):
  params = variables()['params']
  return (x - mean) / np.sqrt(var + eps) * params['scale'] + params['bias']


@pytest.mark.parametrize(('dtype', 'atol'), [('float32', 2e-6), ('bfloat16', 2e-2)])
def test_training_normalises_by_the_batch_and_averages_it(dtype, atol):
  x = draw(2, 3, 5, 4)
  x = x.astype(jnp.dtype(dtype))
  norm = BatchNorm(momentum=0.75, dtype=jnp.dtype(dtype))
  y, new = norm.apply(variables(), x, train=True, mutable=['batch_stats'])
  x = x.astype(np.float64)
  mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
  assert y.dtype == dtype
  np.testing.assert_allclose(
    np.asarray(y, np.float64), expected(x, mean, var), atol=atol
  )
  old, new = variables()['batch_stats'], new['batch_stats']
  # In float32 also where the images are not; the variance is that of a sample.
  np.testing.assert_allclose(
    new['mean'], 0.75 * old['mean'] + 0.25 * mean, rtol=0, atol=2e-6
  )
  var = x.var((0, 1, 2), ddof=1)
  np.testing.assert_allclose(new['var'], 0.75 * old['var'] + 0.25 * var, atol=4e-6)


def test_evaluation_normalises_by_the_running_statistics():
  x, stats = draw(2, 3, 5, 4), variables()['batch_stats']
  mean, var = stats['mean'], stats['var']
  y = BatchNorm().apply(variables(), x)
  np.testing.assert_allclose(y, expected(x, mean, var), atol=2e-6)
  y = BatchNorm(eps=0.1).apply(variables(), x)
  np.testing.assert_allclose(y, expected(x, mean, var, 0.1), atol=2e-6)


def test_training_by_one_value_is_refused():
  with pytest.raises(UserError, match=naming('(1, 1, 1, 4)', 'larger')):
    BatchNorm().apply(variables(), draw(1, 1, 1, 4), train=True)


# -- a step of training -----------------------------------------------------------------


def resnet(method='full'):
  family = models.family('resnet')
  model = models.build('resnet', num_classes=5, **family.tiny[0])
  return tune.attach(model, family, (32, 32, 3), method=method)


BATCH = tuning.batch_of(8, 32)


def one_step(method='full', mesh=None):
  """Returns the states before and after one step of SGD, from a head that is not zero."""
  optimizer = optim.build('sgd', 0.1, 10, momentum=0.9, ema=0.9)
  return tuning.steps(*resnet(method), optimizer, BATCH, number=1, mesh=mesh)[:2]


@functools.cache
def step():
  """Returns the states before and after one step on one device."""
  return one_step()


def test_statistics_are_those_of_the_whole_batch_on_two_devices():
  before, one = step()
  _, two = one_step(mesh=sharding.make_mesh(devices=jax.devices()[:2]))
  # The first convolution's output, of all eight images.
  kernel = before.params['stem']['conv']['kernel']
  x = jax.lax.conv_general_dilated(
    BATCH['image'],
    kernel,
    (2, 2),
    [(3, 3), (3, 3)],
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )
  stats = trees.flatten(one.batch_stats)
  mean, var = x.mean((0, 1, 2)), np.var(x, (0, 1, 2), ddof=1)
  np.testing.assert_allclose(stats['stem/norm/mean'], mean / 10, atol=1e-6)
  np.testing.assert_allclose(stats['stem/norm/var'], 0.9 + var / 10, atol=1e-6)
  for name, value in trees.flatten(two.batch_stats).items():
    np.testing.assert_allclose(value, stats[name], atol=1e-5, err_msg=name)


def test_an_average_has_averaged_statistics():
  before, after = step()
  average = after.average()
  assert average.variables().keys() == {'params', 'batch_stats'}
  for part in ('params', 'batch_stats'):
    states = (before.average(), after, average)
    old, new, averaged = (trees.flatten(getattr(state, part)) for state in states)
    assert averaged.keys() == new.keys()
    for name, value in averaged.items():
      np.testing.assert_allclose(
        value, 0.9 * old[name] + 0.1 * new[name], rtol=0, atol=1e-6, err_msg=name
      )


def test_norms_that_are_frozen_keep_their_statistics():
  before, after = one_step('partial')
  last = 'stage2_block_1/'
  old, new = (trees.flatten(state.batch_stats) for state in (before, after))
  moved = {name for name in new if np.any(old[name] != new[name])}
  assert moved == {name for name in new if name.startswith(last)}
  assert {
    name for name in trees.flatten(after.params) if not name.startswith(last)
  } == {'head/kernel', 'head/bias'}
