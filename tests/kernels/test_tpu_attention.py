"""Attention kernels for TPUs: interpreted on the CPU, or lowered without a TPU."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from tests.support import tpu
from tests.support.tpu import interpreted  # noqa: F401
from vit_jax import models, sharding
from vit_jax.kernels import tpu_attention
from vit_jax.kernels.attention import GridBias, attend


def arrays(n: int, s: int, heads: int, head: int, batch: int = 2):
  """Returns query, key, value and the gradient of the result."""
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = [(batch, size, heads, head) for size in (n, s, s, n)]
  draw = lambda key, shape: 2 * jax.random.normal(key, shape, jnp.bfloat16)
  return [draw(*both) for both in zip(keys, shapes, strict=True)]


def wide(tree):
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def reference(query, key, value, bias=None):
  scores = jnp.einsum('bnmd,bsmd->bmns', query, key) / np.sqrt(query.shape[-1])
  if bias is not None:
    before = key.shape[1] - 20
    at = np.arange(20)  # keys of a map of 4 x 5: row and column of each
    of_map = bias.rows[..., at // 5] + bias.columns[..., at % 5]  # [B, n, M, 20]
    scores = scores.at[:, :, before:, before:].add(of_map.swapaxes(1, 2))
  return jnp.einsum('bmns,bsmd->bnmd', jax.nn.softmax(scores), value)


def assert_computes(plan, bias, query, key, value, grad):
  """Compares the kernels with the formula, and their derivatives with JAX's."""
  inputs = (query, key, value) + (() if bias is None else (bias,))

  @functools.partial(jax.jit, static_argnums=0)
  def derived(function, *inputs_and_grad):
    *inputs, grad = inputs_and_grad
    y, pullback = jax.vjp(function, *inputs)
    return y, *pullback(grad)

  run = lambda q, k, v, bias=None: tpu_attention.attend(q, k, v, bias, plan)
  result = jax.tree.leaves(derived(run, *inputs, grad))
  expected = jax.tree.leaves(derived(reference, *wide(inputs), wide(grad)))
  for a, b in zip(result, expected, strict=True):
    # The weights, a bias, and the results are rounded to bfloat16, 2**-8 of each.
    close = 1.5 * 2**-8 * np.abs(b).max()
    np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=close)


@pytest.mark.parametrize(
  ('queries', 'keys', 'heads', 'head', 'group', 'rows'),
  [
    (9, 9, 3, 80, 3, 9),  # a head on two registers, and a register that is not filled
    (24, 9, 4, 64, 2, 16),  # groups of heads, and blocks that do not divide the queries
  ],
)
@pytest.mark.usefixtures('interpreted')
def test_attention_and_its_derivative(queries, keys, heads, head, group, rows):
  plan = tpu_attention.Plan(head, group * head, rows, 2**24)
  assert_computes(plan, None, *arrays(queries, keys, heads, head))


def grid_bias(queries: int, heads: int, batch: int = 2) -> GridBias:
  draw = lambda seed, n: jax.random.normal(
    jax.random.key(seed), (batch, queries, heads, n)
  )
  return GridBias(draw(1, 4), draw(2, 5))


@pytest.mark.usefixtures('interpreted')
def test_a_bias_of_rows_and_columns():
  # A class token before the map of 4 x 5 keys; blocks that do not divide the queries.
  plan = tpu_attention.Plan(16, 16, 16, 2**24)
  assert_computes(plan, grid_bias(24, 2), *arrays(25, 21, 2, 16))


@pytest.mark.usefixtures('interpreted')
def test_devices_of_a_mesh_compute_their_own_share():
  *inputs, _ = arrays(20, 20, 4, 16, batch=4)
  plan = lambda lanes: tpu_attention.Plan(16, lanes, 20, 2**24)

  def run(inputs, bias):
    unbiased = tpu_attention.attend(*inputs, None, plan(32))
    return unbiased, tpu_attention.attend(*inputs, bias, plan(16))

  args = inputs, grid_bias(20, 4, batch=4)
  alone = jax.jit(run)(*args)
  mesh = sharding.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    result = jax.jit(run)(*jax.device_put(args, sharding.batch_sharding(mesh)))
  jax.tree.map(np.testing.assert_array_equal, wide(result), wide(alone))


def shape(n: int, heads: int = 12, batch: int = 2, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct((batch, n, heads, 64), dtype)


@pytest.mark.parametrize('generation', ['v5e', 'v6e'])
def test_plans(generation):
  plan = lambda query, bias=None: tpu_attention.plan(query, query, bias)
  assert plan(shape(197)) is None  # without a mesh
  with tpu.mesh('v3'):
    assert plan(shape(197)) is None
  with tpu.mesh(generation, 2, 1, 3):
    assert plan(shape(197))[1:3] == (4 * 64, 197)  # the heads of one device
    assert plan(shape(197, dtype=jnp.float32)) is None
    assert plan(shape(197, batch=1)) is None  # not divided by data
    assert plan(shape(197, heads=7)) is None  # nor heads by tensor
  with tpu.mesh(generation):
    assert plan(shape(197))[1:3] == (12 * 64, 197)
    for tokens in (577, 1025, 4096, 4097):  # a program that compiles in time
      _, lanes, rows, *_ = plan(shape(tokens))
      assert lanes // 64 * rows * tokens <= tpu_attention._SCORES
    assert plan(shape(2**20)) is None
    bias = GridBias(jnp.zeros((2, 196, 12, 14)), jnp.zeros((2, 196, 12, 14)))
    assert plan(shape(197), bias)[1:3] == (64, 197)


def test_a_program_for_tpus_calls_the_kernels_where_they_apply():
  loss = lambda *args, **options: jnp.sin(wide(attend(*args, **options))).sum()
  calls = lambda **options: tpu.kernels_in(
    jax.grad(functools.partial(loss, **options), (0, 1, 2)), *[shape(17, 4)] * 3
  )
  assert calls() == 2
  assert calls(mask=np.ones((17, 17), bool)) == 0
  assert calls(on_weights=lambda weights: None) == 0


def test_kernels_are_traced_once_for_all_layers_of_one_shape():
  def loss(x):
    for _ in range(3):
      x = attend(x, x, x)
    return wide(x).sum()

  with mock.patch.object(pallas, 'pallas_call', wraps=pallas.pallas_call) as traced:
    assert tpu.kernels_in(jax.value_and_grad(loss), shape(23, 2)) == 6
  assert traced.call_count == 2  # forward and backward


@pytest.mark.parametrize(
  ('name', 'fields', 'calls'),
  [
    # For each block two kernels of attention, and two for each norm. The last block of a
    # class token has a kernel of its first norm alone; the final norm is in float32.
    ('vit:mu/8', dict(depth=2, width=128), 8),
    ('vit:mu/8', dict(depth=2, width=128, classifier='gap'), 12),
    # A scan computes the norms of its block again, but not the attention.
    ('vit:mu/8', dict(depth=2, width=128, classifier='gap', scan=True), 8),
    ('mvit', models.family('mvit').tiny[0], 2 * 2),
  ],
)
def test_models_for_tpus(name, fields, calls):
  model = models.build(name, **fields, dtype=jnp.bfloat16)
  assert tpu.kernels_in_step(model, 2, 32, 32, 3) == calls
