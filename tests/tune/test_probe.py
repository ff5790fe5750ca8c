"""MAE's linear probe, batch norm and LARS, against the authors' code."""

import functools

import jax
import numpy as np
import optax
import pytest

from vit_jax import models, optim, tune
from vit_jax.tune.subsets import Norm

PROBE = dict(method='linear', batch_norm=True)


def logits_of(head, stats, features, train):
  """Returns (logits, statistics) of a head behind the norm."""
  dense = lambda x: x @ head['kernel'] + head['bias']
  call = lambda norm: norm.layers(None, train)(None, 'head')(dense, features)
  return Norm().apply({'batch_stats': stats}, method=call, mutable=['batch_stats'])


def test_three_steps_are_those_of_the_authors(golden):
  golden = golden('mae_linear_probe')
  head = {'kernel': golden['weight'].T, 'bias': golden['bias']}
  stats = {'norm': {'mean': np.zeros(12), 'var': np.ones(12)}}
  schedule = {'decay': 'constant'}
  optimizer = optim.build('lars', golden['lr'], 3, schedule=schedule)
  state = optimizer.tx.init(head)

  @functools.partial(jax.value_and_grad, has_aux=True)
  def measure(head, stats, features, labels):
    logits, updated = logits_of(head, stats, features, True)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, updated['batch_stats']

  for i in range(3):
    batch = golden['features'][i], golden['labels'][i]
    (loss, stats), grads = measure(head, stats, *batch)
    updates, state = optimizer.tx.update(grads, state, head, rate=golden['lr'])
    head = optax.apply_updates(head, updates)
    # Those of the goldens' README: losses 1e-5 relative, parameters 1e-4.
    assert loss == pytest.approx(golden['losses'][i], rel=1e-5)
    np.testing.assert_allclose(head['kernel'].T, golden['weights'][i], atol=1e-4)
    np.testing.assert_allclose(head['bias'], golden['biases'][i], atol=1e-4)
  for key in ('mean', 'var'):
    expected = golden[f'running_{key}']
    np.testing.assert_allclose(stats['norm'][key], expected, rtol=1e-5, atol=1e-6)
  features, expected = golden['features'][3], golden['eval_logits']
  logits, _ = logits_of(head, stats, features, False)
  np.testing.assert_allclose(logits, expected, atol=1e-4)

  # Other formats get a head that includes the norm.
  flat = {f'head/{key}': np.asarray(x) for key, x in head.items()}
  flat |= {f'batch_stats/tune/norm/{key}': x for key, x in stats['norm'].items()}
  merged = tune.build(**PROBE).merge_added(flat)
  assert merged.keys() == {'head/kernel', 'head/bias'}
  logits = features @ merged['head/kernel'] + merged['head/bias']
  np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_the_norm_stands_before_the_head():
  model = models.build('vit', num_classes=5, **models.family('vit').tiny[0])
  tuned, rules = tune.attach(model, model.family, (16, 16, 3), **PROBE)
  images = jax.random.normal(jax.random.key(0), (4, 16, 16, 3))
  variables = tuned.init(jax.random.key(1), images)
  variables['params']['head']['kernel'] = np.eye(32, 5, dtype=np.float32)
  trained, _ = tune.partition(variables['params'], rules)
  assert trained.keys() == {'head'}
  call = dict(train=True, mutable=['batch_stats'])
  (logits, out), _ = tuned.apply(variables, images, **call)
  x = out['pre_logits']
  np.testing.assert_allclose(
    logits, ((x - x.mean(0)) / np.sqrt(x.var(0) + 1e-6))[:, :5], atol=1e-4
  )
