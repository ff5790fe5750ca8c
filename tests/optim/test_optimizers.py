"""Every optimizer against formulas of its paper, written out in NumPy, or optax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optim.test_layer_decay import vit_params
from tests.support import naming
from vit_jax import models, optim, sharding, trees
from vit_jax.errors import UserError
from vit_jax.optim import averages, optimizers

BLOCK = 'Transformer/encoderblock_0/'
ATTENTION = f'{BLOCK}MultiHeadDotProductAttention_0/'
SHAPES = {
  'embedding/kernel': (4, 4, 3, 32),
  f'{ATTENTION}query/kernel': (32, 4, 8),
  f'{ATTENTION}out/kernel': (4, 8, 32),
  f'{BLOCK}MlpBlock_0/Dense_0/kernel': (32, 64),
  f'{BLOCK}MlpBlock_0/Dense_0/bias': (64,),
  'head/kernel': (32, 10),
}


def tree(seed):
  rng = np.random.default_rng(seed)
  flat = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
  return jax.tree.map(jnp.asarray, trees.unflatten(flat))


VIT = models.family('vit')
PARAMS = tree(0)
GRADS = [tree(1), tree(2), tree(3)]


def built(name, lr=0.01, **section):
  section = dict(schedule=dict(decay='constant')) | section
  return optim.build(name, lr, 10, family=VIT, **section)


def run(optimizer, params=PARAMS, grads=GRADS):
  """Returns {name: value} of the params after each step."""
  state, out, update = optimizer.tx.init(params), [], jax.jit(optimizer.tx.update)
  for n, g in enumerate(grads):
    updates, state = update(g, state, params, rate=optimizer.rate(n))
    params = optax.apply_updates(params, updates)
    out.append({k: np.asarray(v) for k, v in trees.flatten(params).items()})
  return out


def series(name, array=np.asarray):
  """Returns a parameter and its gradients in float64."""
  values = [trees.flatten(t)[name] for t in (PARAMS, *GRADS)]
  start, *grads = (array(np.asarray(v, np.float64)) for v in values)
  return start, grads


def test_adafactor_is_that_of_scaling_vision_transformers():
  out = run(built('adafactor', moment_dtype='float32'))

  def by_hand(name, factored, axes=None):
    p, grads = series(name)
    row = col = v = m = 0.0
    for t, g in enumerate(grads, 1):
      b2 = min(1 - t**-0.8, 0.999)
      square = g * g + 1e-30
      if factored:
        row = b2 * row + (1 - b2) * square.mean(axes[1], keepdims=True)
        col = b2 * col + (1 - b2) * square.mean(axes[0], keepdims=True)
        rms = np.sqrt(row * col / row.mean(axes[0], keepdims=True))
      else:
        v = b2 * v + (1 - b2) * square
        rms = np.sqrt(v)
      m = 0.9 * m + 0.1 * g / rms  # no bias correction
      p = p - 0.01 * m
    return p

  # float32 means of squares, over three steps.
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
  dense = f'{BLOCK}MlpBlock_0/Dense_0/kernel'
  close(out[-1][dense], by_hand(dense, True, (0, 1)))
  close(out[-1]['head/kernel'], by_hand('head/kernel', False))  # 10 < 32
  bias = f'{BLOCK}MlpBlock_0/Dense_0/bias'
  close(out[-1][bias], by_hand(bias, False))


def test_adafactor_s_second_moment_never_freezes():
  # 1 - t^-0.8 would pass 0.999 at step 5624 (0.001^-1.25).
  tx = built('adafactor', momentum=0.0).tx
  params = {'a': jnp.ones(1)}
  state = tx.init(params)
  state = jax.tree.map(lambda x: x + 10**6 if x.dtype == jnp.int32 else x, state)
  _, new = tx.update({'a': jnp.full(1, 2.0)}, state, params, rate=0.1)
  (v,) = (x for n, x in trees.flatten(new).items() if n.endswith('/v/a'))
  np.testing.assert_allclose(v, 0.001 * 4, rtol=1e-4)  # 1 - 0.999 in float32


def test_adafactor_keeps_little():
  state = trees.flatten(built('adafactor').tx.init(PARAMS))
  name = f'{BLOCK}MlpBlock_0/Dense_0/kernel'
  kept = {n: x for n, x in state.items() if n.endswith(name)}
  assert sorted(x.size for x in kept.values()) == [1, 32, 64, 32 * 64]
  (momentum,) = (x for x in kept.values() if x.size == 32 * 64)
  assert momentum.dtype == jnp.bfloat16


def test_lion_by_hand():
  p, grads = series('head/kernel')
  out = run(built('lion', wd=0.1))
  m = 0.0
  for n, g in enumerate(grads):
    p = p - 0.01 * (np.sign(0.9 * m + 0.1 * g) + 0.1 * p)
    m = 0.99 * m + 0.01 * g
    np.testing.assert_allclose(out[n]['head/kernel'], p, rtol=1e-5, atol=1e-6)


def test_lamb_is_that_of_optax():
  out = run(built('lamb', wd=0.1, wd_rules=[('.*', 1.0)]))
  params, tx = PARAMS, optax.lamb(0.01, weight_decay=0.1)
  state, update = tx.init(params), jax.jit(tx.update)
  for n, g in enumerate(GRADS):
    updates, state = update(g, state, params)
    params = optax.apply_updates(params, updates)
    for name, value in trees.flatten(params).items():
      np.testing.assert_allclose(out[n][name], value, rtol=1e-5, atol=1e-6)


def newton_schulz(g):
  """Five quintic iterations (K. Jordan 2024), on a [m, n] matrix."""
  x = g / np.linalg.norm(g)
  if transposed := x.shape[0] > x.shape[1]:
    x = x.T
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x.T if transposed else x


@pytest.mark.thorough
@pytest.mark.parametrize(
  ('name', 'matrix'),
  [
    (f'{ATTENTION}query/kernel', (32, 32)),
    (f'{ATTENTION}out/kernel', (32, 32)),
    (f'{BLOCK}MlpBlock_0/Dense_0/kernel', (32, 64)),
  ],
)
def test_muon_takes_attention_s_kernels_as_matrices(name, matrix):
  p, grads = series(name, lambda x: x.reshape(matrix))
  out = run(built('muon', wd=0.1))
  m = 0.0
  for t, g in enumerate(grads, 1):
    # Nesterov with bias correction, as optax has it.
    m = 0.95 * m + 0.05 * g
    ahead = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
    update = newton_schulz(ahead) * 0.2 * np.sqrt(max(matrix))
    p = p - 0.01 * (update + 0.1 * p)
    # Fifteen matrix products in float32.
    np.testing.assert_allclose(
      out[t - 1][name].reshape(matrix), p, rtol=1e-4, atol=1e-4
    )


def test_muon_leaves_the_rest_to_adam():
  muon, adam = run(built('muon')), run(built('adamw'))
  for name in ('embedding/kernel', 'head/kernel', f'{BLOCK}MlpBlock_0/Dense_0/bias'):
    np.testing.assert_array_equal(muon[-1][name], adam[-1][name])


def test_schedule_free_by_the_paper_s_equations():
  name = 'head/kernel'
  start, grads = series(name)
  optimizer = built('schedule_free', b1=0.9)
  x, z, v = start, start, 0.0
  params, state = PARAMS, optimizer.tx.init(PARAMS)
  update = jax.jit(optimizer.tx.update)
  for t, g in enumerate(grads, 1):
    point = trees.flatten(optimizer.gradient_point(params, state))[name]
    np.testing.assert_allclose(point, 0.1 * z + 0.9 * x, rtol=1e-5, atol=1e-6)
    updates, state = update(GRADS[t - 1], state, params, rate=optimizer.rate(t))
    params = optax.apply_updates(params, updates)
    v = 0.999 * v + 0.001 * g * g
    z = z - 0.01 * g / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    x = (1 - 1 / t) * x + z / t  # a constant rate: equal weights
    # x comes back from y and z by a division by 0.9.
    np.testing.assert_allclose(trees.flatten(params)[name], x, rtol=1e-5, atol=2e-6)


def test_schedule_free_takes_no_decay():
  with pytest.raises(
    UserError, match=naming("decay='cosine'", 'schedule_free', 'constant')
  ):
    optim.build('schedule_free', 0.01, 10, schedule=dict(decay='cosine'))
  rate = optim.build('schedule_free', 0.01, 10, schedule=dict(warmup=5)).rate
  np.testing.assert_allclose([rate(0), rate(5), rate(9)], [0, 0.01, 0.01])


# --- averages ---


def test_swa_is_the_mean_of_the_last_epochs():
  average = averages.swa(10, start=0.5, every=2)
  params = [{'a': jnp.full(2, float(n**2))} for n in range(1, 11)]  # after step n
  mean, seen = {'a': jnp.zeros(2)}, []
  for step, p in enumerate(params):
    mean = average(mean, p, jnp.asarray(step))
    seen.append(float(mean['a'][0]))
  assert seen[:6] == [1, 4, 9, 16, 25, 36]  # the parameters themselves, up to step 6
  # Averaged are those after steps 7 and 9: 5 + 2, 5 + 4.
  assert seen[6:] == [49, 49, (49 + 81) / 2, (49 + 81) / 2]


@pytest.mark.parametrize(
  ('section', 'facts'),
  [
    (dict(ema=0.9, swa={}), ('config.optim', 'ema', 'swa', 'None')),
    (dict(swa=dict(start=1.0)), ('config.optim.swa', 'start=1.0', '< 1')),
    (dict(swa=dict(start=0.5, every=6)), ('config.optim.swa', 11, 10, 'swa.every')),
    (dict(swa=dict(begin=0.5)), ('config.optim.swa.begin', 'start')),
    (dict(layer_decay=1.5), ('config.optim.layer_decay=1.5',)),
    (dict(schedule=dict(staircase=0)), ('config.optim.schedule.staircase=0', 1)),
    (
      dict(schedule=dict(decay_until=0.0)),
      ('config.optim.schedule.decay_until=0.0', 1),
    ),
    (
      dict(schedule=dict(decay='rsqrt', staircase=3)),
      ('config.optim.schedule', 'staircase', 'rsqrt', 'cosine'),
    ),
  ],
)
def test_bad_sections_are_refused(section, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    optim.build('adamw', 1e-3, 10, **section)


def test_an_epoch_wise_cosine_is_pytorch_s():
  # CosineAnnealingLR(T_max=4), stepped once an epoch of 5 steps: printed by torch 2.
  rate = optim.make_schedule(1.0, 20, staircase=4)
  expected = np.repeat([1.0, 0.85355339, 0.5, 0.14644661], 5)
  np.testing.assert_allclose([rate(n) for n in range(20)], expected, rtol=1e-6)
  held = optim.make_schedule(1.0, 20, staircase=4, decay_until=0.5)
  expected = np.repeat([1.0, 0.85355339, 0.5, 0.5], 5)
  np.testing.assert_allclose([held(n) for n in range(20)], expected, rtol=1e-6)


# --- sharding ---


@pytest.mark.thorough
@pytest.mark.parametrize('name', ['adafactor', 'muon', 'lion', 'lamb', 'schedule_free'])
@pytest.mark.parametrize('scan', [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_state_can_be_sharded(name, scan):
  params = vit_params(scan=scan)
  state = jax.eval_shape(built(name).tx.init, params)
  mesh = sharding.make_mesh(2, 2, 2)
  placed = trees.flatten(sharding.state_shardings(state, mesh, 'fsdp_tensor'))
  big = [n for n, x in trees.flatten(state).items() if x.size >= sharding.FSDP_MIN_SIZE]
  assert big
  for n in big:  # no large moment has a copy on every device
    assert not placed[n].is_fully_replicated, n


@pytest.mark.thorough
@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_a_step_that_is_not_learned_from_leaves_the_state(name):
  tx = built(name).tx
  update = jax.jit(tx.update)
  _, before = update(GRADS[0], tx.init(PARAMS), PARAMS, rate=0.01, learns=True)
  nan = jax.tree.map(lambda g: g * jnp.nan, GRADS[1])
  _, after = update(nan, before, PARAMS, rate=0.01, learns=False)
  jax.tree.map(np.testing.assert_array_equal, after, before)
