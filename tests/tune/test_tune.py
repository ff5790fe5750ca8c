"""What is trained and what is frozen: rules, a step, a run and its checkpoints."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import naming, runs, tuning
from tests.support.states import restore_params
from vit_jax import errors, models, optim, sharding, tasks, trees, tune
from vit_jax.checkpoint import checkpoints

B = 16
BATCH = tuning.batch_of(B, 8)
SPEC = jax.eval_shape(lambda: BATCH)
MODEL = models.build('vit', 'mu/4', num_classes=5, depth=2, width=32, mlp_dim=32)
TASK = tasks.build('classify', MODEL, SPEC)


def attach(method='full', **options):
  return tune.attach(MODEL, models.family('vit'), (8, 8, 3), method, **options)


@functools.cache
def params():
  shapes = jax.eval_shape(TASK.init, jax.random.key(0), SPEC)['params']
  return trees.unflatten(tuning.random(shapes))


# -- rules ------------------------------------------------------------------------------


def test_methods_train_what_they_name():
  tree = jax.eval_shape(params)
  names = set(trees.flatten(tree))
  trained = lambda **section: set(
    trees.flatten(tune.partition(tree, attach(**section)[1])[0])
  )
  head = {'head/kernel', 'head/bias'}
  assert trained() == trained(method='full') == names
  assert trained(method='linear') == head
  biases = {name for name in names if name.endswith('/bias')}
  assert len(biases) > 10
  assert trained(method='bias') == head | biases
  train = ['cls', 'Transformer/encoderblock_1/.*']
  chosen = trained(method='rules', train=train)
  assert chosen == {n for n in names if n == 'cls' or 'block_1/' in n}
  assert trees.combine(*tune.partition(tree, attach('bias')[1])) == tree


def test_rules_that_train_nothing_are_refused():
  tree = jax.eval_shape(params)
  _, rules = attach('rules', train=['head/.*', 'head/kernal'])
  with pytest.raises(errors.UserError, match=naming('head/kernal', 'head/kernel')):
    tune.partition(tree, rules)


# -- a step -----------------------------------------------------------------------------


def train(method, mesh=None, **section):
  """Returns (first state, last state, metrics of the first step) of two steps."""
  optimizer = optim.build(
    **dict(name='adamw', lr=0.1, wd=0.1, ema=0.5) | section, total_steps=10
  )
  initial = trees.flatten(params())
  args = *attach(method), optimizer, BATCH
  return tuning.steps(*args, number=2, mesh=mesh, initial=initial)


def test_only_the_trained_have_gradients_moments_and_an_average():
  before, after, metrics = train('linear', clip=1e-3)
  assert set(trees.flatten(after.params)) == {'head/kernel', 'head/bias'}
  assert set(trees.flatten(after.ema)) == {'head/kernel', 'head/bias'}
  sizes = [x.size for x in jax.tree.leaves(after.opt_state)]
  assert sum(sizes) == 2 * (32 * 5 + 5) + 1  # two moments and a count
  frozen = trees.flatten(before.frozen)
  assert len(frozen) + 2 == len(trees.flatten(params()))
  for name, leaf in trees.flatten(after.frozen).items():
    np.testing.assert_array_equal(leaf, frozen[name], err_msg=name)

  # The logged norm, by which the gradient is clipped, is of the head's alone.
  def loss(values):
    one = TASK.prepare({**BATCH, 'weight': np.full(B, 1 / B, np.float32)}, None, None)
    return TASK.loss({'params': values}, one, jax.random.key(0))[0]

  grads = jax.jit(jax.grad(loss))(params())
  head, whole = optax.tree.norm(grads['head']), optax.tree.norm(grads)
  # float32 sums in another order; the body's part is far above that.
  np.testing.assert_allclose(metrics['grad_norm'], head, rtol=1e-5)
  assert whole > 1.01 * head


def test_devices_and_micro_batches_change_nothing():
  # Adam's eps keeps gradients that are rounding alone from being magnified.
  options = dict(eps=1e-3, clip=1.0)
  _, one, _ = train('bias', **options)
  _, other, _ = train('bias', sharding.make_mesh(2, 4), accum=2, **options)
  expected = trees.flatten(one)
  for name, leaf in trees.flatten(other).items():
    # float32 sums over examples, regrouped, through two steps of rate 0.1.
    np.testing.assert_allclose(leaf, expected[name], atol=1e-5, err_msg=name)


# -- a run ------------------------------------------------------------------------------

LINEAR = (
  *('steps=4', 'checkpoint.every=2', 'checkpoint.best=None', 'optim.ema=0.5'),
  *('optim.schedule.warmup=1', 'tune.method=linear'),
)
EVALS = {'ema': {**runs.EVALS['test'], 'every': 2, 'use_ema': True}}


@pytest.fixture(scope='module')
def tuned(tmp_path_factory):
  """A finished linear run: (folder, weights that it started from)."""
  folder = tmp_path_factory.mktemp('tuned')
  weights = tuning.write_body(folder)  # trained parameters need not be in the file
  with pytest.MonkeyPatch.context() as patch:
    runs.on_one_device(patch)
    run(folder / 'run', weights)
  return folder / 'run', weights


def run(workdir, weights, *changes):
  source = {'source': str(weights), 'skip': ['head/.*']}
  return runs.run(workdir, *LINEAR, *changes, weights=source, evals=EVALS)


def test_a_linear_run_trains_and_stores_the_head(tuned):
  folder, weights = tuned
  assert runs.status(folder)['trained_parameters'] == 16 * 10 + 10
  saved = checkpoints.Checkpoints(folder / 'checkpoints')
  with np.load(weights) as arrays:
    frozen = dict(arrays)
  assert sorted(saved.list_frozen()) == sorted(frozen)
  head = {'kernel': (16, 10), 'bias': (10,)}
  abstract = {
    'head': {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in head.items()}
  }
  alone, meta = restore_params(saved, abstract)
  assert meta['config']['weights']['source'] == str(weights)
  shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in frozen.items()}
  whole = trees.combine(abstract, trees.unflatten(shapes))
  both, _ = restore_params(saved, whole, frozen=frozen, ema=True)
  np.testing.assert_array_equal(both['embedding']['kernel'], frozen['embedding/kernel'])
  assert np.abs(both['head']['kernel'] - alone['head']['kernel']).max() > 0


def test_a_resumed_linear_run_finds_its_weights(tuned, tmp_path, one_device, capfd):
  folder = runs.killed(tuned[0], tmp_path / 'run')  # as it was at step 2
  moved = shutil.copy(tuned[1], tmp_path / 'moved.npz')
  gone = tmp_path / 'gone.npz'
  with pytest.raises(errors.UserError, match=naming(gone, 'config.weights.source')):
    run(folder, gone)
  with np.load(moved) as arrays:
    other = dict(arrays)
  other['embedding/bias'][0] += 1e-6
  np.savez(tmp_path / 'other.npz', **other)
  names = ('frozen/embedding/bias', 'config.weights.source')
  with pytest.raises(errors.UserError, match=naming(*names)):
    run(folder, tmp_path / 'other.npz')
  assert runs.saved(folder) == ['2']
  status, _ = run(folder, moved)
  assert 'Resuming from step 2.' in capfd.readouterr().out
  assert status == runs.status(tuned[0])
  assert runs.rows(folder) == runs.rows(tuned[0])


def test_frozen_parameters_must_have_a_source(tuned, tmp_path, one_device):
  names = ('config.tune', 'Transformer/encoder_norm/bias', 'config.weights.source')
  with pytest.raises(errors.UserError, match=naming(*names)):
    runs.run(tmp_path, *LINEAR, evals={})
  with pytest.raises(errors.UserError, match=naming('config.tune', 'head/bias')):
    run(tmp_path, tuned[1], 'tune={"method": "rules", "train": ["cls"]}')
