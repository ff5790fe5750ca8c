"""Reading from front to back, for files that are slow to read at random.

The shuffle is still arithmetic; only the reading has a state, which could be dropped at any
time. A host has shards of its own, every `hosts`-th, and goes through them in epochs of its
own. An epoch takes the shards' runs, a few hundred neighbouring records each, in a random
order; that sequence of records is cut into windows of `shuffle_buffer`, and each window is
shuffled. While one window is handed out, the next is read at the same pace, so that memory
always holds one buffer of encoded records.

So a jump to any step skips nothing: its window is computed, and nothing before that window is
read. It costs as much as the first start, which fills the buffer, and it reads again the
records of the window that had already been handed out: one to two buffers of records, read
from front to back before the first batch.

The order depends on the number of hosts, unlike that of all other sources. So does the
fingerprint, and a run cannot resume with another number.
"""

import collections
import concurrent.futures
import functools
import itertools
import logging
import threading
from collections.abc import Iterator

import numpy as np

from vit_jax.data.sources.base import View, fingerprint

# Records in a run: long enough that the seek (10 ms on a disk) takes less time than reading
# (28 MB of ImageNet, 0.2 s), short enough that a window mixes runs of many shards.
RUN = 256
# Runs that are read ahead, at the same time.
_AHEAD = 8


class Stream(View):
  """A source of shards, read as a stream; also the order of it, on one host.

  Its length is that of all hosts' examples: an epoch of the run.
  """

  def __init__(
    self, source, buffer: int, seed: int, batch_size: int, host: int, hosts: int
  ):
    """Computes; reads nothing yet.

    Args:
      source: has `bounds`, int64 [shards + 1], the first example of each shard and the
        end; `run(start, stop)`, the records of neighbouring examples of one shard; and
        `example(record, index)`.
      buffer: records of a window.

    Raises:
      ValueError: if there are fewer shards than hosts.
    """
    super().__init__(source)
    first, last = source.bounds[:-1], source.bounds[1:]
    if len(first) < hosts:
      raise ValueError(
        f'{self.name}: a stream gives every host its own shards, but there are '
        f'{len(first)} for {hosts} hosts. Write more shards, or take another split'
      )
    shares = [int((last - first)[i::hosts].sum()) for i in range(hosts)]
    if max(shares) > 1.1 * min(shares):
      logging.getLogger(__name__).warning(
        '%s: hosts have %d to %d examples of their own: those of few are seen more '
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
    self._window = functools.lru_cache(maxsize=4)(self._draw_window)
    self._lock = threading.Lock()
    self._pool = concurrent.futures.ThreadPoolExecutor(_AHEAD)
    self._next = -1  # the place that `read_at` expects

  # --- the order -------------------------------------------------------------------

  def indices(self, positions: np.ndarray) -> np.ndarray:
    """Returns the examples' indices, int64 [n], at this host's positions [n] >= 0."""
    return self._index_of(self._shuffled(self._places(positions)))

  def _places(self, positions):
    """Returns how many examples this host hands out before each position."""
    batches, slots = np.divmod(np.asarray(positions, np.int64), self._batch_size)
    slots = slots - self._host * self._share
    assert np.all((slots >= 0) & (slots < self._share)), 'positions of another host'
    return batches * self._share + slots

  def _shuffled(self, places):
    """Returns where in the endless sequence of records read each place's record is."""
    epochs, offsets = np.divmod(places, self._num)
    windows, inside = np.divmod(offsets, self._buffer)
    out = np.empty(len(places), np.int64)
    for epoch, window in set(zip(epochs.tolist(), windows.tolist(), strict=True)):
      here = (epochs == epoch) & (windows == window)
      start = epoch * self._num + window * self._buffer
      out[here] = start + self._window(epoch, window)[inside[here]]
    return out

  def _index_of(self, sequence):
    epochs, offsets = np.divmod(sequence, self._num)
    out = np.empty(len(sequence), np.int64)
    for epoch in np.unique(epochs):
      here = epochs == epoch
      order, begins = self._runs(int(epoch))
      run = np.searchsorted(begins, offsets[here], 'right') - 1
      out[here] = self._starts[order[run]] + offsets[here] - begins[run]
    return out

  def _draw_runs(self, epoch):
    """Returns the runs of an epoch, and where in it each begins: int64 [runs] each."""
    bits = np.random.Philox([self._seed, epoch, self._host, 1])
    order = np.random.Generator(bits).permutation(len(self._starts))
    sizes = self._sizes[order]
    return order, np.cumsum(sizes) - sizes

  def _draw_window(self, epoch, window):
    bits = np.random.Philox([self._seed, epoch, self._host, window, 2])
    size = min(self._buffer, self._num - window * self._buffer)
    return np.random.Generator(bits).permutation(size)

  # --- the reading -----------------------------------------------------------------

  def read(self, indices: np.ndarray) -> list[dict]:
    return self.source.read(indices)

  def read_at(self, positions: np.ndarray, indices: np.ndarray) -> list[dict]:
    if not len(positions):
      return []
    with self._lock:
      places = self._places(positions)
      if places[0] != self._next or np.any(np.diff(places) != 1):
        self._start(int(places[0]))
      self._next = -1  # begin again, should reading fail
      self._fill(int(places[-1]) + self._buffer)
      self._next = int(places[-1]) + 1
      records = [self._held.pop(s) for s in self._shuffled(places).tolist()]
    return [
      self.source.example(record, index)
      for record, index in zip(records, indices, strict=True)
    ]

  def _start(self, place: int) -> None:
    """Begins to read at the start of a place's window."""
    epoch, offset = divmod(place, self._num)
    window, inside = divmod(offset, self._buffer)
    self._read = epoch * self._num + window * self._buffer  # up to here
    self._held: dict[int, bytes | Exception] = {}  # by place in the sequence read
    # Handed out before: not to be held again.
    gone = self._window(epoch, window)[:inside] + self._read
    self._gone = set(gone.tolist())
    self._todo = self._runs_from(self._read)
    self._reading: collections.deque = collections.deque()

  def _runs_from(self, place: int) -> Iterator[tuple[int, int]]:
    """Yields (first example, end) of the runs read from a place on, forever."""
    first, offset = divmod(place, self._num)
    for epoch in itertools.count(first):
      order, begins = self._runs(epoch)
      run = int(np.searchsorted(begins, offset, 'right')) - 1
      skip, offset = offset - int(begins[run]), 0
      for i in order[run:].tolist():
        start, size = int(self._starts[i]), int(self._sizes[i])
        yield start + skip, start + size
        skip = 0

  def _fill(self, end: int) -> None:
    """Reads up to a place of the sequence, and asks for the next runs."""
    while self._read < end:
      while len(self._reading) < _AHEAD:
        self._reading.append(self._pool.submit(self.source.run, *next(self._todo)))
      for record in self._reading.popleft().result():
        if self._read in self._gone:
          self._gone.remove(self._read)
        else:
          self._held[self._read] = record
        self._read += 1
