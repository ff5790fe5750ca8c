"""Attention kernels for TPUs: interpreted on the CPU, and lowered without a TPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from vit_jax import sharding
from vit_jax.kernels import tpu_attention, tpu_attention_plan
from vit_jax.kernels.attention import attend
from vit_jax.kernels.grid_bias import GridBias
from vit_jax.models import build

KINDS = {'v3': 'TPU v3', 'v5e': 'TPU v5 lite', 'v6e': 'TPU v6 lite'}
AXES = ('data', 'fsdp', 'tensor')


def arrays(n: int, s: int, heads: int, head: int, batch: int = 2):
  """Returns query, key, value and the gradient of the result."""
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = [(batch, size, heads, head) for size in (n, s, s, n)]
  draw = lambda key, shape: 2 * jax.random.normal(key, shape, jnp.bfloat16)
  return [draw(*both) for both in zip(keys, shapes, strict=True)]


def reference(query, key, value):
  weights = jnp.einsum('bnmd,bsmd->bmns', query, key) / np.sqrt(query.shape[-1])
  return jnp.einsum('bmns,bsmd->bnmd', jax.nn.softmax(weights), value)


def tpu(kind: str, *sizes: int):
  """Returns the context of an abstract mesh of TPUs; none is needed."""
  device = AbstractDevice(device_kind=kind, num_cores=1, platform='tpu')
  mesh = AbstractMesh(
    sizes, AXES, axis_types=(AxisType.Auto,) * 3, abstract_device=device
  )
  return jax.sharding.use_abstract_mesh(mesh)


def lowered(fn, *args) -> str:
  """Returns the program of fn(*args) for a TPU v5e."""
  with tpu(KINDS['v5e'], 1, 1, 1):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=('tpu',)).as_text()


def step_lowered(model, *shape: int) -> str:
  """Returns the program of the gradient of a model's logits, summed, for a TPU v5e.

  Args:
    shape: (B, H, W, C) of the images.
  """
  images = jax.ShapeDtypeStruct(shape, jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)
  loss = lambda params, images: model.apply(params, images, features=False)[0].sum()
  return lowered(jax.grad(loss), params, images)


# Queries, keys, heads, their size; heads and queries of a grid step. Heads that fill
# registers, share one, straddle two; blocks of queries that do not divide them.
CASES = {
  'two heads in a register': (17, 17, 4, 64, 4, 17),
  'three heads, half a register left': (17, 9, 3, 64, 3, 17),
  'a head on two registers': (9, 9, 8, 80, 8, 9),
  'a group of heads': (17, 17, 4, 64, 2, 17),
  'blocks of queries': (40, 40, 2, 64, 2, 16),
  'groups of four heads, and blocks': (40, 37, 8, 64, 4, 16),
}


QUICK = {('blocks of queries', 'bfloat16')}


@pytest.mark.parametrize(
  ('case', 'product'),
  [
    pytest.param(*both, marks=() if both in QUICK else pytest.mark.slow)
    for both in itertools.product(CASES, ('bfloat16', 'float32'))
  ],
)
def test_kernels_compute_attention_and_its_derivative(case, product):
  n, s, heads, head, group, rows = CASES[case]
  block = tpu_attention_plan.Block(group * head, rows)
  plan = tpu_attention_plan.Plan(head, block, block, product, 2**24, interpret=True)
  *inputs, grad = arrays(n, s, heads, head)
  y, pullback = jax.vjp(lambda *args: tpu_attention.attend(*args, plan), *inputs)
  wide = [x.astype(jnp.float32) for x in inputs]
  expected, exact = jax.vjp(reference, *wide)
  pairs = zip(
    [y, *pullback(grad)], [expected, *exact(grad.astype(jnp.float32))], strict=True
  )
  for found, right in pairs:
    assert found.dtype == jnp.bfloat16
    # The weights and what leaves the kernel are rounded to bfloat16, 2**-8 of each.
    np.testing.assert_allclose(
      found.astype(jnp.float32), right, rtol=0, atol=3 * 2**-8 * np.abs(right).max()
    )


# Queries, and keys before those of the map of 4 x 5; heads, their size; queries of a step.
BIASED = {
  'one block': (17, 0, 3, 24, 17),
  'blocks of queries': (40, 0, 2, 96, 16),
  'a class token': (21, 1, 1, 16, 16),
}
QUICK_BIASED = ('a class token', 'float32')


def biased(queries: int, before: int, heads: int, head: int, batch: int = 2):
  """Returns query, key, value, a bias of a map of 4 x 5 keys and the result's gradient."""
  *inputs, grad = arrays(queries, before + 20, heads, head, batch)
  keys = jax.random.split(jax.random.key(1))
  shape = (batch, queries - before, heads)
  bias = (jax.random.normal(k, (*shape, n)) for k, n in zip(keys, (4, 5), strict=True))
  return *inputs, GridBias(*bias), grad


def by_kernels(query, key, value, bias, plan):
  factors = bias.factors(query.shape[1], key.shape[1], query.dtype)
  first = (x.swapaxes(1, 2) for x in (query, key, value))
  return tpu_attention.attend_by_head(*first, *factors, plan).swapaxes(1, 2)


