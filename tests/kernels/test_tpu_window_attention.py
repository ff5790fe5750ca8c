"""Kernels of attention within windows for TPUs: interpreted on the CPU, or lowered."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.test_tpu_attention import tpu
from vit_jax import models, sharding
from vit_jax.kernels import tpu_attention_plan, tpu_window_attention
from vit_jax.kernels.attention import attend
from vit_jax.kernels.window_bias import WindowBias
from vit_jax.nn.windows import Windows

WINDOWS = Windows((10, 6), (5, 3), (2, 1))  # 2 x 2 of 15 tokens


def arrays(batch: int, heads: int, head: int = 32):
  """Returns query, key, value and gradient, [B n, N, M, Dh], and a bias of positions."""
  keys = jax.random.split(jax.random.key(0), 5)
  shape = (batch * 4, 15, heads, head)
  draw = lambda key: 2 * jax.random.normal(key, shape, jnp.bfloat16)
  return *map(draw, keys[:4]), jax.random.normal(keys[4], (heads, 15, 15))


def reference(query, key, value, positions, apart):
  """Attention window by window, from its definition."""
  images = query.shape[0] // 4
  scores = jnp.einsum('bnmd,bsmd->bmns', query, key) / np.sqrt(query.shape[-1])
  scores += positions
  if apart is not None:
    scores -= 100.0 * jnp.tile(apart, (images, 1, 1))[:, None]
  return jnp.einsum('bmns,bsmd->bnmd', jax.nn.softmax(scores), value)


# Heads; windows and heads of a grid step; whether windows are shifted. Heads that fill a
# part of a register, all of it, two; a group of them.
CASES = {
  'three heads, two windows': (3, 2, 3, True),
  'four heads, all windows': (4, 4, 4, False),
  'two groups of heads': (8, 1, 4, True),
  'a register and a half': (6, 2, 6, True),
}
QUICK = ('two groups of heads', 'float32')


@pytest.mark.thorough
@pytest.mark.parametrize(
  ('case', 'product'),
  [
    pytest.param(*both, marks=() if both == QUICK else pytest.mark.slow)
    for both in itertools.product(CASES, ('bfloat16', 'float32'))
  ],
)
def test_kernels_compute_attention_and_its_derivative(case, product):
  heads, windows, group, shifted = CASES[case]
  plan = tpu_attention_plan.WindowPlan(
    32, windows, group * 32, product, 2**24, interpret=True
  )
  query, key, value, grad, positions = arrays(2, heads)
  apart = WINDOWS.apart() if shifted else None

  def run(query, key, value, positions):
    bias = WindowBias(4, positions, apart, -100.0)
    return tpu_window_attention.attend(query, key, value, bias, plan)

  y, pullback = jax.vjp(run, query, key, value, positions)
  wide = [x.astype(jnp.float32) for x in (query, key, value)]
  expected, exact = jax.vjp(lambda *args: reference(*args, apart), *wide, positions)
  found, right = [y, *pullback(grad)], [expected, *exact(grad.astype(jnp.float32))]
  # The weights and what leaves the kernel are rounded to bfloat16, 2**-8 of each; but the
  # derivative of the bias is a sum of float32, of scores that are exact by float32 products.
  exactly = 1e-5 if product == 'float32' else 3 * 2**-8
  for a, b, rounded in zip(found, right, [3 * 2**-8] * 4 + [exactly], strict=True):
    assert a.shape == b.shape
    np.testing.assert_allclose(
      a.astype(jnp.float32), b, rtol=0, atol=rounded * np.abs(b).max()
    )
  assert [x.dtype for x in found] == [jnp.bfloat16] * 4 + [jnp.float32]


def test_the_plain_path_takes_any_number_of_images():
  """As in files that `tools.export` writes."""
  (b,) = jax.export.symbolic_shape('b')
  query = jax.ShapeDtypeStruct((4 * b, 15, 2, 8), jnp.float32)
  bias = WindowBias(4, np.zeros((2, 15, 15), np.float32), WINDOWS.apart(), -100.0)
  run = jax.jit(lambda x: attend(x, x, x, bias=bias))
  (out,) = jax.export.export(run)(query).out_avals
  assert out.shape == query.shape


@pytest.mark.thorough
def test_devices_of_a_mesh_compute_their_own_share():
  """And the derivative of the bias, which all share, is their sum."""
  *inputs, grad, positions = arrays(4, 4)
  plan = tpu_attention_plan.WindowPlan(32, 2, 64, 'bfloat16', 2**24, interpret=True)

  @jax.jit
  def step(*arrays):
    bias = lambda positions: WindowBias(4, positions, WINDOWS.apart(), -100.0)
    run = lambda *x: tpu_window_attention.attend(*x[:3], bias(x[3]), plan)
    y, pullback = jax.vjp(run, *arrays[:4])
    return y, *pullback(arrays[4])

  alone = step(*inputs, positions, grad)
  mesh = sharding.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    placed = jax.device_put([*inputs, grad], sharding.batch_sharding(mesh))
    found = step(*placed[:3], positions, placed[3])
  for a, b in zip(found[:4], alone[:4], strict=True):
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))
  # Added in another order: 16 windows of float32.
  np.testing.assert_allclose(found[4], alone[4], rtol=0, atol=1e-5)


@pytest.mark.parametrize('kind', ['TPU v3', 'TPU v5 lite'])
def test_how_windows_are_divided(kind):
  query = lambda batch, windows, tokens, heads: jax.ShapeDtypeStruct(
    (batch * windows, tokens, heads, 32), jnp.bfloat16
  )
  plan = tpu_attention_plan.plan_windows
  assert plan(query(8, 64, 49, 3), 64) is None  # no mesh
  with tpu(kind, 2, 2, 1):
    assert plan(query(8, 64, 49, 3), 64)[:3] == (32, 8, 96)  # 24 heads of eight windows
    assert plan(query(8, 1, 49, 24), 1)[:3] == (32, 1, 768)
    assert plan(query(8, 1, 49, 48), 1)[:3] == (32, 1, 768)  # two groups
    assert plan(query(2, 4, 49, 3), 4) is None  # half an image a device
    assert plan(query(6, 4, 49, 3), 4) is None  # not divided
  with tpu(kind, 1, 1, 2):
    assert plan(query(8, 4, 49, 8), 4)[:3] == (32, 4, 128)  # half of the heads
    assert plan(query(8, 4, 49, 3), 4) is None  # which nothing halves
    # Windows of 24 x 24: their scores and bias fill the memory of v3's chip.
    large = plan(query(8, 4, 576, 8), 4)
    assert (large is None) == (kind == 'TPU v3')
  with tpu('TPU v6 lite', 1, 1, 1):
    assert plan(query(8, 64, 49, 3), 64) is None


def test_attention_lowered_for_tpus_calls_the_kernels():
  *inputs, _, positions = arrays(1, 4)

  def text():
    bias = lambda positions: WindowBias(4, positions, WINDOWS.apart(), -100.0)
    run = lambda *args: attend(*args[:3], bias=bias(args[3])).astype(jnp.float32)
    loss = lambda *args: jnp.sin(run(*args)).sum()
    traced = jax.jit(jax.grad(loss, (0, 3))).trace(*inputs, positions)
    return traced.lower(lowering_platforms=('tpu',)).as_text()

  with tpu('TPU v5 lite', 1, 1, 1):
    assert text().count('@tpu_custom_call') == 2
  assert 'tpu_custom_call' not in text()


@pytest.mark.slow
@pytest.mark.parametrize('version', [1, 2])
@pytest.mark.parametrize('fused', [True, False])
def test_a_field_of_the_model_turns_them_off(fused, version):
  fields = dict(models.family('swin').tiny[version - 1], dtype=jnp.bfloat16)
  model = models.build('swin', **fields, num_classes=3, fused_attention=fused)
  images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)

  def text():
    loss = lambda *args: model.apply(*args)[0].sum()
    traced = jax.jit(jax.grad(loss)).trace(params, images)
    return traced.lower(lowering_platforms=('tpu',)).as_text()

  with tpu('TPU v5 lite', 1, 1, 1):
    blocks = 3 if fused else 0
    assert text().count('@tpu_custom_call') == 2 * blocks
  assert 'tpu_custom_call' not in text()
