"""One training step: meshes, accumulation, non-finite values, EMA."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models, optim, sharding, trees
from vit_jax.tasks.classify import Classify
from vit_jax.train.step import gradients, init_state, make_step, zero_masked

SPEC = {
  'image': jax.ShapeDtypeStruct((16, 16, 16, 3), jnp.float32),
  'label': jax.ShapeDtypeStruct((16,), jnp.int32),
  'mask': jax.ShapeDtypeStruct((16,), jnp.float32),
}


def batch(seed=0):
  rng = np.random.default_rng(seed)
  return {
    'image': rng.uniform(-1, 1, SPEC['image'].shape).astype(np.float32),
    'label': rng.integers(0, 5, 16).astype(np.int32),
    'mask': (np.arange(16) != 3).astype(np.float32),
  }


def setup(model, task, **section):
  section = dict(name='adamw', lr=1e-3, schedule=dict(decay='constant')) | section
  return Classify(model, SPEC, **task), optim.build(**section, total_steps=10)


@functools.cache
def first_state(task, optimizer):
  """Returns the state at step 0, on the host: compiled once for all meshes."""
  init = jax.jit(lambda: init_state(task, optimizer, SPEC, jax.random.key(0), {}))
  return jax.device_get(init())


def run(task, optimizer, batches, mesh):
  """Returns (state, loss of each step) after training on a mesh."""
  with jax.set_mesh(mesh):
    state = first_state(task, optimizer)
    shardings = sharding.state_shardings(state, mesh, 'fsdp_tensor')
    step = jax.jit(
      make_step(task, optimizer, lambda batch: batch, jax.random.key(0)),
      donate_argnums=0,
      out_shardings=(shardings, sharding.replicated_sharding(mesh)),
    )
    state = jax.device_put(state, shardings)
    losses = []
    for one in batches:
      state, metrics = step(state, sharding.global_batch(one, mesh))
      losses.append(float(metrics['loss']))
  return state, losses


# One device, and all three axes at once; then the axes apart, and 2, 4 and 8 devices.
MESHES = [(1, 1, 1), (2, 2, 2)]
MORE_MESHES = [(1, 1, 1), (2, 1, 1), (8, 1, 1), (1, 8, 1), (1, 2, 2), (1, 4, 2)]


@pytest.mark.parametrize(
  'meshes', [MESHES, pytest.param(MORE_MESHES, marks=pytest.mark.faults)]
)
def test_meshes_train_alike(meshes):
  fields = dict(depth=2, width=128, mlp_dim=512, dropout=0.1, stochastic_depth=0.1)
  task, optimizer = setup(
    models.build('vit', 'mu/8', num_classes=5, scan=True, **fields),
    dict(mixup=0.5, mixup_mode='example', label_smoothing=0.1),
    wd=0.1,
    clip=1.0,
    ema=0.9,
  )
  results = []
  for shape in meshes:
    devices = jax.devices()[: np.prod(shape)]
    mesh = sharding.make_mesh(*shape, devices=devices)
    state, losses = run(task, optimizer, [batch(0), batch(1)], mesh)
    kernel = state.params['Transformer']['encoderblock']['MlpBlock_0']['Dense_0']
    _, fsdp, tensor = shape
    local = kernel['kernel'].sharding.shard_shape((2, 128, 512))
    assert local == (2, 128 // fsdp, 512 // tensor)
    results.append((losses, jax.device_get(state.params)))
  losses, params = results[0]
  for other_losses, other in results[1:]:
    # Sums over 16 examples and 512 hidden units, split 8 ways: float32 rounding.
    np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
    for name, leaf in trees.flatten(other).items():
      # Adam divides by the gradient's size: where that is rounding itself, as for a
      # key's bias, which softmax does not see, steps of lr 1e-3 go anywhere.
      if not name.endswith('key/bias'):
        np.testing.assert_allclose(
          leaf, trees.flatten(params)[name], atol=1e-5, err_msg=name
        )


def test_micro_batches_add_up_with_keys_of_their_own():
  x, key = np.arange(8, dtype=np.float32), jax.random.key(1)

  def loss(params, stats, batch, key):
    value, noise = jnp.sum(batch['x'] * params['w'] ** 2), jax.random.normal(key)
    stats = {'last': 2 * stats['last'] + batch['x'].sum()}
    return value, ({'loss': value, 'noise': noise}, stats)

  args = loss, {'w': jnp.float32(3)}, {'last': jnp.float32(1)}, {'x': x}, key
  whole, parts = gradients(*args, 1), gradients(*args, 4)
  for metrics, grads, _ in (whole, parts):
    assert (metrics['loss'], grads['w']) == (9 * x.sum(), 6 * x.sum())
  noise = [float(jax.random.normal(jax.random.fold_in(key, i))) for i in range(4)]
  assert whole[0]['noise'] == jax.random.normal(key)
  # Dropout draws so, too.
  assert parts[0]['noise'] == pytest.approx(sum(noise), rel=1e-6)
  # Running statistics go through the micro-batches in turn: 0 and 4, 1 and 5, ...
  last = 1
  for i in range(4):
    last = 2 * last + x[i] + x[i + 4]
  assert (whole[2]['last'], parts[2]['last']) == (2 + x.sum(), last)


class Linear(nn.Module):
  """The smallest model: what a step does around it is the same for all."""

  num_classes: int = 5

  @nn.compact
  def __call__(self, images, train=False, features=True):
    return nn.Dense(5, name='head')(images.reshape(len(images), -1)), {}


@functools.cache
def mixed(**section):
  """Returns (step, state at step 0) of a run that mixes, on one device."""
  task, optimizer = setup(Linear(), dict(mixup=0.5), **section)
  step = make_step(task, optimizer, lambda batch: batch, jax.random.key(0))
  return jax.jit(step), first_state(task, optimizer)


def averaging():
  """Returns (step, state): one program for the tests below."""
  return mixed(ema=0.9, wd=0.1)


def assert_equal(a, b):
  for name, leaf in trees.flatten(a).items():
    np.testing.assert_array_equal(leaf, trees.flatten(b)[name], err_msg=name)


def counters(state) -> dict[str, int]:
  return {key: int(value) for key, value in state.counters.items()}


def test_the_content_of_a_masked_example_reaches_nothing():
  step, state = averaging()
  other = batch()
  # Mixing would hand its pixels to example 4, and 0 * nan is nan.
  other['image'][3], other['label'][3] = np.nan, (other['label'][3] + 1) % 5
  results = step(state, batch()), step(state, other)
  assert_equal(*results)
  assert counters(results[1][0])['skipped'] == 0


def test_bytes_of_a_masked_example_are_zero():
  image = np.arange(12, dtype=np.uint8).reshape(3, 2, 2, 1) + 1
  mask = np.array([1, 0, 1], np.float32)
  out, _ = zero_masked({'image': image, 'label': np.arange(3), 'mask': mask})
  np.testing.assert_array_equal(
    out['image'], image * mask.astype(int)[:, None, None, None]
  )
  assert out['image'].dtype == np.uint8
  np.testing.assert_array_equal(out['label'], np.arange(3))


def test_a_batch_without_examples_changes_nothing():
  step, before = averaging()
  state, metrics = step(before, {**batch(), 'mask': np.zeros(16, np.float32)})
  for field in ('params', 'opt_state', 'ema'):
    assert_equal(getattr(state, field), getattr(before, field))
  assert int(state.step) == 1
  assert counters(state) == {'skipped': 0, 'skipped_in_a_row': 0, 'masked': 16}
  assert (metrics['loss'], metrics['grad_norm']) == (0, 0)


def test_micro_batches_do_not_change_how_a_batch_is_mixed():
  step, state = averaging()
  _, whole = step(state, batch())
  step, _ = mixed(ema=0.9, wd=0.1, accum=4)
  _, parts = step(state, batch())
  for name, value in whole.items():
    # float32 sums over examples, regrouped; another draw moves the gradient by 1e-2.
    np.testing.assert_allclose(parts[name], value, rtol=1e-5, err_msg=name)


def test_each_step_draws_anew():
  step, state = averaging()
  later = dataclasses.replace(state, step=state.step + 1)
  norms = [step(one, batch())[1]['grad_norm'] for one in (state, later, state)]
  assert norms[0] == norms[2]
  assert abs(norms[1] - norms[0]) > 1e-3 * norms[0]


def test_a_non_finite_step_changes_nothing_but_the_counters():
  step, state = averaging()
  good, bad = batch(0), batch(1)
  bad['image'][0, 0, 0, 0] = np.nan
  before, _ = step(state, good)
  for count in (1, 2):
    state, metrics = step(before if count == 1 else state, bad)
    for field in ('params', 'opt_state', 'ema'):
      assert_equal(getattr(state, field), getattr(before, field))
    assert int(state.step) == 1 + count
    expected = {'skipped': count, 'skipped_in_a_row': count, 'masked': 1 + count}
    assert counters(state) == expected
    assert metrics['skipped_in_a_row'] == count
  recovered, _ = step(state, good)
  assert counters(recovered) == {'skipped': 2, 'skipped_in_a_row': 0, 'masked': 4}


def test_ema_is_the_moving_average():
  step, state = averaging()
  expected = state.params['head']['kernel']
  for i in range(2):
    state, _ = step(state, batch(i))
    expected = 0.9 * expected + 0.1 * state.params['head']['kernel']
  assert np.abs(expected - state.params['head']['kernel']).max() > 1e-4
  # Three float32 operations.
  np.testing.assert_allclose(state.ema['head']['kernel'], expected, atol=1e-7)
