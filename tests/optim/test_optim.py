"""Schedules and updates against the reference code's numbers and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import naming
from vit_jax import optim
from vit_jax.errors import UserError

STEPS = (0, 1, 5, 10, 50, 95, 99, 100)
# Printed by the reference code, 100 steps, warmup 10: google-research/vision_transformer
# (base 0.03, linear end 1e-5) and big_vision (base 1).
REFERENCE = [
  (0.03, dict(decay='cosine'), (0, 0.003, 0.015, 0.03, 0.01760472, None, 9.14e-6, 0)),
  (
    0.03,
    dict(decay='linear', end=1e-5 / 0.03),
    (0, 0.003, 0.015, 0.03, 0.01667111, None, 0.00034322, 1e-5),
  ),
  (1.0, dict(decay='cosine'), (0, 0.1, 0.5, 1, 0.58682406, 0.00759614, 0.00030458, 0)),
  (
    1.0,
    dict(decay='linear', end=1e-5),
    (0, 0.1, 0.5, 1, 0.55556005, 0.05556503, 0.01112103, 1e-5),
  ),
  (
    1.0,
    dict(decay='rsqrt', timescale=20, cooldown=10),
    (0, 0.1, 0.5, 1, 0.57735026, 0.21821788, 0.0428353, 0),
  ),
]


@pytest.mark.parametrize(('lr', 'options', 'expected'), REFERENCE)
def test_schedules_are_the_reference_code_s(lr, options, expected):
  rate = optim.make_schedule(lr, 100, warmup=10, **options)
  for step, value in zip(STEPS, expected, strict=True):
    if value is not None:
      # The reference is printed to 6 to 8 digits; float32 cosines near their zero.
      np.testing.assert_allclose(rate(step), value, rtol=1e-5, atol=3e-8)


@pytest.mark.parametrize(
  'ends', [(100, 200, 300, 400, 500), (500, 3000, 6000, 9000, 10_000)]
)
def test_multistep_is_the_schedule_of_bit(ends):
  def reference(step):  # as BiT's code says it: drops after these steps
    if step < ends[0]:
      return 0.003 * step / ends[0]
    return 0.003 * 0.1 ** sum(step > end for end in ends[1:-1])

  warmup, *drops, total = ends
  at = [(step - warmup) / (total - warmup) for step in drops]
  rate = optim.make_schedule(0.003, total, decay='multistep', warmup=warmup, at=at)
  for step in (0, 1, *(end + d for end in ends for d in (-1, 0, 1) if end + d < total)):
    np.testing.assert_allclose(rate(step), reference(step), rtol=1e-5)


def test_warmup_and_cooldown_must_fit():
  with pytest.raises(ValueError, match=naming('warmup', 11, 10)):
    optim.make_schedule(1.0, 10, warmup=11)
  rate = optim.make_schedule(1.0, 10, warmup=0.2, decay='constant')
  assert [float(rate(step)) for step in range(4)] == [0, 0.5, 1, 1]


def test_an_epoch_wise_cosine_is_pytorch_s():
  # CosineAnnealingLR(T_max=4), stepped once an epoch of 5 steps: printed by torch 2.
  rate = optim.make_schedule(1.0, 20, staircase=4)
  expected = np.repeat([1.0, 0.85355339, 0.5, 0.14644661], 5)
  np.testing.assert_allclose([rate(n) for n in range(20)], expected, rtol=1e-6)
  held = optim.make_schedule(1.0, 20, staircase=4, decay_until=0.5)
  expected = np.repeat([1.0, 0.85355339, 0.5, 0.5], 5)
  np.testing.assert_allclose([held(n) for n in range(20)], expected, rtol=1e-6)


def step(optimizer, params, grads, state, n):
  updates, state = optimizer.tx.update(grads, state, params, rate=optimizer.rate(n))
  return optax.apply_updates(params, updates), state


PARAMS = {
  'dense': {'kernel': jnp.array([1.0, -2.0]), 'bias': jnp.array([3.0])},
  'norm': {'scale': jnp.array([4.0])},
}
GRADS = {
  'dense': {'kernel': jnp.array([0.5, 0.1]), 'bias': jnp.array([-0.2])},
  'norm': {'scale': jnp.array([0.3])},
}


def test_adamw_is_that_of_optax_with_kernels_decayed():
  ours = optim.build('adamw', 0.01, 100, schedule=dict(decay='constant'), wd=0.1)
  mask = {'dense': {'kernel': True, 'bias': False}, 'norm': {'scale': False}}
  theirs = optax.adamw(0.01, weight_decay=0.1, mask=mask)
  a, state_a = PARAMS, ours.tx.init(PARAMS)
  b, state_b = PARAMS, theirs.init(PARAMS)
  for n in range(3):
    a, state_a = step(ours, a, GRADS, state_a, n)
    updates, state_b = theirs.update(GRADS, state_b, b)
    b = optax.apply_updates(b, updates)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6)  # order of two products


def test_weight_decay_is_multiplied_by_the_rate():
  zeros = jax.tree.map(jnp.zeros_like, GRADS)
  optimizer = optim.build('sgd', 0.5, 10, schedule=dict(decay='constant'), wd=0.1)
  new, _ = step(optimizer, PARAMS, zeros, optimizer.tx.init(PARAMS), 0)
  # lr * wd of the kernel; big_vision's wd of 0.05 (= 0.1 * lr) would do the same.
  np.testing.assert_allclose(new['dense']['kernel'], PARAMS['dense']['kernel'] * 0.95)
  np.testing.assert_array_equal(new['dense']['bias'], PARAMS['dense']['bias'])


def test_sgd_with_momentum_and_clip_by_hand():
  optimizer = optim.build('sgd', 1.0, 10, schedule=dict(decay='constant'), clip=1.0)
  grads = {'kernel': jnp.array([3.0, 4.0])}  # norm 5, clipped to (0.6, 0.8)
  params = {'kernel': jnp.zeros(2)}
  state = optimizer.tx.init(params)
  params, state = step(optimizer, params, grads, state, 0)
  params, state = step(optimizer, params, grads, state, 1)
  # -(1 + (1 + 0.9)) * (0.6, 0.8)
  np.testing.assert_allclose(params['kernel'], [-1.74, -2.32], rtol=1e-6)


def test_groups_are_clipped_each_by_its_norm():
  grads = {'a': {'x': jnp.array([3.0]), 'y': jnp.array([4.0])}, 'b': jnp.array([0.5])}
  params = jax.tree.map(jnp.zeros_like, grads)
  options = dict(schedule=dict(decay='constant'), clip=1.0, momentum=0.0)
  optimizer = optim.build('sgd', 1.0, 10, clip_by='(a)?.*', **options)
  new, _ = step(optimizer, params, grads, optimizer.tx.init(params), 0)
  expected = {'a': {'x': [-0.6], 'y': [-0.8]}, 'b': [-0.5]}
  for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)  # the norm + 1e-6
  optimizer = optim.build('sgd', 1.0, 10, clip_by='(a).*', **options)
  with pytest.raises(UserError, match=naming('clip_by', "'b'")):
    step(optimizer, params, grads, optimizer.tx.init(params), 0)


def test_late_parameters_wait():
  options = dict(schedule=dict(decay='constant'), lr_starts=[('.*bias', 0.5)])
  optimizer = optim.build('sgd', 1.0, 10, momentum=0.0, **options)
  state = optimizer.tx.init(PARAMS)
  for n, bias in ((4, 0.0), (5, 0.2)):
    updates, _ = optimizer.tx.update(GRADS, state, PARAMS, rate=1.0, step=n)
    np.testing.assert_allclose(updates['dense']['bias'], [bias])
    np.testing.assert_allclose(updates['norm']['scale'], [-0.3])
