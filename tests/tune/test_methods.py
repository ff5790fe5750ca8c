"""What tuning methods train: on every family, layer by layer, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import classifiers, naming, tuning
from tests.support.tuning import attach
from vit_jax import errors, models, optim, sharding, trees, tune

# -- every method on every family -----------------------------------------------------

METHODS = sorted(set(tune.METHODS) - {'rules', 'full'})


def section_for(name, method):
  section = {'method': method}
  if method == 'vpt':
    section['number'] = 1 if models.family(name).prompts[0] == 'add' else 2
  return section


BATCH = tuning.batch_of(8, 32)


def steps(model, rules, number=2, mesh=None, batch=BATCH, accum=1):
  """Returns the states before and after steps of SGD, from a head that is not zero."""
  optimizer = optim.build('sgd', 0.1, 10, momentum=0.9, accum=accum)
  return tuning.steps(model, rules, optimizer, batch, number=number, mesh=mesh)[:2]


@functools.cache
def shapes_of(model, train=False):
  """Returns (outputs, variables) of two images, as shapes."""
  rngs = {'params': jax.random.key(0), 'dropout': jax.random.key(0)}
  init = functools.partial(model.init_with_output, train=train)
  return jax.eval_shape(init, rngs, jnp.zeros((2, 32, 32, 3)))


# Prompts need a family with a place for them.
CASES = [
  (name, method)
  for name in classifiers()
  for method in METHODS
  if method != 'vpt' or models.family(name).prompts
]


@pytest.mark.parametrize(('name', 'method'), CASES)
def test_every_method_trains_on_every_family(name, method):
  family = models.family(name)
  model = models.build(name, num_classes=5, **family.tiny[0])
  tuned, rules = tune.attach(model, family, (32, 32, 3), **section_for(name, method))
  (logits, out), variables = shapes_of(tuned, train=True)
  (_, plain), own = shapes_of(model)
  assert logits.shape == (2, 5)
  assert out.keys() == plain.keys()
  params = trees.flatten(variables['params'])
  names = {name for name in params if not name.startswith('tune/')}
  assert names == trees.flatten(own['params']).keys()
  trained, _ = tune.partition(variables['params'], rules)
  trained = trees.flatten(trained).keys()
  assert trained >= params.keys() - names
  assert any(name.startswith('head/') for name in trained)
  assert len(trained) < len(params)


# The others only choose among the model's own parameters: see test_tune.py.
@pytest.mark.parametrize('method', ['adapter', 'lora', 'mlp', 'vpt'])
def test_the_trained_move_and_the_frozen_do_not(method):
  model = models.build('vit', num_classes=5, **models.family('vit').tiny[0])
  section = section_for('vit', method)
  if method == 'vpt':
    section |= {'deep': True, 'dropout': 0.1}
  tuned, rules = tune.attach(model, models.family('vit'), (32, 32, 3), **section)
  before, after = steps(tuned, rules)
  for name, x in trees.flatten(after.frozen).items():
    np.testing.assert_array_equal(x, trees.flatten(before.frozen)[name], err_msg=name)
  still = [
    name
    for name, x in trees.flatten(after.params).items()
    if np.array_equal(x, trees.flatten(before.params)[name])
  ]
  # The bias of keys changes no attention.
  assert [n for n in still if not n.endswith('key/bias')] == []


def test_the_layer_scale_of_convnext_multiplies_an_adapter():
  family, images = models.family('convnext'), jnp.ones((1, 8, 8, 3))
  section = section_for('convnext', 'adapter')
  plain = models.build('convnext', depths=(1,), widths=(8,), num_classes=None)
  model, _ = tune.attach(plain, family, (8, 8, 3), **section)
  variables = jax.jit(model.init)(jax.random.key(0), images)
  params = trees.flatten(variables['params'])
  (up,) = (name for name in params if name.endswith('/up/bias'))
  apply = lambda flat: model.apply({'params': trees.unflatten(flat)}, images)[0]
  for gamma in (0.0, 1.0):
    scaled = params | {'stage1_block_0/gamma': jnp.full(8, gamma)}
    same = np.array_equal(apply(scaled | {up: jnp.arange(8.0)}), apply(scaled))
    assert same == (gamma == 0)


def test_frozen_models_compute_as_in_evaluation():
  fields = models.family('vit').tiny[0] | {'dropout': 0.5, 'num_classes': 5}
  model = models.build('vit', **fields)
  draws = {}
  for method in ('linear', 'lora', 'vpt', 'full', 'bias'):
    tuned, _ = tune.attach(model, models.family('vit'), (32, 32, 3), method=method)
    images, rngs = jnp.zeros((1, 32, 32, 3)), {'dropout': jax.random.key(1)}
    variables = jax.eval_shape(tuned.init, jax.random.key(0), images)
    train = functools.partial(tuned.apply, train=True, rngs=rngs)
    draws[method] = 'random_' in str(jax.make_jaxpr(train)(variables, images))
  assert draws == dict(linear=False, lora=False, vpt=False, full=True, bias=True)


# -- batch statistics -----------------------------------------------------------------


def mlp():
  family = models.family('vit')
  model = models.build('vit', num_classes=5, **family.tiny[0] | dict(depth=1))
  return tune.attach(model, family, (32, 32, 3), method='mlp', dropout=0.0)


def test_batch_statistics_are_those_of_the_whole_batch():
  tuned, rules = mlp()
  before, one = steps(tuned, rules, 1)
  _, eight = steps(tuned, rules, 1, sharding.make_mesh(2, 4))
  stats = trees.flatten(one.batch_stats)
  assert set(stats) == {f'tune/norm_{i}/{s}' for i in (0, 1) for s in ('mean', 'var')}
  images = BATCH['image']
  own = {k: v for k, v in before.variables()['params'].items() if k != 'tune'}
  _, out = jax.jit(tuned.model.apply)({'params': own}, images)
  dense, x = before.params['tune']['dense_0'], np.asarray(out['pre_logits'])
  hidden = np.maximum(x @ dense['kernel'] + dense['bias'], 0)
  # A tenth of the batch's, nine tenths of the first values, 0 and 1.
  np.testing.assert_allclose(stats['tune/norm_0/mean'], hidden.mean(0) / 10, atol=1e-6)
  expected = 0.9 + hidden.var(0) / 10
  np.testing.assert_allclose(stats['tune/norm_0/var'], expected, atol=1e-6)
  for name, x in trees.flatten(eight.batch_stats).items():
    np.testing.assert_allclose(x, stats[name], atol=1e-6, err_msg=name)


def test_a_step_that_is_skipped_changes_no_statistics():
  nan = BATCH | {'image': np.full_like(BATCH['image'], np.nan)}
  before, after = steps(*mlp(), number=1, batch=nan)
  assert after.counters['skipped'] == 1
  for name, x in trees.flatten(after.batch_stats).items():
    np.testing.assert_array_equal(x, trees.flatten(before.batch_stats)[name])


def test_micro_batches_update_statistics_in_turn():
  tuned, rules = mlp()
  same = {k: np.repeat(v[:4], 2, axis=0) for k, v in BATCH.items()}
  _, twice = steps(tuned, rules, 1, batch=same, accum=2)
  before, once = steps(tuned, rules, 1, batch=same)
  flat = trees.flatten(once.batch_stats)
  for name, x in trees.flatten(twice.batch_stats).items():
    first = trees.flatten(before.batch_stats)[name]
    # Both halves are the same images: the same step towards their statistics, twice.
    np.testing.assert_allclose(x, 1.9 * flat[name] - 0.9 * first, atol=1e-6)


# -- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
  ('section', 'fields', 'words'),
  [
    (dict(method='vpt', where='pad'), {}, ('config.tune', 'pad', 'prepend', 'ViT')),
    (dict(method='vpt', layers=[0]), {}, ('layers=(0,)', 'deep')),
    (dict(method='vpt', deep=True, layers=[1, 0]), {}, ('ascending', '0 to 1')),
    (dict(method='vpt', where='add', number=3), {}, ('number=3', '16')),
    (dict(method='vpt', where='add', number=1, pool='both'), {}, ('pool', 'add')),
    (dict(method='vpt', pool='both'), dict(classifier='none'), ('pool', "'none'")),
    (dict(method='vpt'), dict(posemb='relative'), ("'relative'", "where='add'")),
    (dict(method='lora'), dict(scan=True), ('config.model.scan', 'lora')),
    (dict(method='partial', blocks=3), {}, ('blocks=3', '2 blocks')),
    (dict(method='lora', layers=['.*/kernal']), {}, ('.*/kernal', 'kernels')),
    (dict(method='adapter', reduction=64), {}, ('reduction=64', '32')),
    (dict(method='mlp'), dict(num_classes=None), ('mlp', 'num_classes')),
    (dict(method='vpt'), dict(name='swin'), ('Swin', 'lora')),
  ],
)
def test_options_that_a_model_cannot_take(section, fields, words):
  name = fields.get('name', 'vit')
  small = {'num_classes': 3, **models.family(name).tiny[0]}
  model = models.build(**{'name': name, **small, **fields})
  with pytest.raises(errors.UserError, match=naming('config.tune', *words)):
    attach(model, **section)
