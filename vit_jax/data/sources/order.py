"""The order of examples as arithmetic: nothing to save, nothing to skip.

Position p, counted from the start of training over all hosts, is example
`permutation(epoch)[offset]` with `epoch, offset = divmod(p, N)`. Global batch b takes
positions [bB, (b+1)B), carrying over from one epoch into the next; a host reads its
contiguous slice of each batch, so the order does not depend on the number of hosts.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np

# Up to this number of examples, an order is a permutation held in memory. At the limit, two
# epochs of 8 bytes an example are half a gigabyte per host, and an epoch takes 2.4 s to
# draw. ImageNet-21k (14 million) is below the limit. The order of larger sets (JFT, LAION)
# is computed position by position.
EXACT = 2**25


def shuffle(num_examples: int, seed: int) -> 'Shuffled':
  """Returns the endless order of training: `Scattered` above EXACT, else `Shuffled`."""
  return (Shuffled if num_examples <= EXACT else Scattered)(num_examples, seed)


class Shuffled:
  """An endless order in which each epoch is a permutation of the examples."""

  def __init__(self, num_examples: int, seed: int):
    self.num_examples, self.seed = num_examples, seed
    # Keep two epochs, because a batch may span the end of an epoch.
    self._drawn = functools.lru_cache(maxsize=2)(self._draw)

  def indices(self, positions: np.ndarray) -> np.ndarray:
    """Returns the examples' indices, int64 [n], at positions [n] >= 0."""
    epochs, offsets = np.divmod(np.asarray(positions, np.int64), self.num_examples)
    out = np.empty(len(offsets), np.int64)
    for epoch in np.unique(epochs):
      here = epochs == epoch
      out[here] = self._look_up(offsets[here], self._drawn(int(epoch)))
    return out

  def _draw(self, epoch: int) -> np.ndarray:
    bits = np.random.Philox([self.seed, epoch])
    return np.random.Generator(bits).permutation(self.num_examples)

  def _look_up(self, offsets, permutation):
    return permutation[offsets]


class Scattered(Shuffled):
  """`Shuffled` without memory: a keyed bijection of [0, N), a different one per epoch.

  A generalised Feistel network on [0, a) x [0, b) with a * b barely above N, applied again to
  results outside of [0, N) (Black and Rogaway 2002, "Ciphers with Arbitrary Finite
  Domains": their generalised-Feistel and cycle-walking ciphers together). Since
  a * b - N < a, about one place in sqrt(N) walks at all. A round adds to one half a
  keyed hash of the other, the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
  Luby and Rackoff's theorem requires four rounds; eight cost little.

  Args:
    num_examples: N, up to 2**48, so a half has up to 24 bits. The hash has 32 bits. When it
      is scaled to the size of a half, the frequencies of its values differ by at most 1 in
      2**8.
  """

  _ROUNDS = 8

  def __init__(self, num_examples: int, seed: int):
    assert 1 <= num_examples <= 2**48, num_examples
    super().__init__(num_examples, seed)
    self._a = math.isqrt(num_examples - 1) + 1
    self._b = -(-num_examples // self._a)

  def _draw(self, epoch: int) -> np.ndarray:
    return np.random.Philox([self.seed, epoch]).random_raw(self._ROUNDS)

  def _look_up(self, offsets, keys):
    x = self._network(offsets.astype(np.uint64), keys)
    while len(outside := np.flatnonzero(x >= self.num_examples)):
      x[outside] = self._network(x[outside], keys)
    return x

  def _network(self, x, keys):
    a, b = np.uint64(self._a), np.uint64(self._b)
    right, left = np.divmod(x, a)
    for i, key in enumerate(keys):
      if i % 2:
        right = _add(right, left, key, b)
      else:
        left = _add(left, right, key, a)
    return left + a * right


def _add(x, other, key, modulus):
  """Returns (x + hash of `other`) % modulus, for x below it, uint64."""
  z = other ^ key
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  z ^= z >> np.uint64(31)
  x = x + ((z >> np.uint64(32)) * modulus >> np.uint64(32))
  return np.where(x >= modulus, x - modulus, x)


class Repeated:
  """Repeated augmentation: an order that has an image several times in a batch.

  As DeiT's sampler: an epoch of N positions has the first N / times images of its
  permutation. The copies of an image are apart in the batch, because mixup mixes neighbours.
  """

  def __init__(self, order, num_examples: int, times: int, batch_size: int):
    self._order, self._num, self._times = order, num_examples, times
    # The offset in a batch of each of its positions, 0, 3, 6, ..., 1, 4, ..., 2, 5, ...
    starts = [np.arange(i, batch_size, times) for i in range(times)]
    self._offsets = np.concatenate(starts)

  def indices(self, positions: np.ndarray) -> np.ndarray:
    """Returns the examples' indices, int64 [n], at positions [n] >= 0."""
    positions = np.asarray(positions, np.int64)
    places = positions % len(self._offsets)
    epochs, offsets = np.divmod(positions - places + self._offsets[places], self._num)
    return self._order.indices(epochs * self._num + offsets // self._times)


class Sequential:
  """Each example once, in the order of the source; later positions are padding."""

  def __init__(self, num_examples: int):
    self.num_examples = num_examples

  def indices(self, positions: np.ndarray) -> np.ndarray:
    """Returns the examples' indices, int64 [n]; -1 past the end."""
    positions = np.asarray(positions, np.int64)
    return np.where(positions < self.num_examples, positions, -1)


def host_slice(batch_size: int, host: int, hosts: int) -> tuple[int, int]:
  """Returns (first position, size) of a host's part of each global batch."""
  if batch_size < 1 or batch_size % hosts:
    raise ValueError(
      f'batch_size={batch_size} is the global batch: it must be a positive multiple '
      f'of the number of hosts, {hosts}'
    )
  size = batch_size // hosts
  return host * size, size


def batch_positions(
  first_batch: int, last_batch: int | None, batch_size: int, first: int, size: int
) -> Iterator[np.ndarray]:
  """Yields a host's positions, int64 [size], for batches [first_batch, last_batch)."""
  batch = first_batch
  while last_batch is None or batch < last_batch:
    yield np.arange(size, dtype=np.int64) + (batch * batch_size + first)
    batch += 1
