"""The contract of models, continued: derivatives, and what changes none of them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.scanned import stacked
from tests.support.tiny_models import (
  TINY,
  build,
  having,
  images,
  init,
  one_of_each,
  total,
  variables,
)


def squares_and_gradient(model, params):
  def loss(params):
    outputs, _ = model.apply(variables(model, params), images())
    return total(jax.tree.map(jnp.square, outputs))

  return jax.jit(jax.value_and_grad(loss))(params)


@functools.cache
def plain(name):
  model = build(name)
  return squares_and_gradient(model, init(model))


def derivatives(model, params):
  """Returns t -> (forward, reverse, second) derivatives along a random step."""
  rng = np.random.default_rng(1)
  step = jax.tree.map(lambda x: rng.normal(0, 0.02, x.shape).astype(x.dtype), params)

  def along(t):
    moved = jax.tree.map(lambda x, v: x + t * v, params, step)
    moved = variables(model, moved)
    outputs, _ = model.apply(moved, images(), train=True, features=False)
    return total(jax.tree.map(jnp.tanh, outputs))

  def all_three(t):
    slope = jax.jvp(along, (t,), (1.0,))[1]
    return slope, *jax.jvp(jax.grad(along), (t,), (1.0,))

  return all_three


def test_forward_and_reverse_can_be_nested_with_batch_norms():
  # Traced: a rule for one direction only, `custom_vjp`, is refused while tracing.
  model = build('resnet 0')
  shapes = jax.eval_shape(derivatives(model, init(model)), 0.0)
  assert [x.shape for x in shapes] == [(), (), ()]


# These call every function that has derivatives of its own; the rest are JAX's.
@pytest.mark.parametrize(
  ('name', 'fields'),
  [('vit 0', dict(depth=1)), ('convnext 0', dict(depths=(1,), widths=(8,)))],
)
def test_forward_and_reverse_differentiation_agree(name, fields):
  model = build(name, **fields)
  forward, reverse, second = jax.jit(derivatives(model, init(model)))(0.0)
  np.testing.assert_allclose(forward, reverse, rtol=1e-3)  # float32, sums of many terms
  assert np.isfinite(second)
  assert second != 0


@pytest.mark.parametrize('name', one_of_each(TINY))
def test_every_parameter_has_a_gradient(name):
  _, grads = plain(name)
  dead = [
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, g in jax.tree.leaves_with_path(grads)
    if not np.abs(g).max() > 0
  ]
  # A key's bias shifts all scores of a query alike: softmax does not see it.
  assert [name for name in dead if not re.fullmatch('.*key/bias', name)] == []


@pytest.mark.parametrize(
  ('name', 'scan', 'remat'),
  [
    (name, scan, remat)
    for scan, remat in ((False, 'dots'), (True, 'none'), (True, 'full'))
    for name in one_of_each(having('remat', *(['scan'] if scan else [])))
  ],
)
def test_scan_and_remat_change_no_output_and_no_gradient(name, scan, remat):
  fields = {'remat': remat} | ({'scan': True} if scan else {})
  model, params = build(name, **fields), init(build(name))
  value, grads = plain(name)
  if scan:
    params, grads = (stacked(tree, model.depth) for tree in (params, grads))
  value2, grads2 = squares_and_gradient(model, params)
  np.testing.assert_allclose(value, value2, rtol=1e-5)  # float32 sums in other order
  scale = max(np.abs(g).max() for g in jax.tree.leaves(grads))
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads2), strict=True):
    # Of the whole gradient's size: that of a key's bias is 0 but for rounding.
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)
