"""The order of examples as arithmetic: nothing to save, nothing to skip.

Position p, counted from the start of training over all hosts, is example
`permutation(epoch)[offset]` with `epoch, offset = divmod(p, N)`. Global batch b takes
positions [bB, (b+1)B), carrying over from one epoch into the next; a host reads its
contiguous slice of each batch, so the order does not depend on the number of hosts.
"""

import functools
from collections.abc import Iterator

import numpy as np

from vit_jax.errors import UserError


class Shuffled:
  """Endless: each epoch an exact permutation of the examples."""

  def __init__(self, num_examples: int, seed: int):
    self.num_examples = num_examples
    self.seed = seed
    # Two: a batch may span the end of an epoch. 8 bytes an example each.
    self._permutation = functools.lru_cache(maxsize=2)(self._make)

  def _make(self, epoch: int) -> np.ndarray:
    bits = np.random.Philox([self.seed, epoch])
    return np.random.Generator(bits).permutation(self.num_examples)

  def indices(self, positions: np.ndarray) -> np.ndarray:
    """Returns the examples' indices, int64 [n], at positions [n] >= 0."""
    epochs, offsets = np.divmod(np.asarray(positions, np.int64), self.num_examples)
    out = np.empty(len(offsets), np.int64)
    for epoch in np.unique(epochs):
      here = epochs == epoch
      out[here] = self._permutation(int(epoch))[offsets[here]]
    return out


class Sequential:
  """Each example once, in the source's order; later positions are padding."""

  def __init__(self, num_examples: int):
    self.num_examples = num_examples

  def indices(self, positions: np.ndarray) -> np.ndarray:
    """Returns the examples' indices, int64 [n]; -1 past the end."""
    positions = np.asarray(positions, np.int64)
    return np.where(positions < self.num_examples, positions, -1)


def host_slice(batch_size: int, host: int, hosts: int) -> tuple[int, int]:
  """Returns (first, size) of a host's part of each global batch.

  Raises:
    UserError: if the hosts cannot share the batch evenly.
  """
  if batch_size < 1 or batch_size % hosts:
    raise UserError(
      f'batch_size={batch_size} is the global batch: it must be a positive multiple '
      f'of the number of hosts, {hosts}.'
    )
  size = batch_size // hosts
  return host * size, size


def positions(
  first_batch: int, last_batch: int | None, batch_size: int, first: int, size: int
) -> Iterator[np.ndarray]:
  """Yields a host's positions, int64 [size], for batches [first_batch, last_batch)."""
  batch = first_batch
  while last_batch is None or batch < last_batch:
    yield np.arange(size, dtype=np.int64) + (batch * batch_size + first)
    batch += 1
