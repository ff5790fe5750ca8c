"""Kernels of layer normalisation for TPUs: interpreted on the CPU, lowered without a TPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.test_tpu_attention import KINDS, step_lowered, tpu
from vit_jax import sharding
from vit_jax.kernels import layer_norm, tpu_layer_norm
from vit_jax.kernels.tpu_rows import Rows
from vit_jax.models import build

EPS = 1e-6


def arrays(*shape: int):
  """Returns x, scale, bias, and the gradients of the norm and of x besides."""
  width = shape[-1]
  keys = jax.random.split(jax.random.key(0), 5)
  draw = lambda key, *shape: jax.random.normal(key, shape)
  x, dy, dskip = (
    (draw(key, *shape) * 2 + 3 * (key is keys[0])).astype(jnp.bfloat16)
    for key in keys[:3]
  )
  return x, 1 + draw(keys[3], width) / 3, draw(keys[4], width), dy, dskip


def reference(x, scale, bias):
  mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / jnp.sqrt(var + EPS) * scale + bias


# Batch, tokens, channels; rows of a grid step: tiles that are whole and not, blocks that divide
# the tokens and leave some of them.
CASES = {
  'one block': ((2, 16, 256), 16),
  'a last tile of five rows': ((2, 37, 128), 37),
  'blocks': ((2, 32, 128), 16),
  'a last block of one row': ((2, 33, 256), 16),
  'heads': ((2, 3, 33, 96), 16),
  'images side by side': ((8, 3, 4, 96), 32),
}
QUICK = ('a last block of one row', 'float32')


@pytest.mark.parametrize(
  ('case', 'dtype'),  # what vector registers hold
  [
    pytest.param(*both, marks=() if both == QUICK else pytest.mark.slow)
    for both in itertools.product(CASES, ('bfloat16', 'float32'))
  ],
)
def test_kernels_compute_the_norm_and_its_derivative(case, dtype):
  shape, rows = CASES[case]
  how = Rows(dtype, interpret=True)
  turned = case == 'images side by side'
  plan = tpu_layer_norm.Plan(rows if turned else how.block(rows), how, turned)
  *inputs, dy, dskip = arrays(*shape)
  wide = lambda *arrays: [a.astype(jnp.float32) for a in arrays]
  run = lambda fn: jax.vjp(lambda *args: fn(*args, EPS, plan), *inputs)
  y, pullback = run(tpu_layer_norm.layer_norm)
  (y2, x), pullback2 = run(tpu_layer_norm.layer_norm_and_input)
  expected, exact = jax.vjp(reference, *wide(*inputs))
  dx, *dparams = exact(*wide(dy))
  found = [y, y2, x, *pullback(dy), *pullback2((dy, dskip))]
  right = [expected, expected, inputs[0], dx, *dparams, dx + dskip, *dparams]
  for a, b in zip(found, right, strict=True):
    # Rounded to bfloat16 once, by at most 2**-9; sums of float32 are not.
    close = 2**-9 if a.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(*wide(a, b), rtol=close, atol=close * np.abs(b).max())


@pytest.mark.slow
def test_devices_of_a_mesh_normalise_their_own_images():
  x, scale, bias, dy, dskip = arrays(8, 16, 128)
  plan = tpu_layer_norm.Plan(16, Rows('bfloat16', interpret=True))

  def run(*inputs):
    fn = lambda *args: tpu_layer_norm.layer_norm_and_input(*args, EPS, plan)
    (y, _), pullback = jax.vjp(fn, *inputs)
    return y, *pullback((dy, dskip))

  alone = run(x, scale, bias)
  mesh = sharding.make_mesh(4, 2, 1)
  with jax.set_mesh(mesh):
    found = jax.jit(run)(jax.device_put(x, sharding.batch_sharding(mesh)), scale, bias)
  assert found[1].sharding.shard_shape(x.shape) == (1, 16, 128)
  for a, b in zip(found, alone, strict=True):  # sums of images in another order
    close = 0 if a.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (a, b)), rtol=close)


@pytest.mark.parametrize(
  ('kind', 'dtype', 'rows'),
  [('v3', 'float32', 48), ('v5e', 'bfloat16', 40), ('v6e', 'bfloat16', 40)],
)
def test_the_plan_of_a_generation(kind, dtype, rows):
  x, scale, bias, _, _ = arrays(2, 40, 256)
  plan, expected = tpu_layer_norm.plan, tpu_layer_norm.Plan(rows, Rows(dtype))
  assert plan(x) is None  # no mesh
  with tpu(KINDS[kind], 1, 1, 1):
    assert plan(x) == expected
    long = plan(jax.ShapeDtypeStruct((1, 4097, 1024), jnp.bfloat16))
    assert long.rows % 16 == 0
    assert long.rows * 1024 * 16 <= 6 * 2**20
    assert plan(x.astype(jnp.float32)) is None
    assert plan(x[:, :, :100]) is None  # registers half full
    heads = plan(jax.ShapeDtypeStruct((2, 3, 40, 100), jnp.bfloat16))
    assert heads == (None if kind == 'v3' else expected)
    of_map = lambda *shape: plan(jax.ShapeDtypeStruct(shape, jnp.bfloat16), turned=True)
    found = of_map(8, 56, 56, 96)
    assert found == (None if kind == 'v3' else (3584, Rows(dtype), True))
    assert of_map(4, 56, 56, 96) is None  # half a tile of images
    assert of_map(8, 7, 1, 96) is None  # few to a grid step
    assert plan(x[:, :1]) is None  # a class token alone
    assert plan(x[:, 0]) is None
    other = layer_norm.layer_norm(x, scale, bias, EPS, jnp.float32, fused=True)
    assert other.dtype == jnp.float32
  with tpu(KINDS[kind], 2, 1, 1):
    assert plan(x) == expected
    assert plan(x[:1]) is None  # not divided by data
  with tpu(KINDS[kind], 1, 1, 2):
    assert plan(x) is None  # channels are split


@pytest.mark.parametrize(
  ('fused', 'classifier', 'kernels'),
  # Two of attention and, of each norm, two; the class token's last block has no kernel
  # but that of its first norm; the last norm of an encoder is in float32.
  [
    pytest.param(True, 'gap', 12, marks=pytest.mark.slow),
    (True, 'token', 8),
    pytest.param(False, 'gap', 0, marks=pytest.mark.slow),
  ],
)
def test_a_step_lowered_for_tpus_calls_the_kernels(fused, classifier, kernels):
  fields = {
    'depth': 2,
    'width': 128,
    'fused_attention': fused,
    'classifier': classifier,
  }
  model = build('vit', 'mu/8', **fields, dtype=jnp.bfloat16)
  assert step_lowered(model, 1, 32, 32, 3).count('@tpu_custom_call') == kernels
