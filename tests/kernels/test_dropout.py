"""Dropout: the hash behind its masks, their independence, the same masks on any mesh."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import sharding
from vit_jax.kernels.layers import keep_mask
from vit_jax.nn.layers import Dropout


def masks(seed, rate, shape):
  run = jax.jit(keep_mask, static_argnums=(1, 2))
  return np.asarray(run(jax.random.key(seed), rate, shape))


def test_masks_are_the_hash_that_they_claim_to_be():
  def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)

  key, shape = jax.random.key(3), (3, 4, 5)
  seed, step = (int(x) for x in jax.random.bits(key, (2,), jnp.uint32))
  weyl = lambda i: (i * 0x9E3779B9 + step) & 0xFFFFFFFF
  expected = np.zeros(shape, bool)
  for *row, column in np.ndindex(shape):
    r = seed
    for i in row:
      r = mix(r ^ weyl(i))
    v = mix(weyl(column))
    x = (r ^ v) * (mix(v) | 1) & 0xFFFFFFFF
    expected[(*row, column)] = x >= round(0.3 * 2**32)
  np.testing.assert_array_equal(masks(3, 0.3, shape), expected)


@pytest.mark.parametrize('rate', [0.1, 0.5])
def test_masks_are_independent(rate):
  shape = (32, 64, 192)
  one, other = (masks(seed, rate, shape) - (1 - rate) for seed in (0, 1))
  n, variance = one.size, rate * (1 - rate)
  # 5 standard deviations of a mean of n draws: once in two million tests by chance.
  assert abs(one.mean()) < 5 * (variance / n) ** 0.5
  pairs = [(one, other), (one[:, :32], one[:, 32:]), (one[..., :96], one[..., 96:])]
  for axis, lag in itertools.product(range(3), (1, 2, 3, 4, 8, 16)):
    ahead = np.moveaxis(one, axis, 0)
    pairs.append((ahead[lag:], ahead[:-lag]))
  for a, b in pairs:
    assert abs((a * b).mean()) < 5 * variance / a.size**0.5
  # Sums over every axis vary as those of independent draws do.
  for axis in range(3):
    sums = one.sum(axis)
    spread = sums.var() / (shape[axis] * variance)
    assert abs(spread - 1) < 5 * (2 / sums.size) ** 0.5 * 1.5  # kurtosis at 0.1


@pytest.mark.parametrize('rate', [0.1, 0.5])
def test_no_two_rows_or_columns_are_alike(rate):
  mask = (masks(0, rate, (1024, 512)) - (1 - rate)) / (rate * (1 - rate)) ** 0.5
  for vectors in (mask, mask.T):
    length = vectors.shape[1]
    pairs = np.triu(vectors @ vectors.T / length**0.5, 1)
    # The largest of half a million normal draws is past 7 once in a million times. Masks
    # at a rate of 0.1 have products with a longer tail.
    assert abs(pairs).max() < 7.5
    count = len(vectors) * (len(vectors) - 1) / 2
    assert abs((pairs**2).sum() / count - 1) < 5 * (2 / count) ** 0.5  # the mean is 1


def test_masks_are_the_same_on_any_mesh():
  shape, key = (16, 8, 32), jax.random.key(0)
  expected = masks(0, 0.1, shape)
  for axes in (dict(data=8), dict(data=2, fsdp=2, tensor=2)):
    mesh = sharding.make_mesh(**axes)
    spec = jax.sharding.PartitionSpec(('data', 'fsdp'), None, 'tensor')
    split = jax.sharding.NamedSharding(mesh, spec)
    result = jax.jit(lambda k: keep_mask(k, 0.1, shape), out_shardings=split)(key)
    np.testing.assert_array_equal(result, expected)


def test_dropout_keeps_the_mean_and_only_in_training():
  x = jnp.ones((64, 64), jnp.bfloat16)
  layer, rngs = Dropout(0.25), {'dropout': jax.random.key(0)}
  y = jax.jit(lambda: layer.apply({}, x, deterministic=False, rngs=rngs))()
  assert y.dtype == x.dtype
  np.testing.assert_array_equal(np.unique(y), jnp.asarray([0, 1 / 0.75], y.dtype))
  np.testing.assert_array_equal(layer.apply({}, x, deterministic=True), x)
  np.testing.assert_array_equal(Dropout(0.0).apply({}, x, deterministic=False), x)
