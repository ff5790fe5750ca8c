"""Reads shards from front to back, for files that are slow to read at random.

Every host has its own shards, every `hosts`-th, and goes through them in epochs of its own.
A shard is divided into runs of a few hundred neighbouring records. An epoch takes the runs of
all shards in a random order. The resulting sequence of records is cut into windows of
`shuffle_buffer` records, and each window is shuffled. While one window is used, the next one
is read, so that memory holds the encoded records of two windows.

The shuffle is arithmetic. Only the reading has a state, which may be dropped at any time: a
jump to any step reads the window of that step and nothing before it.

Unlike for all other sources, the order depends on the number of hosts. So does the
fingerprint, and a run cannot resume with another number of hosts.
"""

import concurrent.futures
import functools
import logging

import numpy as np

from vit_jax.data.sources.base import View, fingerprint

# Number of records in a run: large enough that the seek (10 ms on a disk) takes less time
# than reading (28 MB of ImageNet, 0.2 s), and small enough that a window mixes many shards.
RUN = 256
# Number of runs that are read at the same time.
_READERS = 8


class Stream(View):
  """Wraps a source of shards and reads it as a stream; also serves as the order of one host.

  Its length is the number of examples of all hosts, an epoch of the run.
  """

  def __init__(
    self, source, buffer: int, seed: int, batch_size: int, host: int, hosts: int
  ):
    """Plans the runs; reads nothing yet.

    Args:
      source: a `shards.Shards`.
      buffer: number of records in a window.
    """
    super().__init__(source)
    bounds = source.pieces.bounds
    first, last = bounds[:-1], bounds[1:]
    if len(first) < hosts:
      raise ValueError(
        f'{self.name}: a stream gives every host its own shards, but there are '
        f'{len(first)} for {hosts} hosts'
      )
    shares = [int((last - first)[i::hosts].sum()) for i in range(hosts)]
    if max(shares) > 1.1 * min(shares):
      logging.getLogger(__name__).warning(
        '%s: a host has %d to %d examples of its own; a host with few sees them more '
        'often. A multiple of %d shards would even it out.',
        *(self.name, min(shares), max(shares), hosts),
      )
    starts = [np.arange(a, b, RUN) for a, b in zip(first, last, strict=True)]
    self._starts = np.concatenate(starts[host::hosts])
    ends = np.repeat(last[host::hosts], [len(x) for x in starts[host::hosts]])
    self._sizes = np.minimum(ends - self._starts, RUN)
    self._num = int(self._sizes.sum())
    self._buffer, self._seed, self._host = buffer, seed, host
    self._batch_size, self._share = batch_size, batch_size // hosts
    self.fingerprint = fingerprint((source.fingerprint, 'stream', buffer, RUN, hosts))
    self._runs = functools.lru_cache(maxsize=2)(self._draw_runs)
    self._shuffle = functools.lru_cache(maxsize=2)(self._draw_shuffle)
    self._window = functools.lru_cache(maxsize=2)(self._draw_window)
    self._reading = functools.lru_cache(maxsize=2)(self._read_window)
    self._pool = concurrent.futures.ThreadPoolExecutor(_READERS)

  def indices(self, positions: np.ndarray) -> np.ndarray:
    """Returns the examples' indices, int64 [n], at this host's positions [n] >= 0."""
    out = np.empty(len(positions), np.int64)
    for epoch, window, here, slots in self._windows(positions):
      out[here] = self._window(epoch, window)[slots]
    return out

  def read(self, indices: np.ndarray) -> list[dict]:
    return self.source.read(indices)

  def read_at(self, positions: np.ndarray, indices: np.ndarray) -> list[dict]:
    out: list = [None] * len(positions)
    for epoch, window, here, slots in self._windows(positions):
      runs = self._reading(epoch, window)
      ends = (window + 1) * self._buffer >= self._num
      # Start to read the next window.
      self._reading(*((epoch + 1, 0) if ends else (epoch, window + 1)))
      places = self._shuffle(epoch, window)[slots]
      for i, place in zip(here.tolist(), places.tolist(), strict=True):
        record = runs[place // RUN].result()[place % RUN]
        out[i] = self.source.example(record, indices[i])
    return out

  def _windows(self, positions):
    """Yields (epoch, window, indices into `positions`, their slots in the window)."""
    batches, slots = np.divmod(np.asarray(positions, np.int64), self._batch_size)
    slots = slots - self._host * self._share
    assert np.all((slots >= 0) & (slots < self._share)), 'positions of another host'
    # Split the count of examples that this host has used into epoch, window and slot.
    epochs, offsets = np.divmod(batches * self._share + slots, self._num)
    windows, slots = np.divmod(offsets, self._buffer)
    for epoch, window in sorted({*zip(epochs.tolist(), windows.tolist(), strict=True)}):
      here = np.flatnonzero((epochs == epoch) & (windows == window))
      yield epoch, window, here, slots[here]

  def _draw_runs(self, epoch):
    """Returns the order of the runs in an epoch, and their first offsets: int64 [runs] each."""
    bits = np.random.Philox([self._seed, epoch, self._host, 1])
    order = np.random.Generator(bits).permutation(len(self._starts))
    sizes = self._sizes[order]
    return order, np.cumsum(sizes) - sizes

  def _file_order(self, epoch, window):
    """Returns the indices of a window's examples in the order in which they are read."""
    start = window * self._buffer
    offsets = np.arange(start, min(start + self._buffer, self._num))
    order, begins = self._runs(epoch)
    run = np.searchsorted(begins, offsets, 'right') - 1
    return self._starts[order[run]] + offsets - begins[run]

  def _draw_shuffle(self, epoch, window):
    bits = np.random.Philox([self._seed, epoch, self._host, window, 2])
    size = min(self._buffer, self._num - window * self._buffer)
    return np.random.Generator(bits).permutation(size)

  def _draw_window(self, epoch, window):
    return self._file_order(epoch, window)[self._shuffle(epoch, window)]

  def _read_window(self, epoch, window) -> list[concurrent.futures.Future]:
    """Starts to read a window; each of the returned futures has RUN records."""
    indices = self._file_order(epoch, window)
    parts = np.split(indices, range(RUN, len(indices), RUN))
    return [self._pool.submit(self.source.records, part) for part in parts]
