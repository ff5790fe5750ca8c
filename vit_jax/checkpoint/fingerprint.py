"""A number for the bits of an array, the same on any mesh."""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import trees


def fingerprints(tree) -> dict[str, int]:
  """Returns `{'a/b/c': uint32}`, a fingerprint of the bits of every leaf.

  The sum, mod 2^32, over the leaf's 32-bit words of `mix(word ^ index * golden)`,
  where `mix` is the bijection `lowbias32` of Wellons' hash-prospector (2018) and
  `golden` Knuth's multiplier 0x9E3779B9. A change within one word is always detected,
  any other with probability 1 - 2^-32, swapped rows among them. Integer sums commute:
  the number does not depend on sharding or device count. Computed on the devices, one
  pass per leaf, one small compilation per shape; nothing is gathered.

  Args:
    tree: arrays of any real, integer or boolean dtype of 8 to 64 bits. Types of 8 and
      16 bits count as one word per element, of 64 bits as two. The index is taken mod
      2^32: words exactly 2^32 apart could be swapped unseen.
  """
  return survey(trees.flatten(tree))[0]


def digest(prints: dict[str, int]) -> str:
  """Returns the sha256 (hex) of fingerprints: one name for a whole state."""
  return hashlib.sha256(json.dumps(prints, sort_keys=True).encode()).hexdigest()


def survey(flat: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
  """Returns (fingerprints, number of non-finite elements), both by name."""
  # All leaves are dispatched before the first result is waited for.
  sums = jax.device_get({name: _sums(leaf) for name, leaf in flat.items()})
  return (
    {name: int(print_) for name, (print_, _) in sums.items()},
    {name: int(bad) for name, (_, bad) in sums.items()},
  )


# One variadic reduction rather than two: XLA's CPU backend runs it several times as
# fast, and other backends read the leaf once.
@jax.jit
def _sums(x):
  words, index, stride = _words(x), jnp.uint32(0), 1
  for axis in reversed(range(words.ndim)):
    iota = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    index += iota * jnp.uint32(stride % 2**32)
    stride *= words.shape[axis]
  h = words ^ (index * jnp.uint32(0x9E3779B9))
  h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
  h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
  h ^= h >> 16
  bad = ~jnp.isfinite(x).reshape(x.shape + (1,) * (words.ndim - x.ndim))
  bad = jnp.broadcast_to(bad, words.shape)  # 64-bit: two words per element
  zero = jnp.uint32(0)
  return jax.lax.reduce(
    (h, bad.astype(jnp.uint32)),
    (zero, zero),
    lambda a, b: (a[0] + b[0], a[1] + b[1]),
    tuple(range(words.ndim)),
  )


def _words(x):
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  size = x.dtype.itemsize
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[size]
  return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
