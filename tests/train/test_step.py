"""One training step: meshes, accumulation, non-finite values, EMA."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models, optim, sharding, tasks, trees
from vit_jax.train.state import init_state
from vit_jax.train.step import gradients, make_step, without_masked

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


def setup(model=None, task=None, **section):
  fields = dict(num_classes=5, depth=2, width=128) | (model or {})
  model = models.build('vit', 'mu/8', **fields)
  task = tasks.build('classify', model, SPEC, **(task or {}))
  section = dict(name='adamw', lr=1e-3, schedule=dict(decay='constant')) | section
  return task, optim.build(**section, total_steps=10)


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
      out_shardings=(shardings, sharding.replicated(mesh)),
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
  task, optimizer = setup(
    dict(dropout=0.1, stochastic_depth=0.1, scan=True, remat='full', mlp_dim=512),
    dict(mixup=0.5, cutmix=1.0, mixup_mode='example', label_smoothing=0.1),
    wd=0.1,
    clip=1.0,
    ema=0.9,
  )
  results = []
  for shape in meshes:
    devices = jax.devices()[: np.prod(shape)]
    mesh = sharding.make_mesh(*shape, devices=devices)
    state, losses = run(task, optimizer, [batch(i) for i in range(3)], mesh)
    kernel = state.params['Transformer']['encoderblock']['MlpBlock_0']['Dense_0']
    assert kernel['kernel'].sharding.shard_shape((2, 128, 512)) == (
      2,
      128 // shape[1],
      512 // shape[2],
    )
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


SMALL = dict(depth=1, width=32, mlp_dim=32)


def first_variables(task):
  return jax.jit(lambda: task.init(jax.random.key(0), SPEC))()


def weighted(b, task):
  b = {**b, 'weight': b['mask'] / b['mask'].sum()}
  return task.prepare(b, jax.random.key(0))


@functools.partial(jax.jit, static_argnums=(0, 3))
def gradients_of(task, variables, batch, accum):
  loss = lambda params, stats, *args: task.loss({'params': params}, *args)
  args = weighted(batch, task), jax.random.key(1), accum
  metrics, grads, stats = gradients(loss, variables['params'], {}, *args)
  assert stats == {}
  return metrics, grads


def test_micro_batches_add_up_to_the_batch():
  task, _ = setup(SMALL)
  variables = jax.tree.map(lambda x: x + 0.02, first_variables(task))
  whole, grads = gradients_of(task, variables, batch(), 1)
  parts, sums = gradients_of(task, variables, batch(), 4)
  np.testing.assert_allclose(parts['loss'], whole['loss'], rtol=1e-6)
  np.testing.assert_allclose(parts['accuracy'], whole['accuracy'], rtol=1e-6)
  scale = max(np.abs(g).max() for g in jax.tree.leaves(grads))
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(sums), strict=True):
    # float32 sums over examples, regrouped, through a block.
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)


def test_micro_batches_have_different_dropout_masks():
  task, _ = setup(dict(dropout=0.5, **SMALL))
  variables = first_variables(task)
  variables['params']['head']['kernel'] = jax.random.normal(jax.random.key(2), (32, 5))
  # Sixteen times one example: only the masks tell the micro-batches apart.
  same = {k: np.repeat(v[:1], 16, axis=0) for k, v in batch().items()}
  sixteen, _ = gradients_of(task, variables, same, 16)
  first, _ = gradients_of(task, variables, {k: v[:1] for k, v in same.items()}, 1)
  assert abs(sixteen['loss'] - first['loss']) > 1e-2


@functools.cache
def mixed(**section):
  """Returns (step, state at step 0) of a run that mixes, on one device."""
  task, optimizer = setup(SMALL, dict(mixup=0.5, cutmix=1.0), **section)
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
  out, _ = without_masked({'image': image, 'label': np.arange(3), 'mask': mask})
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
  params = []
  for accum in (1, 4):
    step, state = mixed(accum=accum, name='sgd', lr=0.1)
    params.append(trees.flatten(step(state, batch())[0].params))
  for name, leaf in params[1].items():
    # float32 sums over examples, regrouped, times the rate; another draw moves 5e-4.
    np.testing.assert_allclose(leaf, params[0][name], atol=1e-6, err_msg=name)


def test_each_step_draws_anew():
  step, state = averaging()
  later = dataclasses.replace(state, step=state.step + 1)
  norms = [step(one, batch())[1]['grad_norm'] for one in (state, later, state)]
  assert norms[0] == norms[2] != norms[1]


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


def test_the_losses_of_classify():
  loss_of = lambda task, *args: jax.jit(task.loss)(*args, jax.random.key(0))
  task, _ = setup(dict(head_bias_init=-2.2, **SMALL), dict(loss='sigmoid'))
  loss, _ = loss_of(task, first_variables(task), weighted(batch(), task))
  # The head starts at its bias: four classes out, one in, each a sigmoid.
  expected = 4 * math.log1p(math.exp(-2.2)) + math.log1p(math.exp(2.2))
  assert loss == pytest.approx(expected, rel=1e-6)  # float32
  # Several labels per image.
  task, _ = setup(SMALL)
  variables = first_variables(task)
  variables['params']['head']['bias'] = jnp.array([0.0, 0, 9, 0, 0])
  labels = np.zeros((16, 5), np.float32)
  labels[:, [1, 2]] = 0.5
  one = weighted({**batch(), 'label': labels}, task)
  loss, (metrics, _) = loss_of(task, variables, one)
  assert metrics['accuracy'] == pytest.approx(1.0)
  # Half of ln(sum exp) - 9 ~ 0, half of ln(sum exp) - 0 ~ 9.
  assert loss == pytest.approx(4.5, abs=1e-3)
