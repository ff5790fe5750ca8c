"""Fingerprints: one number for all bits of an array, the same on any mesh."""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import trees

# Elements of a leaf that the host sums, at most.
_SMALL = 2**16


def fingerprints(tree) -> dict[str, int]:
  """Returns `{'a/b/c': uint32}`, a fingerprint of the bits of every leaf.

  A fingerprint is the sum, mod 2^32, of `mix(word ^ index * golden)` over the 32-bit words
  of the leaf. `mix` is the bijection `lowbias32` of Wellons' hash-prospector (2018), and
  `golden` is Knuth's multiplier 0x9E3779B9. A change within one word is always detected.
  Any other change, such as swapped rows, is detected with probability 1 - 2^-32. Integer
  sums commute, so that the number depends neither on the sharding nor on the number of
  devices. Large leaves are summed on their devices in one pass, with one compilation per
  shape, and nothing is gathered. The host sums small leaves, which compiles nothing.

  Args:
    tree: arrays of any real, integer or boolean dtype of 8 to 64 bits. An element of 8 or
      16 bits counts as one word, and one of 64 bits as two. The index is taken mod 2^32, so
      swapping two words exactly 2^32 apart would go unnoticed.
  """
  return survey(trees.flatten(tree))[0]


def digest(prints: dict[str, int]) -> str:
  """Returns the sha256 (hexadecimal) of all fingerprints; it identifies a whole state."""
  return hashlib.sha256(json.dumps(prints, sort_keys=True).encode()).hexdigest()


def survey(flat: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
  """Returns (fingerprints, number of non-finite elements), both by name."""
  is_small = lambda x: getattr(x, 'is_fully_addressable', True) and x.size <= _SMALL
  # Dispatch all leaves before waiting for the first result.
  sums = {name: _sums(x) for name, x in flat.items() if not is_small(x)}
  small = {name: x for name, x in flat.items() if is_small(x)}
  sums, small = jax.device_get((sums, small))
  sums |= {name: _sums_on_host(x) for name, x in small.items()}
  return (
    {name: int(sums[name][0]) for name in flat},
    {name: int(sums[name][1]) for name in flat},
  )


def _sums_on_host(x):
  x = np.asarray(x).reshape(-1)
  words = x if x.dtype == bool else x.view(_unsigned(x))
  words = words.astype(np.uint32)
  index = np.arange(words.size, dtype=np.uint32)
  return _mix(words, index).sum(dtype=np.uint32), (~np.isfinite(x)).sum()


# One variadic reduction instead of two: XLA's CPU backend runs it several times as fast, and
# other backends read the leaf only once.
@jax.jit
def _sums(x):
  words, index, stride = _words(x), jnp.uint32(0), 1
  for axis in reversed(range(words.ndim)):
    iota = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    index += iota * jnp.uint32(stride % 2**32)
    stride *= words.shape[axis]
  bad = ~jnp.isfinite(x).reshape(x.shape + (1,) * (words.ndim - x.ndim))
  # Elements of 64 bits have two words.
  bad = jnp.broadcast_to(bad, words.shape)
  zero = jnp.uint32(0)
  return jax.lax.reduce(
    (_mix(words, index), bad.astype(jnp.uint32)),
    (zero, zero),
    lambda a, b: (a[0] + b[0], a[1] + b[1]),
    tuple(range(words.ndim)),
  )


def _mix(words, index):
  h = words ^ (index * np.uint32(0x9E3779B9))
  h = (h ^ (h >> 16)) * np.uint32(0x7FEB352D)
  h = (h ^ (h >> 15)) * np.uint32(0x846CA68B)
  return h ^ (h >> 16)


def _words(x):
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  return jax.lax.bitcast_convert_type(x, _unsigned(x)).astype(jnp.uint32)


def _unsigned(x):
  return {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}[x.dtype.itemsize]
