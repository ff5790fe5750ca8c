"""Depthwise convolutions against XLA's, whose program they are but on CPUs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.derivatives import assert_same_derivatives, normal
from vit_jax import sharding
from vit_jax.kernels import depthwise as kernels
from vit_jax.kernels.depthwise import depthwise
from vit_jax.nn.stack import remat_policy


@pytest.fixture(autouse=True)
def _no_map_is_small(monkeypatch):
  monkeypatch.setattr(kernels, 'SMALL', 0)


def plain(x, kernel, stride=1, padding=((1, 1), (1, 1))):
  options = dict(feature_group_count=x.shape[-1])
  options['dimension_numbers'] = ('NHWC', 'HWIO', 'NHWC')
  return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, padding, **options)


ours = functools.partial(depthwise, stride=1, padding=((1, 1), (1, 1)))
X, KERNEL = (2, 6, 5, 3), (3, 3, 1, 3)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(fn, x, kernel):
  y, pullback = jax.vjp(fn, x, kernel)
  return y, *pullback(2 * y)


def assert_close(results, expected):
  # Each is a sum of products of normal numbers, in another order: float32 rounds it to
  # within 6e-8 of the largest partial sum, a few times over.
  for a, b in zip(results, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize(
  ('shape', 'kernel', 'stride', 'padding'),
  [
    ((2, 9, 8, 4), (3, 3), 2, ((1, 1), (1, 1))),  # the last column is not read
    ((1, 5, 14, 2), (3, 3), 4, ((1, 1), (1, 1))),
    ((2, 5, 6, 3), (2, 3), 3, ((0, 1), (2, 0))),  # rows and columns differ
    ((1, 4, 4, 2), (1, 1), 1, ((0, 0), (2, 1))),  # wider than the kernel reaches
  ],
)
def test_values_and_gradients(shape, kernel, stride, padding, monkeypatch):
  monkeypatch.setattr(kernels, 'BLOCK', 4)  # several blocks, and some beyond the map
  x, kernel = normal(*shape), normal(*kernel, 1, shape[-1])
  geometry = dict(stride=stride, padding=padding)
  expected, results = (
    value_and_gradients(functools.partial(fn, **geometry), x, kernel)
    for fn in (plain, depthwise)
  )
  assert_close(results, expected)


def test_derivatives_can_be_nested():
  assert_same_derivatives(ours, plain, normal(*X), normal(*KERNEL))


def test_bfloat16_is_summed_in_float32():
  x, kernel = (jnp.asarray(normal(*shape), jnp.bfloat16) for shape in (X, KERNEL))
  results = value_and_gradients(ours, x, kernel)
  expected = plain(x.astype(jnp.float32), kernel.astype(jnp.float32))
  assert all(a.dtype == jnp.bfloat16 for a in results)
  np.testing.assert_array_equal(results[0], expected.astype(jnp.bfloat16))


def text(fn, *platforms):
  args = [jax.ShapeDtypeStruct(shape, 'float32') for shape in (X, KERNEL)]
  traced = value_and_gradients.trace(fn, *args)
  return traced.lower(lowering_platforms=platforms).as_text()


def test_programs_of_platforms():
  convolutions = lambda fn, platform: sorted(
    re.findall(r'stablehlo.convolution\(.*?\)(.*)', text(fn, platform))
  )
  for platform in ('tpu', 'cuda'):
    assert len(convolutions(plain, platform)) == 3
    assert convolutions(ours, platform) == convolutions(plain, platform)
    assert 'stablehlo.while' not in text(ours, platform)
  assert len(convolutions(plain, 'cpu')) == 3
  assert not convolutions(ours, 'cpu')


def test_one_file_for_two_platforms():
  x, kernel = normal(*X), normal(*KERNEL)
  args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, kernel)]
  program = export.export(jax.jit(ours), platforms=('cpu', 'tpu'))(*args)
  assert_close([program.call(x, kernel)], [plain(x, kernel)])


@pytest.mark.parametrize('manual', [False, True])
def test_on_eight_devices(manual):
  mesh = sharding.make_mesh()
  spec = P(('data', 'fsdp'))
  x, kernel = normal(8, 5, 5, 2), normal(3, 3, 1, 2)
  fn = ours
  if manual:
    fn = jax.shard_map(ours, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
  placed = jax.device_put(x, NamedSharding(mesh, spec))
  with jax.set_mesh(mesh):
    results = value_and_gradients(fn, placed, kernel)
  assert results[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
  assert_close(results, value_and_gradients(plain, x, kernel))


def residuals(fn):
  _, pullback = jax.vjp(fn, normal(*X), normal(*KERNEL))
  return sorted(leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.ndim)


def test_residuals_are_those_of_xlas_convolution():
  assert residuals(ours) == sorted([X, KERNEL])
  for name, scan in (('dots_saveable', False), ('full', False), ('none', True)):
    policy = remat_policy(name, scan)
    stored = lambda fn, policy=policy: residuals(
      jax.checkpoint(lambda *args: jnp.sin(fn(*args)), policy=policy)
    )
    assert stored(ours) == stored(plain), name
