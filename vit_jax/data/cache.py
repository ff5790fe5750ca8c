"""Examples kept in memory after they were first read, for epochs after the first.

A cache fills up to its bound and then stays as it is. In training every example comes
once an epoch, in another order each time: what was used least recently is what comes
soonest, so throwing that out for something new would throw out the next hits, while
keeping the first gives hits in proportion to what fits. Batches are bitwise the same
with a cache, without, and while it fills.

A host keeps what it has read. In evaluation that is the same each time. In training an
example comes to another host in every epoch, so that with H hosts a cache that holds
everything is full only after several times H epochs: for few hosts, or few images.
"""

import functools
import threading

import numpy as np

from vit_jax.data import lazy_tf
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source, View
from vit_jax.errors import UserError, choose

KINDS = ('raw', 'decoded')
DEFAULT_BYTES = 4 << 30


def attach(
  source: Source, preprocess: Preprocess, kind: str | None, size: int | None
) -> tuple:
  """Returns (source, preprocess), read through a cache if there is to be one.

  Args:
    kind: 'raw' keeps encoded images; 'decoded' keeps uint8 pixels after the leading ops
      of the pipeline that draw no random numbers and give uint8; None keeps nothing.
    size: bound on the bytes kept, of images alone; None: 4 GiB.

  Raises:
    UserError: if there is nothing to keep, or an argument is wrong.
  """
  if kind is None:
    if size is not None:
      raise UserError(f'cache_bytes={size!r} needs a cache: one of {list(KINDS)}.')
    return source, preprocess
  choose('cache', kind, KINDS, ', or None')
  size = DEFAULT_BYTES if size is None else size
  if not isinstance(size, int) or size < 1:
    raise UserError(f'cache_bytes={size!r} must be a positive integer.')
  if source.streamed:
    raise UserError(
      f'cache={kind!r}: {source.name} is streamed, from front to back in each epoch, '
      "which a cache would not spare it: leave the cache or 'stream' out."
    )
  if source.image_shape is not None:
    raise UserError(
      f'cache={kind!r}: {source.name} holds arrays, which are in memory or as cheap: '
      'leave the cache out.'
    )
  if kind == 'raw':
    return RawCache(source, size), preprocess
  decoded = DecodedCache(source, preprocess, size)
  return decoded, decoded.preprocess


class _Bounded:
  """Values by key, up to a number of bytes; for several threads."""

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


class RawCache(View):
  """Keeps encoded images."""

  def __init__(self, source: Source, size: int):
    super().__init__(source)
    self._kept = _Bounded(size)

  def read(self, indices: np.ndarray) -> list[dict]:
    indices = np.asarray(indices)
    out = [self._kept.get(int(i)) for i in indices]
    missing = [i for i, example in enumerate(out) if example is None]
    for i, example in zip(missing, self.source.read(indices[missing]), strict=True):
      out[i] = example
      if 'error' not in example:  # which may pass
        self._kept.put(int(indices[i]), example, len(example['image']))
    return out


class DecodedCache(View):
  """Keeps pixels, and hands them out in the place of encoded images.

  `read` gives a kept example as {'pixels': bytes, 'shape': (h, w, C), 'label', ...},
  without an 'image'; `preprocess` takes either.
  """

  def __init__(self, source: Source, preprocess: Preprocess, size: int):
    """Raises UserError where the pipeline has no fixed pixels to keep."""
    super().__init__(source)
    self.preprocess = Resumed(preprocess, self)
    self._kept = _Bounded(size)
    self._waiting: dict[int, dict] = {}  # for their pixels: labels of examples read

  def read(self, indices: np.ndarray) -> list[dict]:
    indices = np.asarray(indices)
    out = [self._kept.get(int(i)) for i in indices]
    missing = [i for i, example in enumerate(out) if example is None]
    for i, example in zip(missing, self.source.read(indices[missing]), strict=True):
      out[i] = example
      if 'error' not in example and not self._kept.full:
        other = {key: value for key, value in example.items() if key != 'image'}
        self._waiting[int(indices[i])] = other
    return out

  def keep(self, number, pixels) -> bool:
    """Keeps the pixels uint8 [h, w, C] of an example that was read; returns True."""
    other = self._waiting.pop(int(number), None)
    if other is not None:
      # A copy: the array is TensorFlow's.
      value = {**other, 'pixels': pixels.tobytes(), 'shape': pixels.shape}
      self._kept.put(int(number), value, pixels.nbytes)
    return True


class Resumed:
  """A `Preprocess` that has its image from a `DecodedCache`, or puts it there.

  The ops in front of the first that draws random numbers, or maps more than the image,
  are run once; with pixels of the cache the others are taken up after them.
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
    # What an op would map besides, such as boxes, may not be there.
    alone = lambda op: not {*op.maps} & ({*preprocess.inputs} - {'image'})
    once = (not op.draws and alone(op) for op in ops)
    self._fixed = next((i for i, fixed in enumerate(once) if not fixed), len(ops))
    # A crop right after `decode` decodes no more than itself: whole photographs in
    # memory would be ten times the size of their files, and decoding them slower.
    if self._fixed == 1 and any(op.crop for op in ops[1:2]):
      raise UserError(
        f"cache='decoded': in pp {preprocess.pp!r} the random {ops[1].text} follows "
        "decode at once, so there are no fixed pixels to keep. Use cache='raw', or put "
        "a resize before it: 'decode|resize_small(256)|...'."
      )

  @property
  def spec(self) -> dict:
    return self._whole.spec

  def traced(self):
    """Returns `self`, untraced: a graph that holds this cache cannot be shared."""
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
      given = {name: row[name] for name in head.inputs}
      pixels = head.traced()(given, u)['image']
      kept = tf.numpy_function(self._cache.keep, [row['number'], pixels], tf.bool)
      with tf.control_dependencies([kept]):
        return tf.identity(pixels)

    def again():
      return tf.reshape(tf.io.decode_raw(row['image'], tf.uint8), row['shape'])

    pixels = tf.cond(row['shape'][0] > 0, again, decode)
    return tail.resume(tf.ensure_shape(pixels, spec), row, u)

  @functools.cached_property
  def _halves(self) -> tuple:
    """Returns the ops before and after what is kept, and the shape of that."""
    tf = lazy_tf.load()
    for at in range(self._fixed, 0, -1):  # `decode` alone gives uint8
      head, tail = self._whole.parts(at)
      kept = head.traced().structured_outputs['image']
      if kept.dtype == tf.uint8:
        break
    return head, tail, kept.shape
