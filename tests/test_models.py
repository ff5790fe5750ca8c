"""The contract that every entry of MODELS keeps; a new model adds only its TINY line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scanned import stacked

from vit_jax import models
from vit_jax.errors import UserError

# A variant that runs in milliseconds, with two or more blocks.
TINY = {'vit': dict(variant='mu/8', depth=3)}
SIZE = 32


@pytest.fixture(params=models.MODELS)
def name(request):
  return request.param


def build(name, **fields):
  return models.build(name, **{'num_classes': 7, **TINY[name], **fields})


@pytest.fixture
def images():
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (2, SIZE, SIZE, 3)).astype(np.float32)


def init(model, images, seed=0):
  """Returns params with every leaf random: zeros and ones would hide mistakes."""
  params = jax.jit(model.init)(jax.random.key(seed), images)['params']
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  noise = [x + 0.1 * rng.normal(size=x.shape).astype(x.dtype) for x in leaves]
  return jax.tree.unflatten(tree, noise)


def test_every_model_is_tested():
  assert set(TINY) == set(models.MODELS)


def test_outputs(name, images):
  model = build(name)
  params = init(model, images)
  logits, out = model.apply({'params': params}, images)
  assert logits.shape == (2, 7)
  assert logits.dtype == jnp.float32
  assert {'stem', 'pre_logits'} <= set(out)
  assert all(x.shape[0] == 2 for x in out.values())
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


def test_without_a_head_logits_are_pre_logits(name, images):
  model = build(name, num_classes=None)
  logits, out = model.apply({'params': init(model, images)}, images)
  np.testing.assert_array_equal(logits, out['pre_logits'])


def test_every_parameter_has_a_gradient(name, images):
  model = build(name)

  def loss(params):
    return jnp.sum(model.apply({'params': params}, images)[0] ** 2)

  grads = jax.jit(jax.grad(loss))(init(model, images))
  # A key's bias shifts all scores of a query alike: softmax does not see it.
  dead = [
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, g in jax.tree.leaves_with_path(grads)
    if not np.abs(g).max() > 0
  ]
  assert [d for d in dead if not d.endswith('key/bias')] == []


def test_dropout_is_of_training_only(name, images):
  model = build(name, dropout=0.5)
  variables = {'params': init(model, images)}
  apply = lambda key, train: model.apply(
    variables, images, train=train, rngs={'dropout': jax.random.key(key)}
  )[0]
  assert not np.allclose(apply(0, True), apply(1, True))
  np.testing.assert_array_equal(apply(0, True), apply(0, True))
  plain = build(name).apply(variables, images)[0]
  np.testing.assert_array_equal(apply(0, False), plain)


@pytest.mark.parametrize('remat', ['none', 'full', 'dots'])
@pytest.mark.parametrize('scan', [False, True])
def test_scan_and_remat_change_no_output_and_no_gradient(name, images, scan, remat):
  plain, model = build(name), build(name, scan=scan, remat=remat)
  params = init(plain, images)

  def loss(model, scanned):
    def fn(params):
      params = stacked(params, model.depth) if scanned else params
      return jnp.sum(model.apply({'params': params}, images)[0] ** 2)

    return fn

  value, grads = jax.jit(jax.value_and_grad(loss(plain, False)))(params)
  value2, grads2 = jax.jit(jax.value_and_grad(loss(model, scan)))(params)
  np.testing.assert_allclose(value, value2, rtol=1e-5)  # float32 sums in other order
  scale = max(np.abs(g).max() for g in jax.tree.leaves(grads))
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads2), strict=True):
    # Of the whole gradient's size: that of a key's bias is 0 but for rounding.
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)


def test_bfloat16_computes_near_float32(name, images):
  params = init(build(name), images)
  logits, out = build(name, dtype='bfloat16').apply({'params': params}, images)
  exact, _ = build(name).apply({'params': params}, images)
  assert logits.dtype == jnp.float32
  assert out['pre_logits'].dtype == jnp.bfloat16
  # bfloat16 keeps 8 bits: 0.4 % per operation, over a few tens of operations.
  assert np.abs(logits - exact).max() < 0.05 * np.abs(exact).max()
  assert np.abs(logits - exact).max() > 0


def test_unknown_fields_and_values_are_refused(name, images):
  with pytest.raises(UserError, match=r'num_clases.*Did you mean "num_classes"'):
    build(name, num_clases=3)
  with pytest.raises(UserError, match='float33'):
    build(name, dtype='float33')
  with pytest.raises(UserError, match=r'remat policy.*full'):
    build(name, remat='ful').init(jax.random.key(0), images)


@pytest.mark.parametrize(
  ('field', 'value'), [('num_classes', 0), ('dropout', 1.0), ('dropout', -0.1)]
)
def test_values_out_of_range_are_refused(name, field, value):
  with pytest.raises(UserError, match=f'{field}={value}'):
    build(name, **{field: value})
