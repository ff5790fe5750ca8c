"""Kernels of depthwise convolutions for TPUs: interpreted on the CPU, lowered without a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.test_tpu_attention import KINDS, lowered, step_lowered, tpu
from vit_jax import sharding
from vit_jax.kernels import tpu_depthwise
from vit_jax.models import build

WIDE = lambda *arrays: [a.astype(jnp.float32) for a in arrays]


def arrays(images, height, width, channels, size):
  """Returns x, a filter, a bias, and the gradients of the convolution and of x besides."""
  shape = (images, height, width, channels)
  shapes = [shape, (*size, 1, channels), (channels,), shape, shape]
  keys = jax.random.split(jax.random.key(0), 5)
  both = zip(keys, shapes, strict=True)
  return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in both]


def reference(x, kernel, bias):
  y = jax.lax.conv_general_dilated(
    x,
    kernel,
    (1, 1),
    'SAME',
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    feature_group_count=x.shape[-1],
  )
  return y + bias, x


# Images, map, channels, filter; the part of the map that a grid step computes.
CASES = {
  'parts of rows and of columns': ((8, 6, 9, 5, (3, 3)), (3, 3)),
  'a whole map that is smaller than the filter': ((8, 2, 3, 5, (7, 5)), (2, 3)),
  'a register of channels and two more': ((16, 3, 4, 130, (1, 3)), (1, 4)),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
  'case',
  [
    pytest.param(c, marks=() if c.startswith('parts') else pytest.mark.slow)
    for c in CASES
  ],
)
def test_kernels_compute_the_convolution_and_its_derivative(case):
  shapes, part = CASES[case]
  plan = tpu_depthwise.Plan(*part, interpret=True)
  *inputs, dy, dskip = arrays(*shapes)

  @jax.jit
  def run(*inputs):
    fn = lambda *args: tpu_depthwise.convolve_and_input(*args, plan)
    found, pullback = jax.vjp(fn, *inputs)
    return *found, *pullback((dy, dskip))

  expected, exact = jax.vjp(reference, *WIDE(*inputs))
  for a, b in zip(
    run(*inputs), [*expected, *exact(tuple(WIDE(dy, dskip)))], strict=True
  ):
    assert a.dtype == jnp.bfloat16
    # Sums of float32, rounded to bfloat16 once, by at most 2**-9.
    np.testing.assert_allclose(*WIDE(a, b), rtol=2**-8, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
def test_a_tangent_and_each_derivative_alone():
  plan = tpu_depthwise.Plan(4, 6, interpret=True)
  *inputs, dy, _ = arrays(8, 4, 6, 3, (3, 3))
  run = lambda *args: tpu_depthwise.convolve_and_input(*args, plan)[0]
  together = jax.vjp(run, *inputs)[1](dy)
  tangents = [dy, inputs[1] / 2, inputs[2] * 3]
  y, tangent = jax.jvp(run, inputs, tangents)
  expected = jax.jvp(lambda *args: reference(*args)[0], WIDE(*inputs), WIDE(*tangents))
  for a, b in zip((y, tangent), expected, strict=True):
    close = 2**-6 * np.abs(b).max()  # a tangent is the sum of three that are rounded
    np.testing.assert_allclose(*WIDE(a, b), rtol=0, atol=close)
  for i in range(3):
    alone = lambda x, i=i: run(*inputs[:i], x, *inputs[i + 1 :])
    (found,) = jax.vjp(alone, inputs[i])[1](dy)
    np.testing.assert_array_equal(found, together[i])


@pytest.mark.slow
def test_devices_of_a_mesh_convolve_their_own_images():
  plan = tpu_depthwise.Plan(2, 4, interpret=True)
  *inputs, dy, dskip = arrays(32, 2, 4, 3, (3, 3))

  def run(*inputs):
    fn = lambda *args: tpu_depthwise.convolve_and_input(*args, plan)
    (y, _), pullback = jax.vjp(fn, *inputs)
    return y, *pullback((dy, dskip))

  alone = run(*inputs)
  mesh = sharding.make_mesh(2, 2, 1, devices=jax.devices()[:4])
  with jax.set_mesh(mesh):
    x = jax.device_put(inputs[0], sharding.batch_sharding(mesh))
    found = jax.jit(run)(x, *inputs[1:])
  assert found[1].sharding.shard_shape(x.shape) == (8, 2, 4, 3)
  for a, b in zip(found, alone, strict=True):  # sums of images in another order
    np.testing.assert_allclose(*WIDE(a, b), rtol=2**-7)


def test_the_plan_of_a_map():
  plan = lambda *shape, size=(7, 7): tpu_depthwise.plan(
    jax.ShapeDtypeStruct(shape, jnp.bfloat16), size
  )
  assert plan(8, 56, 56, 96) is None  # no mesh
  with tpu(KINDS['v5e'], 1, 1, 1):
    assert plan(8, 56, 56, 96) == (8, 28, False)
    assert plan(8, 14, 14, 384) == (14, 14, False)
    assert plan(8, 7, 7, 768) == (7, 7, False)
    assert plan(8, 12, 12, 8) == (12, 12, False)
    assert plan(8, 256, 256, 8) == (16, 16, False)
    assert plan(8, 31, 29, 8) is None  # primes: one row and column at a time
    assert plan(4, 56, 56, 96) is None  # half a tile of images
    assert plan(8, 56, 56, 96, size=(2, 2)) is None
    assert tpu_depthwise.plan(jnp.zeros((8, 7, 7, 8)), (7, 7)) is None  # float32
  with tpu(KINDS['v5e'], 2, 1, 1):
    assert plan(8, 56, 56, 96) is None  # four images each
    assert plan(16, 56, 56, 96) == (8, 28, False)
  with tpu(KINDS['v5e'], 1, 1, 2):
    assert plan(8, 56, 56, 96) is None  # channels are split
  with tpu(KINDS['v3'], 1, 1, 1):
    assert plan(8, 56, 56, 96) is None


@pytest.mark.parametrize(
  ('fused', 'kernels'),
  # Convolution, its input's gradient and, twice before XLA sees it, its parameters'; MLP and
  # norm, and their derivatives; those of the stem's norm.
  [(True, 10), pytest.param(False, 0, marks=pytest.mark.slow)],
)
def test_a_step_lowered_for_tpus_calls_the_kernels(fused, kernels):
  fields = dict(depths=(1,), widths=(16,), fused=fused, num_classes=3)
  model = build('convnext', **fields, dtype=jnp.bfloat16)
  assert step_lowered(model, 8, 32, 32, 3).count('@tpu_custom_call') == kernels


@pytest.mark.thorough
def test_a_frozen_filter_costs_nothing():
  x, kernel, bias, *_ = arrays(8, 7, 7, 4, (3, 3))
  plan = tpu_depthwise.Plan(7, 7)
  run = lambda x: tpu_depthwise.convolve_and_input(x, kernel, bias, plan)[0].sum()
  assert lowered(jax.value_and_grad(run), x).count('@tpu_custom_call') == 2