@pytest.mark.parametrize(
  ('case', 'product'),
  [
    pytest.param(*both, marks=() if both == QUICK_BIASED else pytest.mark.slow)
    for both in itertools.product(BIASED, ('bfloat16', 'float32'))
  ],
)
def test_a_bias_of_rows_and_columns_and_its_derivative(case, product):
  queries, before, heads, head, rows = BIASED[case]
  block = tpu_attention_plan.Block(head, rows)
  plan = tpu_attention_plan.Plan(head, block, block, product, 2**24, interpret=True)
  *inputs, grad = biased(queries, before, heads, head)
  y, pullback = jax.vjp(lambda *args: by_kernels(*args, plan), *inputs)

  def defined(query, key, value, bias):
    scores = jnp.einsum('bnmd,bsmd->bmns', query, key) / np.sqrt(head)
    at = np.arange(20)  # a key of the map: its row and its column
    of_map = bias.rows[..., at // 5] + bias.columns[..., at % 5]  # [B, n, M, 20]
    scores = scores.at[:, :, before:, before:].add(of_map.swapaxes(1, 2))
    return jnp.einsum('bmns,bsmd->bnmd', jax.nn.softmax(scores), value)

  wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
  expected, exact = jax.vjp(defined, *wide(inputs))
  found, right = (y, *pullback(grad)), (expected, *exact(wide(grad)))
  for a, b in zip(*map(jax.tree.leaves, (found, right)), strict=True):
    # As of attention without a bias, which is rounded to bfloat16, too.
    close = 3 * 2**-8 * np.abs(b).max()
    np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=close)


@pytest.mark.slow
def test_devices_of_a_mesh_have_the_bias_of_their_own_share():
  *inputs, _ = biased(20, 0, 4, 16, batch=8)
  block = tpu_attention_plan.Block(16, 20)
  plan = tpu_attention_plan.Plan(16, block, block, 'bfloat16', 2**24, interpret=True)
  run = lambda *args: by_kernels(*args, plan)
  grads = jax.grad(
    lambda *args: jnp.sin(run(*args).astype(jnp.float32)).sum(), range(4)
  )
  alone = run(*inputs), grads(*inputs)
  mesh = sharding.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    given = jax.device_put(inputs, sharding.batch_sharding(mesh))
    found = jax.jit(lambda *args: (run(*args), grads(*args)))(*given)
  for a, b in zip(*map(jax.tree.leaves, (found, alone)), strict=True):
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


@pytest.mark.thorough
def test_devices_of_a_mesh_compute_their_own_share():
  *inputs, _ = arrays(9, 9, 4, 64, batch=8)
  block = tpu_attention_plan.Block(128, 9)
  plan = tpu_attention_plan.Plan(64, block, block, 'bfloat16', 2**24, interpret=True)
  alone = tpu_attention.attend(*inputs, plan)
  mesh = sharding.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    step = jax.jit(lambda *args: tpu_attention.attend(*args, plan))
    found = step(*jax.device_put(inputs, sharding.batch_sharding(mesh)))
  np.testing.assert_array_equal(found.astype(np.float32), alone.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_chosen_for_tpus_in_bfloat16(kind):
  query, key, _, _ = arrays(197, 197, 12, 64)
  assert tpu_attention_plan.plan(query, key) is None  # no mesh
  with tpu(KINDS[kind], 2, 1, 3):
    plan = tpu_attention_plan.plan(query, key)
    assert plan.forward == plan.backward == (4 * 64, 197)  # heads of one device
    assert plan.product == ('float32' if kind == 'v3' else 'bfloat16')
    assert tpu_attention_plan.plan(query.astype('float32'), key) is None
    assert tpu_attention_plan.plan(query[:1], key) is None  # not divided by data
    assert tpu_attention_plan.plan(query[:, :, :7], key) is None  # nor heads by tensor
  with tpu(KINDS[kind], 1, 1, 1):
    long, _, _, _ = arrays(4097, 1, 12, 64, batch=1)
    plan = tpu_attention_plan.plan(long, long)
    if kind == 'v3':  # 16 MiB of memory on the chip
      assert plan is None
    else:
      assert plan.backward.rows < 4097
    huge = jax.ShapeDtypeStruct((1, 2**20, 12, 64), jnp.bfloat16)
    assert tpu_attention_plan.plan(huge, huge) is None
    by_head = tpu_attention_plan.plan_by_head
    assert by_head(query, key, 28).forward == (64, 197)
    assert by_head(query, key, 2**17) is None  # channels of a bias count


@pytest.mark.thorough
def test_a_step_lowered_for_tpus_calls_the_kernels():
  query, _, _, _ = arrays(17, 17, 4, 64)

  def text(**options):
    loss = lambda *args: jnp.sin(attend(*args, **options).astype(jnp.float32)).sum()
    step = jax.jit(jax.grad(loss, (0, 1, 2))).trace(query, query, query)
    return step.lower(lowering_platforms=('tpu',)).as_text()

  with tpu(KINDS['v5e'], 1, 1, 1):
    assert text().count('@tpu_custom_call') == 2
    assert 'tpu_custom_call' not in text(mask=np.ones((17, 17), bool))
    assert 'tpu_custom_call' not in text(on_weights=lambda weights: None)
    assert 'tpu_custom_call' not in text(fused=False)
  assert 'tpu_custom_call' not in text()


@pytest.mark.thorough
@pytest.mark.parametrize('fused', [True, False])
def test_a_field_of_the_model_turns_them_off(fused):
  model = build('vit', 'mu/8', depth=1, fused_attention=fused, dtype=jnp.bfloat16)
  images = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)
  assert ('tpu_custom_call' in lowered(model.apply, params, images)) == fused
