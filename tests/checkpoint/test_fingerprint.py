"""Fingerprints of arrays and trees: the formula, on any devices, of every bit."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.states import make_state
from vit_jax import sharding
from vit_jax.checkpoint import fingerprint


def reference_fingerprint(x):
  """The documented formula in exact Python and numpy integers."""
  x = np.asarray(x)
  if x.dtype == bool:
    words = x.astype(np.uint64)
  else:
    words = x.reshape(-1).view(f'u{min(x.dtype.itemsize, 4)}').astype(np.uint64)
  words, m = words.reshape(-1), np.uint64(2**32 - 1)
  u = np.uint64
  h = words ^ ((np.arange(words.size, dtype=u) * u(0x9E3779B9)) & m)
  h = ((h ^ (h >> u(16))) * u(0x7FEB352D)) & m
  h = ((h ^ (h >> u(15))) * u(0x846CA68B)) & m
  return int((h ^ (h >> u(16))).sum()) % 2**32


def test_fingerprint_is_the_documented_formula():
  kinds = [('float32', shape) for shape in ((), (1,), (5, 3), (2, 3, 4, 5), (0, 4))]
  dtypes = ('bfloat16', 'float16', 'int32', 'uint32', 'int8', 'uint8', 'bool')
  kinds += [(dtype, (5, 3)) for dtype in dtypes]
  rng = np.random.default_rng(0)
  tree = {
    f'{dtype} {shape}': jnp.asarray(rng.normal(size=shape) * 50).astype(dtype)
    for dtype, shape in kinds
  }
  expected = {name: reference_fingerprint(x) for name, x in tree.items()}
  assert fingerprint.fingerprints(tree) == expected


def test_fingerprint_of_64_bit_words():
  x = np.random.default_rng(0).normal(size=(3, 5))
  with jax.enable_x64(True):
    assert fingerprint.fingerprints([x]) == {'0': reference_fingerprint(x)}


def test_fingerprint_does_not_depend_on_sharding_or_devices():
  x = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
  prints = {reference_fingerprint(x)}
  meshes = {
    (1, 1): [()],
    (4, 2): [('fsdp', 'data')],
    (8, 2): [(), ('data',), (None, 'fsdp'), ('fsdp', 'data'), (('data', 'fsdp'),)],
    (8, 8): [('data',)],
  }
  for (count, data), specs in meshes.items():
    mesh = sharding.make_mesh(data, -1, devices=jax.devices()[:count])
    for spec in specs:
      y = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
      prints.add(fingerprint.fingerprints({'x': y})['x'])
  assert len(prints) == 1


def test_a_digest_is_of_the_whole_and_ignores_order():
  prints = fingerprint.fingerprints(make_state(1))
  assert 'params/head/kernel' in prints
  digest = fingerprint.digest(prints)
  assert digest == fingerprint.digest(dict(reversed(prints.items())))
  assert digest != fingerprint.digest(prints | {'step': 0})
