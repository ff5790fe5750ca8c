"""Every optimizer against formulas of its paper, written out in NumPy, or optax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import naming
from tests.support.abstract import abstract_params
from vit_jax import models, optim, sharding, trees
from vit_jax.optim import averages, multipliers, optimizers
from vit_jax.optim.optimizers import adam, select, sgd

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
  moments = [x for n, x in state.items() if n.endswith(name)]
  assert sorted(x.size for x in moments) == [1, 32, 64, 32 * 64]
  (momentum,) = (x for x in moments if x.size == 32 * 64)
  assert momentum.dtype == jnp.bfloat16


# --- averages ---


def test_swa_is_the_mean_of_the_last_epochs():
  average = averages.swa(10, start=0.5, every=2)
  params = [{'a': jnp.full(2, float(n**2))} for n in range(1, 11)]  # after step n
  mean, means = {'a': jnp.zeros(2)}, []
  for step, p in enumerate(params):
    mean = average(mean, p, jnp.asarray(step))
    means.append(float(mean['a'][0]))
  assert means[:6] == [1, 4, 9, 16, 25, 36]  # the parameters themselves, up to step 6
  # Averaged are those after steps 7 and 9: 5 + 2, 5 + 4.
  assert means[6:] == [49, 49, (49 + 81) / 2, (49 + 81) / 2]


def test_swa_needs_a_member():
  with pytest.raises(ValueError, match=naming('swa', 11, 10, 'swa.every')):
    averages.swa(10, start=0.5, every=6)


def test_ema_by_hand():
  average = averages.ema(0.9)
  mean = average({'a': jnp.array(2.0)}, {'a': jnp.array(12.0)}, 0)
  np.testing.assert_allclose(mean['a'], 0.9 * 2 + 0.1 * 12, rtol=1e-6)


# --- sharding ---


@pytest.mark.parametrize('scan', [False, True])
def test_every_moment_can_be_sharded(scan):
  params = vit_params(scan=scan)
  state = jax.eval_shape(built('adafactor').tx.init, params)
  mesh = sharding.make_mesh(2, 2, 2)
  placed = trees.flatten(sharding.state_shardings(state, mesh, 'fsdp_tensor'))
  big = [n for n, x in trees.flatten(state).items() if x.size >= sharding.FSDP_MIN_SIZE]
  assert big
  for n in big:  # no large moment has a copy on every device
    assert not placed[n].is_fully_replicated, n


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_a_bad_step_leaves_the_state(name):
  tx = built(name).tx
  update = jax.jit(tx.update)  # one program, and not one for each operation
  _, before = update(GRADS[0], jax.jit(tx.init)(PARAMS), PARAMS, rate=0.01, good=True)
  nan = jax.tree.map(lambda g: np.full_like(g, np.nan), GRADS[1])
  _, after = update(nan, before, PARAMS, rate=0.01, good=False)
  jax.tree.map(np.testing.assert_array_equal, after, before)


# --- moments: optax's to the bit, and never copied ---


@pytest.mark.parametrize(
  ('ours', 'optaxs'),
  [
    (adam(b1=0.9, b2=0.999, eps=1e-8), optax.scale_by_adam(0.9, 0.999, 1e-8)),
    (
      adam(b1=0.9, b2=0.95, eps=1e-6, moment_dtype='bfloat16'),
      optax.scale_by_adam(0.9, 0.95, 1e-6, mu_dtype='bfloat16'),
    ),
    (sgd(momentum=0.9), optax.trace(0.9)),
    (
      sgd(momentum=0.9, nesterov=True, moment_dtype='bfloat16'),
      optax.trace(0.9, True, 'bfloat16'),
    ),
  ],
)
def test_equal_to_optax(ours, optaxs):
  a, b = ours.init(PARAMS), optaxs.init(PARAMS)
  for grads in GRADS:
    x, a = ours.update(grads, a)
    y, b = optaxs.update(grads, b)
    jax.tree.map(np.testing.assert_array_equal, (x, a), (y, b))
  jax.tree.map(lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), a, b)


def test_lamb_is_that_of_optax_and_of_timm():
  every = (('.*', 1.0),)
  ours = run(built('lamb', wd=0.05, wd_rules=every))
  theirs, state = optax.lamb(0.01, weight_decay=0.05), None
  params = PARAMS
  for grads, mine in zip(GRADS, ours, strict=True):
    state = theirs.init(params) if state is None else state
    updates, state = theirs.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    for name, value in trees.flatten(params).items():
      np.testing.assert_allclose(mine[name], value, rtol=1e-5, atol=1e-7)  # float32
  # As in timm, arrays without decay move as with Adam.
  bias = f'{BLOCK}MlpBlock_0/Dense_0/bias'
  np.testing.assert_array_equal(
    run(built('lamb'))[-1][bias], run(built('adam', eps=1e-6))[-1][bias]
  )


def test_gradients_of_another_scale_need_another_clip_and_eps():
  # Losses are summed over classes here, and averaged in DeiT III.
  scaled = [jax.tree.map(lambda g: 1000 * g, grads) for grads in GRADS]
  mean = run(built('lamb', wd=0.05, clip=1.0))
  total = run(built('lamb', wd=0.05, clip=1000.0, eps=1e-3), grads=scaled)
  for name, value in mean[-1].items():
    np.testing.assert_allclose(total[-1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', ['adamw', 'sgd'])
def test_no_moment_is_copied(name):
  tx = optim.build(name, 0.01, 10, wd=0.1).tx
  params = {'head': {'kernel': jnp.zeros((256, 256))}}

  def step(params, state, grads, good):
    updates, state = tx.update(grads, state, params, rate=0.01, good=good)
    new = optax.apply_updates(params, updates)
    return select(good, new, params), state

  step = jax.jit(
    step, donate_argnums=(0, 1), compiler_options=sharding.compiler_options()
  )
  program = step.lower(params, tx.init(params), params, True).compile()
  assert program.memory_analysis().temp_size_in_bytes < 256 * 256


# --- rates that differ by layer, and by rules ---


def vit_params(**fields):
  """Returns the parameters of a ViT of three blocks, by shape."""
  model = models.build('vit', 'Ti/16', depth=3, num_heads=4, num_classes=5, **fields)
  return abstract_params(model, 32)


def test_layer_decay_is_that_of_beit():
  params = vit_params()
  for name, factor in multipliers.layer_factors(VIT, params, 0.5).items():
    if 'encoderblock_' in name:
      layer = int(name.split('encoderblock_')[1][0])
      assert factor == 0.5 ** (3 - layer), name
    elif name.startswith(('embedding', 'cls', 'Transformer/posembed_input')):
      assert factor == 0.5**4, name
    else:
      assert name.split('/')[0] == 'head' or 'encoder_norm' in name, name
      assert factor == 1.0, name


def test_layers_are_decayed_alike_when_stacked():
  ones = lambda tree: jax.tree.map(lambda s: np.ones(s.shape, np.float32), tree)
  loose, stacked = ones(vit_params()), ones(vit_params(scan=True))
  rules = [('.*/bias', 0.25), ('.*', 1.0)]
  tx = multipliers.scale_by_rate(rules, 0.5, VIT)
  update = jax.jit(lambda p: tx.update(p, tx.init(p), p, rate=1.0)[0])
  one, other = (trees.flatten(update(params)) for params in (loose, stacked))
  for name, value in other.items():
    expected = one.get(name)
    if VIT.is_stacked(name):
      layers = [name.replace('encoderblock', f'encoderblock_{i}') for i in range(3)]
      expected = np.stack([one[layer] for layer in layers])
    np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=name)
  norm = 'Transformer/encoder_norm/'
  np.testing.assert_allclose(one[f'{norm}bias'], 0.25 * one[f'{norm}scale'], rtol=1e-6)
