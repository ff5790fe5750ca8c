"""Decoded images in memory, from the first epoch on.

A cache fills up to its bound and then stays as it is. In training every example comes
once an epoch, in another order each time: the least recently used one is the next to come,
so replacing it would throw out the next hits, while keeping the first examples gives hits
in proportion to the cache. Batches are bitwise the same with a cache, without one, and
while it fills. (Files need no cache here: the operating system caches them.)

A host caches the examples that it has read. In evaluation those are the same each time. In
training an example comes to another host in every epoch, so that with H hosts a cache that
holds everything is full only after several times H epochs: for few hosts, or few images.
"""

import functools
import threading

import numpy as np

from vit_jax.data import lazy_tf
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source, View

KINDS = ('decoded',)
DEFAULT_BYTES = 4 << 30


def attach(
  source: Source, preprocess: Preprocess, kind: str | None, size: int | None
) -> tuple:
  """Returns (source, preprocess), with a cache between them if `kind` is 'decoded'.

  It holds the uint8 pixels after the leading ops of the pipeline that draw no random
  numbers.

  Args:
    size: bound on the bytes of images; None: 4 GiB.

  Raises:
    ValueError: if there is nothing to cache.
  """
  if kind is None:
    if size is not None:
      raise ValueError(f'cache_bytes={size!r} needs a cache: one of {list(KINDS)}')
    return source, preprocess
  if source.streamed:
    raise ValueError(
      f'cache={kind!r}: {source.name} is streamed, from front to back in each epoch, which '
      "a cache would not spare it: leave the cache or 'stream' out"
    )
  if source.image_shape is not None:
    raise ValueError(
      f'cache={kind!r}: {source.name} holds arrays, which are in memory or as cheap: leave '
      'the cache out'
    )
  decoded = DecodedCache(source, preprocess, size or DEFAULT_BYTES)
  return decoded, decoded.preprocess


class _Bounded:
  """A table bounded in bytes, for several threads."""

  def __init__(self, size: int):
    self._size, self._used = size, 0
    self._values: dict = {}
    self._lock = threading.Lock()
    self.full = False

  def get(self, key):
    return self._values.get(key)

  def put(self, key, value, size: int) -> None:
    with self._lock:
      if key in self._values or self.full:
        return
      self.full = self._used + size > self._size
      if not self.full:
        self._values[key] = value
        self._used += size


class DecodedCache(View):
  """A source that returns pixels in the place of encoded images, once it has them.

  `read` returns a cached example as {'pixels': bytes, 'shape': (h, w, C), 'label', ...},
  without an 'image'; `preprocess` takes either.
  """

  def __init__(self, source: Source, preprocess: Preprocess, size: int):
    """Raises ValueError if the pipeline has no fixed pixels to cache."""
    super().__init__(source)
    self.preprocess = Resumed(preprocess, self)
    self._cached = _Bounded(size)
    # Labels of examples that were read and are not yet decoded.
    self._waiting: dict[int, dict] = {}

  def read(self, indices: np.ndarray) -> list[dict]:
    indices = np.asarray(indices)
    out = [self._cached.get(int(i)) for i in indices]
    missing = [i for i, example in enumerate(out) if example is None]
    for i, example in zip(missing, self.source.read(indices[missing]), strict=True):
      out[i] = example
      if 'error' not in example and not self._cached.full:
        other = {key: value for key, value in example.items() if key != 'image'}
        self._waiting[int(indices[i])] = other
    return out

  def keep(self, number, pixels) -> bool:
    """Caches the pixels uint8 [h, w, C] of an example that was read; returns True."""
    other = self._waiting.pop(int(number), None)
    if other is not None:
      # A copy: the array is TensorFlow's.
      value = {**other, 'pixels': pixels.tobytes(), 'shape': pixels.shape}
      self._cached.put(int(number), value, pixels.nbytes)
    return True


class Resumed:
  """A `Preprocess` that takes pixels from a `DecodedCache`, or adds them to it.

  The ops before the first that draws random numbers, or maps more than the image, run once
  per image; the other ops run on the cached pixels.
  """

  def __init__(self, preprocess: Preprocess, cache: DecodedCache):
    self._whole, self._cache = preprocess, cache
    self.label, self.draws = preprocess.label, preprocess.draws
    self.one_by_one = True
    self.inputs = preprocess.inputs | {
      'number': ((), np.dtype(np.int64)),
      'shape': ((3,), np.dtype(np.int32)),
    }
    ops = preprocess.on_host
    # Ops that map boxes too need them beside the image, not in the cache.
    alone = lambda op: not {*op.maps} & ({*preprocess.inputs} - {'image'})
    once = (not op.draws and alone(op) for op in ops)
    self._fixed = next((i for i, fixed in enumerate(once) if not fixed), len(ops))
    # A crop right after `decode` decodes no more than itself: whole photographs in
    # memory would be ten times the size of their files, and decoding them slower.
    if self._fixed == 1 and any(op.crop for op in ops[1:2]):
      raise ValueError(
        f"cache='decoded': in pp {preprocess.pp!r} the random {ops[1].text} follows decode "
        'at once, so there are no fixed pixels to cache. Put a resize before it: '
        "'decode|resize_small(256)|...'"
      )

  @property
  def spec(self) -> dict:
    return self._whole.spec

  def traced(self):
    """Returns `self`, untraced, because a graph that holds this cache cannot be shared."""
    return self

  def row(self, example: dict, index: int) -> dict:
    if 'pixels' in example:
      header = {'orientation': 1, 'upright': (0, 0), 'shape': example['shape']}
      row = {'image': example['pixels'], **header, 'number': index}
      return {**self._whole.others(example), **row}
    return {**self._whole.row(example, index), 'shape': (0, 0, 0), 'number': index}

  def __call__(self, row: dict, u) -> dict:
    tf = lazy_tf.load()
    head, tail, spec = self._halves

    def decode():
      inputs = {name: row[name] for name in head.inputs}
      pixels = head.traced()(inputs, u)['image']
      kept = tf.numpy_function(self._cache.keep, [row['number'], pixels], tf.bool)
      with tf.control_dependencies([kept]):
        return tf.identity(pixels)

    def cached():
      return tf.reshape(tf.io.decode_raw(row['image'], tf.uint8), row['shape'])

    pixels = tf.cond(row['shape'][0] > 0, cached, decode)
    return tail.resume(tf.ensure_shape(pixels, spec), row, u)

  @functools.cached_property
  def _halves(self) -> tuple:
    """Returns the ops before and after the cached pixels, and the shape of those."""
    tf = lazy_tf.load()
    for at in range(self._fixed, 0, -1):  # `decode` alone gives uint8
      head, tail = self._whole.parts(at)
      pixels = head.traced().structured_outputs['image']
      if pixels.dtype == tf.uint8:
        break
    return head, tail, pixels.shape
