"""Random masks at the cost of a few operations an element, the same on any mesh."""

import jax
import jax.numpy as jnp


def keep_mask(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
  """Returns bool `shape`, False with probability `rate`, element by element.

  Each element's number is a hash of the key and of its own index: a pure function of
  where it stands in the whole array, whatever the devices that share it, and cheap enough
  to be computed again where it is needed instead of being stored. With Threefry, JAX's
  generator, dropout 0.1 costs a step of ViT-B/16 69 % more cycles on a TPU v5e
  (benchmarks/NOTES.md). Fit for dropout, not for cryptography or for initial values.

  Args:
    key: of any of JAX's generators, which it is drawn from.
    rate: in [0, 1), met to 2**-32.
    shape: of the whole array, also where several devices share it.
  """
  return _words(key, shape) >= jnp.uint32(round(rate * 2**32))


def _words(key, shape) -> jax.Array:
  """Returns uint32 `shape`, uniform.

  Every row has a word r, every column two, v and w, and an element is (r ^ v) w: this is
  multiply-shift hashing (Dietzfelbinger et al., "A reliable randomized algorithm for the
  closest-pair problem", 1997). w is odd, so that the product is uniform if r is. The high
  bits, which decide, depend on all bits below. Without v two columns are correlated where
  one's w happens to be a small multiple of the other's.
  """
  seed, step = jax.random.bits(key, (2,), jnp.uint32)
  row = seed
  # Axis by axis: the first ones are few numbers, and no index overflows 32 bits.
  for axis in range(len(shape) - 1):
    part = (*shape[: axis + 1], *(1,) * (len(shape) - axis - 1))
    row = _mix(row ^ _weyl(part, axis, step))
  v = _mix(_weyl(shape[-1:], 0, step))
  return (row ^ v) * (_mix(v) | 1)


def _weyl(shape, axis, step):
  """Returns uint32 `shape`: along `axis` a Weyl sequence, step + index * _GOLDEN."""
  return jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(_GOLDEN) + step


# 2**32 / golden ratio: spreads neighbours over all bits (Steele et al., "Fast splittable
# pseudorandom number generators", 2014).
_GOLDEN = 0x9E3779B9


def _mix(x):
  """A bijection of uint32 in which every bit of x reaches every bit.

  lowbias32 of C. Wellons, "Prospecting for hash functions", 2018.
  """
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
