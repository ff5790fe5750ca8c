"""Layer normalisation for TPUs: interpreted on the CPU, or planned without a TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import tpu
from tests.support.tpu import interpreted  # noqa: F401
from vit_jax import sharding
from vit_jax.kernels import tpu_layer_norm

EPS = 1e-6


def arrays(*shape: int):
  """Returns x, scale, bias, and the gradient of the result."""
  keys = jax.random.split(jax.random.key(0), 4)
  x, dy = (2 * jax.random.normal(key, shape) for key in keys[:2])
  scale, bias = (jax.random.normal(key, shape[-1:]) for key in keys[2:])
  return (x + 3).astype(jnp.bfloat16), 1 + scale / 3, bias, dy.astype(jnp.bfloat16)


def reference(x, scale, bias):
  mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / jnp.sqrt(var + EPS) * scale + bias


@functools.partial(jax.jit, static_argnums=0)
def derived(function, x, scale, bias, dy):
  y, pullback = jax.vjp(function, x, scale, bias)
  return y, *pullback(dy)


def kernel(rows):
  return lambda *args: tpu_layer_norm.layer_norm(*args, EPS, rows)


@pytest.mark.parametrize(
  ('shape', 'rows'),
  [
    ((1, 21, 128), 21),  # the last tile has five rows
    ((2, 17, 128), 16),  # the last block has one row
  ],
)
@pytest.mark.usefixtures('interpreted')
def test_the_norm_and_its_derivative(shape, rows):
  inputs = arrays(*shape)
  expected = derived(reference, *(a.astype(jnp.float32) for a in inputs))
  for a, b in zip(derived(kernel(rows), *inputs), expected, strict=True):
    # Rounded to bfloat16 once, by at most 2**-9; sums of float32 are not.
    close = 2**-9 if a.dtype == jnp.bfloat16 else 1e-5
    a, atol = a.astype(jnp.float32), close * np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=close, atol=atol)


@pytest.mark.usefixtures('interpreted')
def test_devices_of_a_mesh_normalise_their_own_images():
  x, *others = arrays(8, 16, 128)
  alone = derived(kernel(16), x, *others)
  mesh = sharding.make_mesh(4, 2, 1)
  with jax.set_mesh(mesh):
    placed = jax.device_put(x, sharding.batch_sharding(mesh))
    result = derived(kernel(16), placed, *others)
  assert result[1].sharding.shard_shape(x.shape) == (1, 16, 128)
  for a, b in zip(result, alone, strict=True):  # sums of images in another order
    close = 0 if a.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (a, b)), rtol=close)


def test_plans():
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
  plan = tpu_layer_norm.plan
  assert plan(shape(2, 40, 256)) is None  # without a mesh
  with tpu.mesh('v3'):
    assert plan(shape(2, 40, 256)) is None
  with tpu.mesh('v5e'):
    assert plan(shape(2, 40, 256)) == 40
    long = plan(shape(1, 4097, 1024))
    assert long % 16 == 0
    assert long * 1024 * 16 <= 6 * 2**20
    assert plan(shape(2, 40, 100)) is None  # registers half full
    assert plan(shape(2, 1, 256)) is None  # a class token alone
  with tpu.mesh('v5e', 2, 1, 1):
    assert plan(shape(1, 40, 256)) is None  # not divided by data
  with tpu.mesh('v5e', 1, 1, 2):
    assert plan(shape(2, 40, 256)) is None  # channels are split
